"""Data links as the core sees them: numbers for names, credit, and recovery from a break.

Names and signatures travel once per link; later frames use the numbers that they were given. Before a rank has posted,
a sender may send it as much as its credit allows; the rest waits until the rank answers an ASK with POSTED.

A link that breaks loses frames, and neither end knows which. Its *sender* decides what that means, when it learns of
the break. A collective is affected if it was posted by then, under a name that was defined on the link; later posts are
not. The sender fails the affected collectives that it has in flight. Those that it has completed may still be in
flight at the receiver, and wait there for a lost chunk: a collective that completes anywhere has been posted everywhere
(see ``program``). So the next link begins by defining these names again, each with the sequence number below which a
broken link may have lost something. The receiver fails those below it that wait for the sender.

A rank that leaves a group sends LEFT on every link on which it has defined names of the group, after its last frame for
it. Both ends then forget the names, and collectives that still wait for that rank fail. The first link after a break
repeats LEFT.

Invariants: the result does not depend on when, how often and in which order the two ends hear of a break. The receiver
fails nothing by itself. If it notices first, it tells the sender (``LINKS``) the number of the link, so that late or
repeated news never concerns a newer link.

*Credit* bounds what a peer may send for collectives that are not posted here. Chunks of a posted collective can always
be absorbed, and cost nothing. Chunks of one that is not posted yet must be stored, so each link has a window of payload
bytes and of headers for them. Both ends count: the sender spends, the receiver returns what it could match, and closes
the link of a sender that overdraws.

A sender without credit keeps the chunk and asks for a notice when the collective is posted. So no reader ever waits for
a post. A small window, even of zero bytes, can delay a world but never block it. (With plain back-pressure instead of
credit, a model of two-lane rings deadlocked in 20 of 20 runs.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kfcomm.core.collective import MAX_LEFT, AnySignature, Collective, Key, Series
from kfcomm.core.frame import Header, Kind
from kfcomm.core.program import LaneRoute


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
    """Return the credit of each link in a world of ``size`` ranks; both ends compute the same."""
    # Few peers get more each: a rank that posts a whole model's gradients at once runs out of a small window, and a
    # chunk without credit costs a question, an answer and a second try.
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
    """Receiver's side: what the peer has spent, and what is owed to it."""

    __slots__ = ("_credit", "_owed_nbytes", "_spent_headers", "_spent_nbytes", "owed_headers")

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._spent_nbytes = 0
        self._spent_headers = 0
        self._owed_nbytes = 0
        self.owed_headers = 0  # while it is 0, ``settle`` returns None: hot paths look here first

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
        """Return everything owed, once it is a quarter of the window: fewer, larger answers; else None."""
        # Waiting for a quarter is safe: a sender without credit asks for the post instead of waiting for credit.
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


LINKS = b""
"""In place of a group's id, in an abort: link number ``seq`` from rank ``name`` to rank ``cause.rank`` is broken."""

KEY, SIGNATURE, OPEN = int(Kind.KEY), int(Kind.SIGNATURE), int(Kind.OPEN)
CHUNK, ASK, LEFT = int(Kind.CHUNK), int(Kind.ASK), int(Kind.LEFT)


class Arrival:
    """Checked facts about the chunks of one series that one link brings on one lane."""

    __slots__ = ("last", "last_nbytes", "live", "nbytes", "posted", "route", "sender", "series")

    def __init__(self, series: Series, route: LaneRoute, sender: int) -> None:
        program, sizes, lane = series.program, series.sizes, route.lane
        item = sizes.partial if route.is_partial else sizes.item
        self.series = series
        self.live = series.key.live
        self.route = route
        self.sender = sender  # group rank
        self.posted = 1 << sender  # its bit in ``Collective.posted``
        self.last = lane.num_chunks - 1
        self.nbytes = program.chunk_elements * item
        self.last_nbytes = lane.count * item - self.last * self.nbytes


