"""What the two ends of a data link tell each other beside chunks: what numbers stand for, and what was lost.

And what may be sent to a rank before it has posted: as much as it has given credit for; the rest asks, and waits.

A link that breaks loses frames, and neither end can say which. Its *sender* decides what that means, when it learns of
the break. A collective is affected if it was posted by then, under a name that was defined on the link. Nothing that is
posted later is affected. The sender fails those of the affected that it has in flight. Those that it has completed may
still be in flight at the receiver, and wait there for a chunk that was lost: a collective that completes anywhere has
been posted everywhere (see ``program``). So the next link begins by defining these names again, each with the sequence
number below which a broken link may have lost something. The receiver fails those below it that wait for the sender.

A rank that leaves a group says so (``LEFT``) on every link on which it has defined names of it, after all that it has
sent for it: so both ends can forget them, and what waits for it there waits in vain. The next link after one that broke
says it again.

Invariants: when, how often and in which order the two ends hear of a break changes nothing. The receiver
fails nothing by itself; if it is the first to notice, it asks the sender to notice too (``LINKS``), by the number
of the link, so that late or repeated news never concerns a newer one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kfcomm.core.collective import MAX_LEFT, AnySignature, Collective, Key, Series
from kfcomm.core.credit import DEFAULT_CREDIT, Credit, ReceiveWindow, SendWindow
from kfcomm.core.frame import Header, Kind
from kfcomm.core.machine import SEND, Effect
from kfcomm.core.program import Route

LINKS = b""
"""In place of a group's id, in an abort: link number ``seq`` from rank ``name`` to rank ``cause.rank`` is broken."""

KEY, SIGNATURE, OPEN = int(Kind.KEY), int(Kind.SIGNATURE), int(Kind.OPEN)
CHUNK, ASK, LEFT = int(Kind.CHUNK), int(Kind.ASK), int(Kind.LEFT)


class Arrival:
    """What one link brings of one series on one lane: found by the numbers in a chunk's header.

    Attributes:
        series: the series.
        live: the uses of its name in flight.
        route: of the program.
        posted: the bit of the sender; see ``Collective``.
        last, last_nbytes, nbytes: the number of the last chunk, its size, and that of the others.
    """

    __slots__ = ("last", "last_nbytes", "live", "nbytes", "posted", "route", "series")

    def __init__(self, series: Series, route: Route, sender: int) -> None:
        program, sizes, lane = series.program, series.sizes, route.lane
        item = sizes.partial if route.is_partial else sizes.item
        self.series = series
        self.live = series.key.live
        self.route = route
        self.posted = 1 << sender
        self.last = lane.num_chunks - 1
        self.nbytes = program.chunk_elements * item
        self.last_nbytes = lane.count * item - self.last * self.nbytes


class Incoming:
    """The receiving end of a link from ``peer`` (world rank): its names, and its credit.

    Attributes:
        number: what the peer calls this link; 0 until it has said so.
        arrivals: by the numbers of key, signature and lane, and the phase: what is known of such chunks.
        given_up: numbers of keys below this one may have stood for others, of groups that the peer has left.
    """

    __slots__ = ("arrivals", "asks", "given_up", "keys", "number", "peer", "signatures", "window")

    def __init__(self, peer: int, credit: Credit = DEFAULT_CREDIT) -> None:
        self.peer = peer
        self.number = 0
        self.window = ReceiveWindow(credit)
        self.keys: dict[int, Key] = {}
        self.signatures: dict[int, AnySignature] = {}
        self.arrivals: dict[tuple[int, int, int, int], Arrival] = {}
        self.asks = 0
        self.given_up = 0

    def forget(self, group_id: bytes) -> None:
        """The peer has left a group. O(names on this link)."""
        numbers = {number for number, key in self.keys.items() if key.group_id == group_id}
        for number in numbers:
            del self.keys[number]
        for known in [known for known in self.arrivals if known[0] in numbers]:
            del self.arrivals[known]
        self.given_up = max(self.given_up, 1 + max(numbers, default=-1))


class Outgoing:
    """The sending end of a link to ``peer`` (world rank): what was defined on it, and our credit.

    Attributes:
        number: of all links to this peer.
        former: keys that were defined on it, and whose numbers stand for others now.
        known: what may be sent without defining anything first.
        left: the latest groups of which the peer was told that this rank has left them.
    """

    __slots__ = ("former", "keys", "known", "left", "number", "peer", "signatures", "window")
    arrivals: Mapping[tuple[int, int, int, int], Arrival] = MappingProxyType({})  # nothing is received

    def __init__(self, peer: int, credit: Credit = DEFAULT_CREDIT, number: int = 0) -> None:
        self.peer = peer
        self.number = number
        self.window = SendWindow(credit)
        self.keys: dict[int, Key] = {}
        self.former: list[Key] = []
        self.known: set[Series] = set()
        self.left: deque[bytes] = deque(maxlen=MAX_LEFT)
        self.signatures: dict[int, AnySignature] = {}

    def forget(self, group_id: bytes) -> bool:
        """This rank has left a group; whether anything was defined for it. O(names on this link)."""
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
    """What came for a collective before it was posted."""

    __slots__ = ("asks", "collective", "dropped", "items", "signature")

    def __init__(self, signature: AnySignature | None) -> None:
        self.signature = signature
        self.items: list[EarlyItem] = []
        self.asks: list[tuple[Incoming, AnySignature, Header]] | None = None
        self.collective: Collective | None = None
        self.dropped = False


