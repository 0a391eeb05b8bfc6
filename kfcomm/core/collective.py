"""Records of the router: groups, names and posted collectives.

They hold state and answer questions about it; `kfcomm.core.router` decides what happens to them. Records of the ends of
links are in `kfcomm.core.links`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kfcomm.core.machine import UP, CollectiveDriver, Machine
from kfcomm.core.program import Lane, LaneRoute, Program
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.core.links import Early
    from kfcomm.core.signature import Signature

AnySignature = tuple[Any, ...]
"""A ``Signature``, or the value that a peer sent in its place."""


MAX_LEFT = 1 << 10
"""Latest groups that were left whose names are still remembered."""


@dataclass(frozen=True, eq=False)
class GroupView:
    """A group as one of its members sees it."""

    id: bytes  # the same on every member, different for every group that ever was
    members: tuple[int, ...]  # world ranks, in group order
    rank: int  # group rank of this process
    within: GroupView | None = None  # for a pair that carries messages inside a group: that group, known to callers
    index: dict[int, int] = field(init=False)  # group rank by world rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {world: rank for rank, world in enumerate(self.members)})

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def known(self, rank: int) -> int:
        """Return the rank by which a caller knows a member: in this group, or in the group of its messages."""
        return rank if self.within is None else self.within.index[self.members[rank]]

    def called(self, rank: int) -> str:
        """Return a member in words: its world rank, and the rank that the caller knows if that differs."""
        world, known = self.members[rank], self.known(rank)
        return f"rank {world}" if known == world else f"rank {world} (group rank {known})"

    def all_called(self, ranks: Sequence[int], most: int = 16) -> str:
        """Return several members in words, as ``called``; at most ``most`` of them."""
        worlds, known = [self.members[rank] for rank in ranks], [self.known(rank) for rank in ranks]
        return f"ranks {_some(worlds, most)}" + (f" (group ranks {_some(known, most)})" if known != worlds else "")

    def titled(self, name: str) -> str:
        """Return the user-visible form of a name in this group."""
        if self.within is None or "\0" in name:
            return shown(name)
        return f"a message with {name} from {self.called(0)} to {self.called(1)}"


class Key:
    """A name in a group, with its uses: live, early and past."""

    __slots__ = (
        "begun", "early", "group_id", "has_ended", "id", "live", "name", "next_seq", "offers", "others",
        "series", "slots", "spoilt", "tally",
    )  # fmt: skip

    def __init__(self, number: int, group_id: bytes, name: str) -> None:
        self.id = number
        self.group_id = group_id
        self.name = name
        self.next_seq = 0
        self.spoilt = -1  # the latest use that failed here or was left out
        self.live: dict[int, Collective] = {}
        self.early: dict[int, Early] = {}
        self.series: Series | None = None  # of the latest uses
        # None at first: most names have one signature, and no slots.
        self.others: dict[int, Series] | None = None  # of earlier uses with another signature, by its number
        self.offers: dict[AnySignature, tuple[Any, ...]] | None = None  # shared-memory slots, until they are taken
        self.slots: dict[AnySignature, Any] | None = None  # that were taken; they outlive the series
        self.begun: Any = None  # a use that runs outside the router; it becomes live when it is asked to ``enter``
        self.tally: Any = None  # reserved for the engine's counters; the core never reads it
        self.has_ended = False  # this rank has left the group, and uses the name no more

    def end(self) -> None:
        """Forget what was prepared for further uses: this rank has left the group."""
        self.has_ended = True
        self.series = self.others = self.offers = self.slots = self.tally = None

    def spoil(self, seq: int) -> None:
        """Retire the slots of this name: a use has failed on this rank, or was left out."""
        # Peers that still wait for that use would take the token of a later use for it.
        self.spoilt = max(self.spoilt, seq)
        for slot in (self.slots or {}).values():
            slot.is_dead = True

    def find(self, seq: int) -> Collective | None:
        """Return the use with this number, if it is in flight."""
        if self.begun is not None:
            self.begun.enter()
        return self.live.get(seq)


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes per element of a collective's chunks."""

    item: int
    partial: int


