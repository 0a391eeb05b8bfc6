"""Credit: bound on what a peer may send for collectives that are not posted here.

Chunks of a posted collective can always be absorbed, and cost nothing. Chunks of one that is not posted yet must be
stored, so each link has a window of payload bytes and of headers for them. Both ends count: the sender spends, the
receiver returns what it could match, and closes the link of a sender that overdraws.

A sender without credit keeps the chunk and asks for a notice when the collective is posted. So no reader ever waits for
a post, and a window of any size, even zero, can delay but never block a world. (With plain back-pressure in place of
credit, a model of two-lane rings deadlocked in 20 of 20 runs.)
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
"""Bound on the early chunks of all peers together, as long as each has the default."""


def credit_of(size: int) -> Credit:
    """Return the credit of each link in a world of ``size`` ranks; both ends compute the same.

    Few peers get more each: a rank that posts a whole model's gradients at once runs out of a small window, and a chunk
    without credit costs a question, an answer and a second try.
    """
    nbytes = ALL_CREDIT_NBYTES // max(1, size - 1)
    return Credit(max(DEFAULT_CREDIT.nbytes, nbytes), DEFAULT_CREDIT.headers)


class SendWindow:
    """Sender's side: what it may still send unasked."""

    __slots__ = ("headers", "nbytes")

    def __init__(self, credit: Credit) -> None:
        self.nbytes = credit.nbytes
        self.headers = credit.headers

    def allows(self, nbytes: int) -> bool:
        """Return whether there is enough for a header and ``nbytes``."""
        return self.headers > 0 and self.nbytes >= nbytes

    def take(self, nbytes: int) -> bool:
        """Spend a header and ``nbytes``, if there is enough of both."""
        if nbytes > self.nbytes or self.headers <= 0:
            return False
        self.nbytes -= nbytes
        self.headers -= 1
        return True

    def give(self, nbytes: int, headers: int) -> None:
        """Add what the receiver has returned."""
        self.nbytes += nbytes
        self.headers += headers


class ReceiveWindow:
    """Receiver's side: what the peer has spent, and what is owed to it.

    Attributes:
        owed_headers: headers owed; while it is 0, ``settle`` returns None.
    """

    __slots__ = ("_credit", "_owed_nbytes", "_spent_headers", "_spent_nbytes", "owed_headers")

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._spent_nbytes = 0
        self._spent_headers = 0
        self._owed_nbytes = 0
        self.owed_headers = 0

    def charge(self, nbytes: int) -> bool:
        """Charge a header and ``nbytes`` to the peer; False if it overdraws."""
        self._spent_nbytes += nbytes
        self._spent_headers += 1
        return self._spent_nbytes <= self._credit.nbytes and self._spent_headers <= self._credit.headers

    def matched(self, nbytes: int) -> None:
        """Owe the peer the credit of a charged chunk that is stored no longer."""
        self._owed_nbytes += nbytes
        self.owed_headers += 1

    def pass_on(self, nbytes: int) -> bool:
        """``charge`` and ``matched`` in one, for a chunk that is absorbed at once."""
        self._spent_nbytes += nbytes
        self._spent_headers += 1
        self._owed_nbytes += nbytes
        self.owed_headers += 1
        return self._spent_nbytes <= self._credit.nbytes and self._spent_headers <= self._credit.headers

    def settle(self) -> Credit | None:
        """Return everything owed, once it is a quarter of the window: fewer, larger answers; else None.

        Waiting for a quarter is safe: a sender without credit asks for the post instead of waiting for credit.
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
