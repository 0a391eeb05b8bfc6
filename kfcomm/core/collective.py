"""The records that the router keeps: groups, names, posted collectives, early arrivals, and the ends of links.

They hold state and answer questions about it; what happens to them is decided in ``core.router``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kfcomm.core.credit import DEFAULT_CREDIT, Credit, ReceiveWindow, SendWindow
from kfcomm.core.frame import Header
from kfcomm.core.machine import UP, Effect, Effects, Machine
from kfcomm.core.program import Lane, Program

AnySignature = tuple[Any, ...]
"""A ``Signature``, or whatever a peer sent in its place."""


@dataclass(frozen=True, eq=False)
class GroupView:
    """A group as one of its members sees it: world ranks in group order.

    Attributes:
        id: the same bytes on every member, different for every group that ever was.
        members: world rank of each group rank.
        rank: this process's group rank.
        index: group rank by world rank.
    """

    id: bytes
    members: tuple[int, ...]
    rank: int
    index: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {world: rank for rank, world in enumerate(self.members)})

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)


class Key:
    """A name in a group, and everything that is going on under it.

    Attributes:
        tally: a slot for whoever counts; the core never looks at it.
    """

    __slots__ = ("early", "group_id", "id", "live", "name", "next_seq", "tally")

    def __init__(self, number: int, group_id: bytes, name: str) -> None:
        self.id = number
        self.group_id = group_id
        self.name = name
        self.next_seq = 0
        self.live: dict[int, Collective] = {}
        self.early: dict[int, Early] = {}
        self.tally: Any = None


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes per element of a collective's chunks."""

    item: int
    partial: int


class Collective(Machine):
    """A machine with a name: posted, and not complete.

    Whoever posts may derive from it and hand in what is still to ``begin``, so that effects name their own.

    Attributes:
        posted: bit r is set once group rank r is known to have posted it.
        deferred: by rank, sends that wait for the word that it has posted; None while nothing ever waited.
    """

    __slots__ = ("deferred", "group", "key", "posted", "seq", "signature", "signature_id", "sizes")

    def __init__(self) -> None:
        """Nothing yet: see ``begin``."""

    def begin(
        self, program: Program, group: GroupView, key: Key, signature: tuple[int, AnySignature], sizes: ItemSizes
    ) -> None:
        """Take the name, and the number that is the key's next."""
        self.program = program
        self.remaining = num_slots = program.num_slots
        self.sends = 0
        self.finished = False
        self._gate = program.gate
        self._folded = bytearray(num_slots) if program.small_counts else [0] * num_slots
        self._held = None
        self.group = group
        self.key = key
        self.seq = key.next_seq
        self.signature_id, self.signature = signature
        self.sizes = sizes
        self.posted = 1 << group.rank
        self.deferred: dict[int, list[Effect]] | None = None

    @property
    def name(self) -> str:
        """The name under which it was posted."""
        return self.key.name

    @property
    def title(self) -> str:
        """The name, for people."""
        return shown(self.key.name)

    def take(
        self, number: int, index: int, phase: int, sender: int, nbytes: int, payload: Any, effects: Effects
    ) -> bool:
        """A chunk is here as a whole: take it if it may come now (see ``accepts``) and has the right size."""
        route = self.program.routes.get((number, phase, sender))
        if route is None:
            return False
        lane, position, is_partial = route
        count = lane.count
        if lane.num_chunks != 1:
            if index >= lane.num_chunks:
                return False
            chunk = self.program.chunk_elements
            count = min(chunk, count - index * chunk)
        elif index:
            return False
        sizes = self.sizes
        if nbytes != count * (sizes.partial if is_partial else sizes.item):
            return False
        slot = lane.base + index
        folded = self._folded[slot]
        if phase:
            if folded != len(lane.children):
                return False
            self._arrived_down(lane, index, payload, effects)
        else:
            if position < folded or (self._held and (slot, position) in self._held):
                return False
            self._arrived_up(lane, index, position, payload, effects)
        if not self.remaining:
            self._check(effects)
        return True

    def nbytes_expected(self, lane: Lane, index: int, phase: int, position: int) -> int:
        """Size of a chunk that comes from the child at ``position``, or down."""
        chunk = self.program.chunk_elements
        count = lane.count if lane.num_chunks == 1 else min(chunk, lane.count - index * chunk)
        return count * (self.sizes.item if phase != UP or lane.leaf_children[position] else self.sizes.partial)

    def nbytes_sent(self, number: int, index: int, phase: int) -> int:
        """Size of a chunk that this rank sends on lane ``number``."""
        lane = self.program.lanes[number]
        count = min(self.program.chunk_elements, lane.count - index * self.program.chunk_elements)
        return count * (self.sizes.partial if phase == UP and lane.children else self.sizes.item)

    def arrived_ranks(self) -> tuple[int, ...]:
        """Group ranks known to have posted it, this one included."""
        return tuple(rank for rank in range(self.group.size) if self.posted >> rank & 1)

    def unheard(self) -> tuple[int, ...]:
        """Neighbours not known to have posted it, as group ranks: whom to announce it to when it waits long."""
        return tuple(rank for rank in sorted(self.program.neighbours) if not self.posted >> rank & 1)

    def missing_ranks(self) -> tuple[int, ...]:
        """Group ranks not known to have posted it."""
        return tuple(rank for rank in range(self.group.size) if not self.posted >> rank & 1)


class Early:
    """What came for a collective before it was posted."""

    __slots__ = ("asks", "collective", "dropped", "items", "signature")

    def __init__(self, signature: AnySignature | None) -> None:
        self.signature = signature
        self.items: list[EarlyItem] = []
        self.asks: list[tuple[Incoming, AnySignature, Header]] | None = None
        self.collective: Collective | None = None
        self.dropped = False


class Incoming:
    """The receiving end of a link from ``peer`` (world rank): its names, and its credit.

    Attributes:
        number: what the peer calls this link; 0 until it has said so.
    """

    __slots__ = ("asks", "keys", "number", "peer", "signatures", "window")

    def __init__(self, peer: int, credit: Credit = DEFAULT_CREDIT) -> None:
        self.peer = peer
        self.number = 0
        self.window = ReceiveWindow(credit)
        self.keys: dict[int, Key] = {}
        self.signatures: dict[int, AnySignature] = {}
        self.asks = 0


class Outgoing:
    """The sending end of a link to ``peer`` (world rank): what was defined on it, and our credit.

    Attributes:
        number: of all links to this peer.
        former: keys that were defined on it, and whose numbers stand for others now.
    """

    __slots__ = ("former", "keys", "number", "peer", "signatures", "window")

    def __init__(self, peer: int, credit: Credit = DEFAULT_CREDIT, number: int = 0) -> None:
        self.peer = peer
        self.number = number
        self.window = SendWindow(credit)
        self.keys: dict[int, Key] = {}
        self.former: list[Key] = []
        self.signatures: dict[int, AnySignature] = {}


EarlyItem = tuple[Incoming, AnySignature, Header, int, Any]
"""A chunk that came early: from where, its signature, its header, its size and its payload."""


def shown(key: str) -> str:
    """A key as people know it: keys of further steps hold a NUL, that of unnamed calls is empty."""
    name, _, step = key.partition("\0")
    return f"{name!r}{step and f' ({step})'}" if name else f"an unnamed collective{step and f' ({step})'}"