class Incoming:
    """Receiving end of a link from ``peer`` (world rank): its names, and its credit."""

    __slots__ = ("arrivals", "asks", "given_up", "keys", "number", "peer", "signatures", "window")

    def __init__(self, peer: int, credit: Credit = DEFAULT_CREDIT) -> None:
        self.peer = peer
        self.number = 0  # the peer's number of this link; 0 until it has sent it
        self.window = ReceiveWindow(credit)
        self.keys: dict[int, Key] = {}
        self.signatures: dict[int, AnySignature] = {}
        self.arrivals: dict[tuple[int, int, int, int], Arrival] = {}  # by numbers of key, signature, lane and phase
        self.asks = 0
        self.given_up = 0  # lower numbers may have meant keys of groups that the peer has left

    def forget(self, group_id: bytes) -> None:
        """Forget the names of a group that the peer has left. O(names on this link)."""
        numbers = {number for number, key in self.keys.items() if key.group_id == group_id}
        for number in numbers:
            del self.keys[number]
        for known in [known for known in self.arrivals if known[0] in numbers]:
            del self.arrivals[known]
        self.given_up = max(self.given_up, 1 + max(numbers, default=-1))


class Outgoing:
    """Sending end of a link to ``peer`` (world rank): definitions made on it, and credit of this rank."""

    __slots__ = ("former", "keys", "known", "left", "number", "peer", "signatures", "window")
    arrivals: Mapping[tuple[int, int, int, int], Arrival] = MappingProxyType({})  # nothing is received

    def __init__(self, peer: int, credit: Credit = DEFAULT_CREDIT, number: int = 0) -> None:
        self.peer = peer
        self.number = number  # among all links to this peer
        self.window = SendWindow(credit)
        self.keys: dict[int, Key] = {}
        self.former: list[Key] = []  # keys that were defined on it, and whose numbers mean other keys now
        self.known: set[Series] = set()  # may be sent without a definition first
        self.left: deque[bytes] = deque(maxlen=MAX_LEFT)  # groups that this rank has left, as the peer knows
        self.signatures: dict[int, AnySignature] = {}

    def forget(self, group_id: bytes) -> bool:
        """Forget a group that this rank has left; whether anything was defined for it. O(names on this link)."""
        numbers = [number for number, key in self.keys.items() if key.group_id == group_id]
        if not numbers:
            return False
        for number in numbers:
            del self.keys[number]
        self.former = [key for key in self.former if key.group_id != group_id]
        self.known = {series for series in self.known if series.key.group_id != group_id}
        self.left.append(group_id)
        return True


class Early:
    """Chunks and questions that arrived for a collective before it was posted."""

    __slots__ = ("asks", "collective", "dropped", "items", "signature")

    def __init__(self, signature: AnySignature | None) -> None:
        self.signature = signature
        self.items: list[EarlyItem] = []
        self.asks: list[tuple[Incoming, AnySignature, Header]] | None = None
        self.collective: Collective | None = None
        self.dropped = False


Shown = tuple[Incoming, AnySignature, Header, int]
"""A chunk by its header: its link, signature, header and size."""
EarlyItem = tuple[Incoming, AnySignature, Header, int, Any]
"""A chunk that arrived early: as ``Shown``, and its payload."""