class Post(NamedTuple):
    """A call as this rank posts it."""

    # A named tuple, not a dataclass: ten thousand names that are used once each make one of these each.
    group: GroupView
    name: str
    signature: Signature
    program: Program
    sizes: ItemSizes
    generation: int = 0  # of the strategy under which the program was made; the same on every rank
    # Further uses of the name may begin before earlier ones are complete; else a second use while the first is in
    # flight fails on every rank, and the first continues.
    overlapping: bool = False
    seq: int | None = None  # take this number, not below the next, and leave out those before it


class Series:
    """Common record of the uses of a name with one signature, prepared at the first use."""

    __slots__ = (
        "group", "is_known", "key", "key_id", "posted", "program", "signature", "signature_id", "sizes", "slot",
        "version",
    )  # fmt: skip

    def __init__(
        self, group: GroupView, key: Key, signature: tuple[int, AnySignature], program: Program, sizes: ItemSizes
    ) -> None:
        self.group = group
        self.key = key
        self.key_id = key.id
        self.signature_id, self.signature = signature
        self.program = program
        self.sizes = sizes
        self.posted = 1 << group.rank  # with which each use begins
        self.version = 0  # of `Names`; once that differs, the numbers of key and signature may mean others
        self.slot: Any = None  # of ``key.slots``, which carries the uses without messages; None for links
        self.is_known = False  # it was used before; maintained by the table of slots


class Shortcut(Protocol):
    """Way in which a collective exchanges data with some of its peers without chunks, while all of them take it."""

    def covers(self, rank: int) -> bool:
        """Return whether this group rank is one of these peers."""

    def heard(self) -> int:
        """Return the bits of the peers that are known to have posted; see ``Collective.posted``."""

    def leave(self) -> None:
        """Continue by chunks: one of the peers has sent a chunk, so it does not take this way."""


class Collective(Machine):
    """A machine with a name: posted, and not complete."""

    deferred: dict[int, list[tuple[Any, ...]]] | None = None  # sends that wait until a rank has posted, by that rank
    heard_s = 0.0  # reserved for the engine's counters; the core never reads it
    shortcut: Shortcut | None = None

    def __init__(self, series: Series, seq: int, stamp: int, driver: CollectiveDriver) -> None:
        # The constructor of ``Machine`` is repeated here: one is made for each call, and a second frame costs 0.2 µs.
        self.series = series
        self.seq = seq
        # Twice the generation of the strategy; a chunk's header has one more if it is charged to the sender's credit.
        # The generation is not in the signature: else each new strategy would need new definitions on all links.
        self.stamp = stamp
        self.posted = series.posted  # bit r is set once group rank r is known to have posted it
        self.driver = driver
        self.program = program = series.program
        self.remaining = program.num_slots
        if program.gate:
            self._gate = program.gate
        self._folded = program.no_folds.copy()

    @property
    def key(self) -> Key:
        """The key under which it was posted."""
        return self.series.key

    @property
    def group(self) -> GroupView:
        """The group in which it was posted."""
        return self.series.group

    @property
    def signature(self) -> AnySignature:
        """Value that all ranks must agree on."""
        return self.series.signature

    @property
    def generation(self) -> int:
        """Generation of the strategy."""
        return self.stamp >> 1

    @property
    def name(self) -> str:
        """The name under which it was posted."""
        return self.series.key.name

    @property
    def title(self) -> str:
        """The name, for people."""
        return self.series.group.titled(self.series.key.name)

    def nbytes_expected(self, route: LaneRoute, index: int) -> int:
        """Return the bytes of a chunk that arrives by this route."""
        sizes = self.series.sizes
        return self._count(route.lane, index) * (sizes.partial if route.is_partial else sizes.item)

    def nbytes_sent(self, number: int, index: int, phase: int) -> int:
        """Return the bytes of a chunk that this rank sends on lane ``number``."""
        lane, sizes = self.program.lanes[number], self.series.sizes
        return self._count(lane, index) * (sizes.partial if phase == UP and lane.children else sizes.item)

    def _count(self, lane: Lane, index: int) -> int:
        chunk = self.program.chunk_elements
        return lane.count if lane.num_chunks == 1 else min(chunk, lane.count - index * chunk)

    @override
    def awaits(self, sender: int) -> bool:
        if self.shortcut is not None and self.shortcut.covers(sender):
            return False
        return super().awaits(sender)

    def resume(self, send: tuple[Any, ...]) -> None:
        """Send what was deferred; it was counted as being read meanwhile."""
        self.driver.send(*send)
        self.was_read()

    def heard(self) -> int:
        """Return ``posted``, brought up to date."""
        if self.shortcut is not None:
            self.posted |= self.shortcut.heard()
        return self.posted

    def arrived_ranks(self) -> tuple[int, ...]:
        """Return the group ranks known to have posted it, this one included."""
        posted = self.heard()
        return tuple(rank for rank in range(self.group.size) if posted >> rank & 1)

    def unheard(self) -> tuple[int, ...]:
        """Return the neighbours not known to have posted it, as group ranks; a long wait is announced to them."""
        posted = self.heard()
        return tuple(rank for rank in sorted(self.program.neighbours) if not posted >> rank & 1)

    def missing_ranks(self) -> tuple[int, ...]:
        """Return the group ranks not known to have posted it."""
        posted = self.heard()
        return tuple(rank for rank in range(self.group.size) if not posted >> rank & 1)


