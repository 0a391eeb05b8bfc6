"""Records of the router: groups, names and posted collectives.

They hold state and answer questions about it; `kfcomm.core.router` decides what happens to them. Records of the ends of
links are in `kfcomm.core.links`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kfcomm.core.machine import UP, Effect, Machine
from kfcomm.core.program import Lane, Program, Route

if TYPE_CHECKING:
    from kfcomm.core.links import Early

AnySignature = tuple[Any, ...]
"""A ``Signature``, or whatever a peer sent in its place."""


MAX_LEFT = 1 << 10
"""Latest groups that were left, of which names and links still know something."""


@dataclass(frozen=True, eq=False)
class GroupView:
    """A group as one of its members sees it: world ranks in group order.

    Attributes:
        id: the same bytes on every member, different for every group that ever was.
        members: world rank of each group rank.
        rank: this process's group rank.
        within: of a pair that was made inside a group, for messages, that one: callers know its ranks.
        index: group rank by world rank.
    """

    id: bytes
    members: tuple[int, ...]
    rank: int
    within: GroupView | None = None
    index: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {world: rank for rank, world in enumerate(self.members)})

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def known(self, rank: int) -> int:
        """The rank by which a caller knows a member: in this group, or in that in which it sends messages."""
        return rank if self.within is None else self.within.index[self.members[rank]]

    def called(self, rank: int) -> str:
        """A member in words: its rank in the world, and by which a caller knows it, where that is another one."""
        world, known = self.members[rank], self.known(rank)
        return f"rank {world}" if known == world else f"rank {world} (group rank {known})"

    def all_called(self, ranks: Sequence[int], most: int = 16) -> str:
        """Several members in words, as ``called``; of many the first."""
        worlds, known = [self.members[rank] for rank in ranks], [self.known(rank) for rank in ranks]
        return f"ranks {_some(worlds, most)}" + (f" (group ranks {_some(known, most)})" if known != worlds else "")

    def titled(self, name: str) -> str:
        """User-visible form of a name in this group."""
        if self.within is None or "\0" in name:
            return shown(name)
        return f"a message with {name} from {self.called(0)} to {self.called(1)}"


class Key:
    """A name in a group, and everything that is going on under it.

    Attributes:
        series: what the latest uses have in common.
        others: the same of earlier ones, by the number of their signature; None while there are none, as of most names.
        offers: slots that were handed out for it, by signature, until they are taken; None while there never was any.
        slots: those that were taken, by signature: they outlive what is known of a series.
        spoilt: the latest use that failed here or was left out; see ``spoil``.
        begun: a use that is under way elsewhere, if one is: it is among the live ones as soon as it is let ``enter``.
        has_ended: this rank has left the group, and uses the name no more.
        tally: a slot for whoever counts; the core never looks at it.
    """

    __slots__ = (
        "begun", "early", "group_id", "has_ended", "id", "live", "name", "next_seq", "offers", "others",
        "series", "slots", "spoilt", "tally",
    )  # fmt: skip

    def __init__(self, number: int, group_id: bytes, name: str) -> None:
        self.id = number
        self.group_id = group_id
        self.name = name
        self.next_seq = 0
        self.spoilt = -1
        self.live: dict[int, Collective] = {}
        self.early: dict[int, Early] = {}
        self.series: Series | None = None
        self.others: dict[int, Series] | None = None
        self.offers: dict[AnySignature, tuple[Any, ...]] | None = None
        self.slots: dict[AnySignature, Any] | None = None
        self.begun: Any = None
        self.tally: Any = None
        self.has_ended = False

    def end(self) -> None:
        """This rank has left the group: what was worked out for further uses is forgotten."""
        self.has_ended = True
        self.series = self.others = self.offers = self.slots = self.tally = None

    def spoil(self, seq: int) -> None:
        """A use has failed on this rank, or was left out: it stores no word in any slot of this name any more.

        Peers that still wait for that use would take the word of a later one for it.
        """
        self.spoilt = max(self.spoilt, seq)
        for slot in (self.slots or {}).values():
            slot.is_dead = True

    def find(self, seq: int) -> Collective | None:
        """The use with this number, if it is in flight."""
        if self.begun is not None:
            self.begun.enter()
        return self.live.get(seq)


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes per element of a collective's chunks."""

    item: int
    partial: int


