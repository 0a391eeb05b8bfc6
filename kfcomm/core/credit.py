"""Credit: how much a peer may send for collectives that have not been posted here.

Chunks of a posted collective can always be absorbed, and cost nothing. Chunks of one that is not posted yet
must be kept, so each link has a window of payload bytes and of headers for them. Both ends count: the sender
spends, the receiver gives back what it could match, and holds the sender to the window.

A sender without credit keeps the chunk and asks to be told when the collective is posted. So no reader ever
waits for a post, and a window of any size, even none at all, can delay but never block a world.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Credit:
    """An amount: payload bytes, and headers (chunks)."""

    nbytes: int
    headers: int


DEFAULT_CREDIT = Credit(nbytes=4 << 20, headers=8192)
"""Per link, among many ranks."""
ALL_CREDIT_NBYTES = 64 << 20
"""What all peers together can pile up here, while that leaves each the default."""


def credit_of(size: int) -> Credit:
    """The credit of each link in a world of ``size`` ranks; the two ends come to the same by themselves.

    Few peers get more each: who posts a whole model's gradients at once runs out of little credit, and a chunk that
    has to be asked for takes a question, an answer and a second try.
    """
    nbytes = ALL_CREDIT_NBYTES // max(1, size - 1)
    return Credit(max(DEFAULT_CREDIT.nbytes, nbytes), DEFAULT_CREDIT.headers)


class SendWindow:
    """The sender's side: what it may still send unasked."""

    __slots__ = ("headers", "nbytes")

    def __init__(self, credit: Credit) -> None:
        self.nbytes = credit.nbytes
        self.headers = credit.headers

    def allows(self, nbytes: int) -> bool:
        """Whether there is enough for a header and ``nbytes``."""
        return self.headers > 0 and self.nbytes >= nbytes

    def take(self, nbytes: int) -> bool:
        """Spend a header and ``nbytes``, if there is enough of both."""
        if nbytes > self.nbytes or self.headers <= 0:
            return False
        self.nbytes -= nbytes
        self.headers -= 1
        return True

    def give(self, nbytes: int, headers: int) -> None:
        """The receiver has given this back."""
        self.nbytes += nbytes
        self.headers += headers


class ReceiveWindow:
    """The receiver's side: what the peer has spent, and what is owed back to it.

    Attributes:
        owed_headers: how many are owed, before which ``settle`` has nothing to say.
    """

    __slots__ = ("_credit", "_owed_nbytes", "_spent_headers", "_spent_nbytes", "owed_headers")

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._spent_nbytes = 0
        self._spent_headers = 0
        self._owed_nbytes = 0
        self.owed_headers = 0

    def charge(self, nbytes: int) -> bool:
        """The peer spent a header and ``nbytes``; False if it had not that much."""
        self._spent_nbytes += nbytes
        self._spent_headers += 1
        return self._spent_nbytes <= self._credit.nbytes and self._spent_headers <= self._credit.headers

    def matched(self, nbytes: int) -> None:
        """A charged chunk needs no room any more: its credit is owed back."""
        self._owed_nbytes += nbytes
        self.owed_headers += 1

    def pass_on(self, nbytes: int) -> bool:
        """``charge`` and ``matched`` of a chunk that needs no room."""
        self._spent_nbytes += nbytes
        self._spent_headers += 1
        self._owed_nbytes += nbytes
        self.owed_headers += 1
        return self._spent_nbytes <= self._credit.nbytes and self._spent_headers <= self._credit.headers

    def settle(self) -> Credit | None:
        """What to give back now: all that is owed, once it is a quarter of the window (fewer, larger answers).

        Waiting for a quarter is safe: a sender without credit does not wait for credit, it asks for the post.
        """
        credit = self._credit
        if self.owed_headers * 4 < credit.headers and self._owed_nbytes * 4 < credit.nbytes:
            return None
        if not self.owed_headers:
            return None
        owed = Credit(self._owed_nbytes, self.owed_headers)
        self._spent_nbytes -= owed.nbytes
        self._spent_headers -= owed.headers
        self._owed_nbytes = self.owed_headers = 0
        return owed