OWN_NAMES = "kfcomm/"
"""Prefix of the names of calls that kfcomm makes beside those of the program."""


def _some(ranks: Sequence[int], most: int) -> str:
    return f"[{', '.join(map(str, ranks[:most]))}{', ...' if len(ranks) > most else ''}]"


def shown(key: str) -> str:
    """Return a key in words: keys of further steps hold a NUL, that of unnamed calls is empty."""
    name, _, step = key.partition("\0")
    if not name and step in ALONE:
        return ALONE[step]
    return f"{name!r}{step and f' ({step})'}" if name else f"an unnamed collective{step and f' ({step})'}"


def name_of(key: str) -> str:
    """Return the name by which a caller knows a key; never empty."""
    name, _, step = key.partition("\0")
    return name or ALONE.get(step, "unnamed")


ALONE = {"strategy": "set_strategy", "probe": "probe"}
"""Keys without a name: the text behind their NUL, and the name of the verb."""


class GroupTable:
    """Groups that one rank is in, by id."""

    def __init__(self, world: GroupView) -> None:
        # Name and world ranks of every group that this rank is in, and of the latest that it has left.
        self.known = {world.id: ("world", world.members)}
        self._rank = world.rank
        self._num_created: dict[bytes, int] = {}
        self._left: deque[bytes] = deque()

    def add(self, parent: GroupView, name: str, members: Sequence[int]) -> GroupView:
        """The view of a further group; ``members`` are ranks of the parent, this rank among them."""
        world_ranks = tuple(parent.members[rank] for rank in members)
        kind = hashlib.blake2b(repr((parent.id, name, world_ranks)).encode(), digest_size=16).digest()
        # Members make groups of one parent, name and membership in one order: a count gives equal ids, unsent.
        number = self._num_created.get(kind, 0)
        self._num_created[kind] = number + 1
        identity = hashlib.blake2b(kind + number.to_bytes(8, "little"), digest_size=16, person=b"group").digest()
        self.known[identity] = (name, world_ranks)
        return GroupView(identity, world_ranks, world_ranks.index(self._rank))

    def leave(self, group_id: bytes) -> None:
        """Note that this rank has left a group. Late messages name it, so the latest ``MAX_LEFT`` stay known."""
        self._left.append(group_id)
        if len(self._left) > MAX_LEFT:
            self.known.pop(self._left.popleft(), None)