class Links:
    """Links that one rank opens: their numbers, and the frames that the next one to each peer must begin with."""

    __slots__ = ("_left", "_numbers", "_untold")

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._untold: dict[int, dict[Key, int]] = {}
        self._left: dict[int, deque[bytes]] = {}

    def open(self, peer: int, credit: Credit = DEFAULT_CREDIT) -> tuple[Outgoing, list[Header]]:
        """Return the sending end of a new link, and its first frames. O(names that were defined on broken ones)."""
        number = self._numbers[peer] = self._numbers.get(peer, 0) + 1
        outgoing = Outgoing(peer, credit, number)
        untold = self._untold.pop(peer, {})
        outgoing.left = self._left.pop(peer, outgoing.left)
        left = [(LEFT, group_id) for group_id in outgoing.left]
        return outgoing, [(OPEN, number), *(_define(outgoing, key, below) for key, below in untold.items()), *left]

    def broke(self, outgoing: Outgoing) -> None:
        """Record that a link is broken or never opened: posts under its names may have been lost with it."""
        # Only what was posted by now may have been lost: later posts go over the next link.
        known = [*outgoing.former, *outgoing.keys.values()]
        if known:
            self._untold.setdefault(outgoing.peer, {}).update((key, key.next_seq) for key in known)
        if outgoing.left:
            self._left[outgoing.peer] = outgoing.left

    def owes(self, peer: int) -> bool:
        """Return whether the next link to a peer must be opened for its first frames alone."""
        return peer in self._untold or peer in self._left

    def forget(self, peer: int) -> None:
        """Forget a peer that is gone."""
        self._untold.pop(peer, None)
        self._left.pop(peer, None)


def definitions(outgoing: Outgoing, collective: Collective) -> list[Header]:
    """Return the definitions that must precede the frames of this collective on a link."""
    defined: list[Header] = []
    series = collective.series
    key, number, signature = series.key, series.signature_id, series.signature
    if outgoing.keys.get(key.id) is not key:
        defined.append(_define(outgoing, key, 0))
    if outgoing.signatures.get(number) is not signature:
        # The number means another signature from here on: series with the old one must be defined again.
        if number in outgoing.signatures:
            outgoing.known.clear()
        outgoing.signatures[number] = signature
        defined.append((SIGNATURE, number, list(signature)))
    outgoing.known.add(series)
    return defined


def _define(outgoing: Outgoing, key: Key, below: int) -> Header:
    former = outgoing.keys.get(key.id)
    if former is not None:
        # Its chunks may still be on the link: if that breaks, its uses are affected as well.
        outgoing.former.append(former)
        outgoing.known.clear()
    outgoing.keys[key.id] = key
    return (KEY, key.id, key.group_id, key.name, below)


def admit(
    outgoing: Outgoing, collective: Collective, to: int, chunk: tuple[Any, ...], nbytes: int
) -> tuple[list[Header], Header | None]:
    """Return the definitions to send before a chunk to one destination, and its header; None if it has to wait."""
    # A chunk without credit waits for the post of its receiver, upon which the router emits RESUME.
    lane, index, phase, _, _ = chunk
    series = collective.series
    key_id, number = series.key_id, series.signature_id
    before = [] if series in outgoing.known else definitions(outgoing, collective)
    if collective.posted >> to & 1:
        charged = 0
    elif not (collective.deferred and to in collective.deferred) and outgoing.window.take(nbytes):
        charged = 1
    else:
        if collective.deferred is None:
            collective.deferred = {}
        waiting = collective.deferred.setdefault(to, [])
        if not waiting:
            before.append((ASK, key_id, collective.seq, number, collective.generation))
        waiting.append(((to,), *chunk))
        return before, None
    stamp = collective.stamp + charged
    return before, (CHUNK, key_id, collective.seq, number, lane.number, phase, index, stamp)


def may_send(outgoing: Outgoing, collective: Collective, to: int, nbytes: int) -> bool:
    """Return whether ``admit`` lets a chunk of so many bytes go at once."""
    if collective.posted >> to & 1:
        return True
    return not (collective.deferred and to in collective.deferred) and outgoing.window.allows(nbytes)


def announce(outgoing: Outgoing, collective: Collective) -> list[Header]:
    """Return frames that announce this rank's post of a collective that waits to one of ``collective.unheard()``."""
    # Ranks that disagree about the graph can wait for each other without a chunk between them, such as two that both
    # believe to be the root. The neighbours of all ranks connect the group, so at least two that differ meet.
    series = collective.series
    ask = (ASK, series.key_id, collective.seq, series.signature_id, collective.generation)
    return [*definitions(outgoing, collective), ask]