EarlyItem = tuple[Incoming, AnySignature, Header, int, Any]
"""A chunk that came early: from where, its signature, its header, its size and its payload."""


class Links:
    """The links that one rank opens: it numbers them, and knows what the next one to each peer has to tell."""

    __slots__ = ("_left", "_numbers", "_untold")

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._untold: dict[int, dict[Key, int]] = {}
        self._left: dict[int, deque[bytes]] = {}

    def open(self, peer: int, credit: Credit = DEFAULT_CREDIT) -> tuple[Outgoing, list[Header]]:
        """The sending end of a new link, and the frames that come first on it. O(names that broken ones knew)."""
        number = self._numbers[peer] = self._numbers.get(peer, 0) + 1
        outgoing = Outgoing(peer, credit, number)
        untold = self._untold.pop(peer, {})
        outgoing.left = self._left.pop(peer, outgoing.left)
        left = [(LEFT, group_id) for group_id in outgoing.left]
        return outgoing, [(OPEN, number), *(_define(outgoing, key, below) for key, below in untold.items()), *left]

    def broke(self, outgoing: Outgoing) -> None:
        """A link is broken, or came to nothing: what this rank has posted under its names may have been on it."""
        known = [*outgoing.former, *outgoing.keys.values()]
        if known:
            self._untold.setdefault(outgoing.peer, {}).update((key, key.next_seq) for key in known)
        if outgoing.left:
            self._left[outgoing.peer] = outgoing.left

    def owes(self, peer: int) -> bool:
        """Whether the next link to a peer has something to tell, whether or not anything is sent on it."""
        return peer in self._untold or peer in self._left

    def forget(self, peer: int) -> None:
        """A peer is gone: there is nobody to tell."""
        self._untold.pop(peer, None)
        self._left.pop(peer, None)


def definitions(outgoing: Outgoing, collective: Collective) -> list[Header]:
    """What a link has to be told before it is sent anything of this collective."""
    defined: list[Header] = []
    series = collective.series
    key, number, signature = series.key, series.signature_id, series.signature
    if outgoing.keys.get(key.id) is not key:
        defined.append(_define(outgoing, key, 0))
    if outgoing.signatures.get(number) is not signature:
        if number in outgoing.signatures:
            outgoing.known.clear()
        outgoing.signatures[number] = signature
        defined.append((SIGNATURE, number, list(signature)))
    outgoing.known.add(series)
    return defined


def _define(outgoing: Outgoing, key: Key, below: int) -> Header:
    former = outgoing.keys.get(key.id)
    if former is not None:
        outgoing.former.append(former)
        outgoing.known.clear()
    outgoing.keys[key.id] = key
    return (KEY, key.id, key.group_id, key.name, below)


def admit(
    outgoing: Outgoing, effect: Effect, collective: Collective, to: int, nbytes: int
) -> tuple[list[Header], Header | None]:
    """Frames for one destination of a SEND effect: definitions to send first, and the chunk's header.

    None for the header holds the chunk back: a SEND of it alone comes again when its receiver has posted, through the
    effects of ``Router.on_posted``.
    """
    _, _, _, lane, index, phase, source, payload = effect
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
        waiting.append((SEND, collective, (to,), lane, index, phase, source, payload))
        return before, None
    stamp = collective.stamp + charged
    return before, (CHUNK, key_id, collective.seq, number, lane.number, phase, index, stamp)


def may_send(outgoing: Outgoing, collective: Collective, to: int, nbytes: int) -> bool:
    """Whether ``admit`` lets a chunk of so many bytes go at once."""
    if collective.posted >> to & 1:
        return True
    return not (collective.deferred and to in collective.deferred) and outgoing.window.allows(nbytes)


def announce(outgoing: Outgoing, collective: Collective) -> list[Header]:
    """Frames that tell one of ``collective.unheard()`` what this rank has posted.

    For a collective that has waited a while: ranks that disagree about the graph can all wait for each other
    without a chunk between them (as two that both believe to be the root). Neighbours in a graph form one
    piece, so if each rank announces itself to its own, at least two that differ will meet.
    """
    series = collective.series
    ask = (ASK, series.key_id, collective.seq, series.signature_id, collective.generation)
    return [*definitions(outgoing, collective), ask]