class Series:
    """The uses of a name with one signature, and all that can be known of them: worked out at the first.

    Attributes:
        group, key: whose it is.
        signature, signature_id: what all ranks must agree on, and the number that stands for it on this rank's links.
        key_id: the number of the key.
        program, sizes: what this rank does.
        posted: the bit of this rank; see ``Collective``.
        version: of the names, see ``names.Names``: with another one the numbers have to be looked up again.
        slot: where the uses are carried out without messages, if anywhere: one of ``key.slots``, at hand.
        is_known: it was used before; kept by whoever hands out slots.
    """

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
        self.posted = 1 << group.rank
        self.version = 0
        self.slot: Any = None
        self.is_known = False


class Collective(Machine):
    """A machine with a name: posted, and not complete.

    Whoever posts may derive from it and hand in what is still to ``begin``, so that effects name their own.

    Attributes:
        series: what it has in common with other uses of its name.
        seq: which use of the name it is.
        stamp: twice the generation of the strategy, which is not part of the signature: so strategies may come again
            and again. A chunk's header has one more where the chunk is charged to the sender's credit.
        posted: bit r is set once group rank r is known to have posted it.
        deferred: by rank, sends that wait for the word that it has posted; None while nothing ever waited.
    """

    series: Series
    seq: int
    stamp: int
    posted: int
    deferred: dict[int, list[Effect]] | None = None

    def __init__(self) -> None:
        """Nothing yet: see ``begin``."""

    def begin(self, series: Series, generation: int) -> None:
        """Take the name, and the number that is the key's next."""
        super().__init__(series.program)
        self.series = series
        self.seq = series.key.next_seq
        self.stamp = generation << 1
        self.posted = series.posted

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
        """What all ranks must agree on."""
        return self.series.signature

    @property
    def generation(self) -> int:
        """Of the strategy."""
        return self.stamp >> 1

    @property
    def name(self) -> str:
        """The name under which it was posted."""
        return self.series.key.name

    @property
    def title(self) -> str:
        """The name, for people."""
        return self.series.group.titled(self.series.key.name)

    def nbytes_expected(self, route: Route, index: int) -> int:
        """Size of a chunk that comes by this route."""
        sizes = self.series.sizes
        return self._count(route.lane, index) * (sizes.partial if route.is_partial else sizes.item)

    def nbytes_sent(self, number: int, index: int, phase: int) -> int:
        """Size of a chunk that this rank sends on lane ``number``."""
        lane, sizes = self.program.lanes[number], self.series.sizes
        return self._count(lane, index) * (sizes.partial if phase == UP and lane.children else sizes.item)

    def _count(self, lane: Lane, index: int) -> int:
        chunk = self.program.chunk_elements
        return lane.count if lane.num_chunks == 1 else min(chunk, lane.count - index * chunk)

    def heard(self) -> int:
        """What ``posted`` is by now: others may learn of a rank's post by other means than chunks."""
        return self.posted

    def arrived_ranks(self) -> tuple[int, ...]:
        """Group ranks known to have posted it, this one included."""
        posted = self.heard()
        return tuple(rank for rank in range(self.group.size) if posted >> rank & 1)

    def unheard(self) -> tuple[int, ...]:
        """Neighbours not known to have posted it, as group ranks: whom to announce it to when it waits long."""
        posted = self.heard()
        return tuple(rank for rank in sorted(self.program.neighbours) if not posted >> rank & 1)

    def behind(self) -> list[int]:
        """Group ranks that are known to keep this one waiting, though they may have posted it."""
        return []

    def missing_ranks(self) -> tuple[int, ...]:
        """Group ranks not known to have posted it."""
        posted = self.heard()
        return tuple(rank for rank in range(self.group.size) if not posted >> rank & 1)


OWN_NAMES = "kfcomm/"
"""What kfcomm calls itself, beside the calls of the program, has names that begin so."""


def _some(ranks: Sequence[int], most: int) -> str:
    return f"[{', '.join(map(str, ranks[:most]))}{', ...' if len(ranks) > most else ''}]"


def shown(key: str) -> str:
    """A key as people know it: keys of further steps hold a NUL, that of unnamed calls is empty."""
    name, _, step = key.partition("\0")
    if not name and step in ALONE:
        return ALONE[step]
    return f"{name!r}{step and f' ({step})'}" if name else f"an unnamed collective{step and f' ({step})'}"


def name_of(key: str) -> str:
    """The name under which a caller knows a key; never empty."""
    name, _, step = key.partition("\0")
    return name or ALONE.get(step, "unnamed")


ALONE = {"strategy": "set_strategy", "probe": "probe"}
"""Keys that belong to no name: what follows their NUL, and what callers call it."""
