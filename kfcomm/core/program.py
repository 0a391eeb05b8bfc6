"""Programs: the lanes of one rank for one verb, its local view of graphs over parts of the buffer.

Every verb is made of *lanes*. A lane is one part of the data on its way along a graph pair, as one rank sees it: an
*up* phase folds the children's partial results and sends them to the parent, a *down* phase takes the result from its
source, stores it if this rank needs it, and forwards it to its targets.

=================  ==========================================================  ==========================
verb               lanes                                                       then, from the root
=================  ==========================================================  ==========================
all_reduce         one per pair: up and down                                   (nothing)
barrier            one, empty: up and down                                     (nothing)
reduce             one: up                                                     an empty lane down
broadcast          an empty lane up                                            one: down
gather             one per rank: down the path from that rank to the root      an empty lane down
scatter            an empty lane up                                            one per rank: down its path
send               one: down the path from source to target                    an empty lane back
all_gather         one per rank: down, rooted at that rank                     (nothing)
reduce_scatter     one per rank: up, rooted at that rank                       (nothing)
all_to_all         one per ordered pair of ranks: down, direct                 (nothing)
=================  ==========================================================  ==========================

The empty lanes carry signatures, not data. They give every verb one property: *a collective that completes on one rank
has been posted, with the same signature, on all ranks*. Lanes in the last column are *gated*: the rank where they begin
starts them when its other lanes are complete.

A program depends on the verb, the group's size, the rank, the graphs and the counts, never on the history of a key: so
every collective of the same kind shares it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kfcomm.core.graph import GraphPair
from kfcomm.core.signature import num_chunks, share_out, split

ABSENT = -1
MAX_BYTE = 255


@dataclass(frozen=True, slots=True)
class Lane:
    """One part of the data on one graph pair, as seen from one rank. Ranks are those of the group."""

    number: int  # the same on every rank
    count: int  # elements, as are the offsets in the caller's buffers
    up: bool = False
    children: tuple[int, ...] = ()  # folded in this order
    leaf_children: tuple[bool, ...] = ()  # whether a child sends its own input, not a partial result
    parent: int = ABSENT  # at the root
    down: bool = False
    source: int = ABSENT  # where it begins
    targets: tuple[int, ...] = ()
    keeps: bool = False  # this rank needs the result of this lane
    gated: bool = False  # it begins here, once every lane that is not gated is complete
    input_offset: int = 0
    result_offset: int = 0
    base: int = 0  # number of its first chunk among all chunks of the program
    num_chunks: int = 1
    forwards: bool = False  # its result is sent on in a later step
    window: int = 0  # chunks that are sent up before the first result; each result lets one follow. 0 for all

    @property
    def is_clocked(self) -> bool:
        """Whether this rank only sends its input, and results come back to it."""
        return self.up and self.down and self.parent != ABSENT and not self.children

    @property
    def num_at_once(self) -> int:
        """Chunks that are sent up before the first result."""
        return self.window or self.num_chunks

    @property
    def awaited(self) -> bool:
        """Whether the result of the lane comes from another rank."""
        return self.source != ABSENT


@dataclass(frozen=True, slots=True)
class LaneRoute:
    """Arrivals on one lane in one direction from one sender."""

    lane: Lane
    phase: int  # 0 up, 1 down
    position: int  # how many of the lane's children are folded before it; all of them for direction down
    is_partial: bool = False  # the sender sends a partial result, not its input
    is_last: bool = False  # it comes from the last of the children
    step: int = 0  # of an exchange, from 1 on; 0 along graphs


@dataclass(frozen=True, slots=True)
class StepSend:
    """A message of a step."""

    to: int
    lane: Lane
    phase: int
    source: int  # memory that it is sent from


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """One step of an exchange; it begins when the last chunk of the one before has come, see `kfcomm.core.exchange`."""

    sends: tuple[StepSend, ...]
    arrivals: tuple[LaneRoute, ...]  # all up, which are folded in the order of the steps, or all down
    begin: int  # number of the first chunk of the arrivals, and of the first one after them
    end: int
    fresh: tuple[Lane, ...] = ()  # of which the partial result, or the result, begins with this rank's input


@dataclass(frozen=True, slots=True)
class Program:
    """The lanes of one rank for one verb, by number."""

    lanes: dict[int, Lane]  # only those in which this rank takes part
    chunk_elements: int  # per chunk; the last of a lane may be shorter
    num_slots: int  # chunks of all lanes together, each of which must complete
    gate: int  # number of chunks that must complete before gated lanes begin; 0 if none begin here
    neighbours: frozenset[int] = field(default_factory=frozenset)  # ranks with which this rank exchanges chunks
    steps: tuple[ExchangeStep, ...] = ()  # if it is an exchange
    no_folds: bytearray | list[int] = field(init=False, repr=False, compare=False)  # a zero for each chunk, to copy
    first: tuple[Lane, ...] = field(init=False, repr=False, compare=False)  # begin here at once
    # If the program begins by sending parts of the input up, and does nothing else at once: these chunks, each as
    # destinations, lane and number.
    first_sends: tuple[tuple[tuple[int, ...], Lane, int], ...] | None = field(init=False, repr=False, compare=False)
    # By lane number, direction (0 up, 1 down) and sender
    routes: dict[tuple[int, int, int], LaneRoute] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Derived once here, since every collective with this program reads them.
        if self.steps:
            self._derive_of_steps()
            return
        most = max((len(lane.children) for lane in self.lanes.values()), default=0)
        # A bytearray where it suffices: the garbage collector need not visit a copy of it, as it must a list.
        object.__setattr__(self, "no_folds", bytearray(self.num_slots) if most < MAX_BYTE else [0] * self.num_slots)
        lanes = self.lanes.values()
        first = tuple(lane for lane in lanes if not (lane.children if lane.up else lane.gated or lane.awaited))
        object.__setattr__(self, "first", first)
        only_sends = all(lane.up and lane.down and lane.parent != ABSENT for lane in first)
        sends = tuple(((lane.parent,), lane, index) for lane in first for index in range(lane.num_at_once))
        object.__setattr__(self, "first_sends", sends if only_sends and self.num_slots else None)
        routes = {}
        for number, lane in self.lanes.items():
            for position, child in enumerate(lane.children):
                is_last = position + 1 == len(lane.children)
                routes[number, 0, child] = LaneRoute(lane, 0, position, not lane.leaf_children[position], is_last)
            if lane.down and lane.awaited:
                routes[number, 1, lane.source] = LaneRoute(lane, 1, len(lane.children))
        object.__setattr__(self, "routes", routes)

    @property
    def num_step_sends(self) -> int:
        """Chunks that this rank sends in the steps of an exchange."""
        return sum(send.lane.num_chunks for step in self.steps for send in step.sends)

    def _derive_of_steps(self) -> None:
        arrivals = [route for step in self.steps for route in step.arrivals]
        # Results are stored whenever they come: their chunks are open from the beginning, at their route's position.
        no_folds = bytearray(self.num_slots)
        for route in arrivals:
            for slot in range(route.lane.base, route.lane.base + route.lane.num_chunks):
                no_folds[slot] = route.position if route.phase else 0
        senders = ((route, route.lane.children[0] if not route.phase else route.lane.source) for route in arrivals)
        object.__setattr__(self, "no_folds", no_folds)
        object.__setattr__(self, "first", ())
        object.__setattr__(self, "first_sends", None)
        object.__setattr__(
            self, "routes", {(route.lane.number, route.phase, sender): route for route, sender in senders}
        )


class Builder:
    """Builder of the lanes of one rank. Lanes are numbered in the order of the calls, the same on every rank."""

    def __init__(self, rank: int, chunk_elements: int) -> None:
        self._rank = rank
        self._chunk_elements = chunk_elements
        self._next_number = 0
        self._lanes: dict[int, Lane] = {}
        self._base = 0

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _add(self, lane: Callable[..., Lane], count: int) -> None:
        chunks = num_chunks(count, self._chunk_elements)
        made = lane(count=count, base=self._base, num_chunks=chunks)
        self._lanes[made.number] = made
        self._base += chunks

    def tree(
        self,
        pair: GraphPair,
        count: int,
        *,
        up: bool = False,
        down: bool = False,
        gated: bool = False,
        input_offset: int = 0,
        result_offset: int = 0,
    ) -> None:
        """Add a lane that spans all ranks: up along ``pair.reduce``, down along ``pair.broadcast``."""
        rank, number = self._rank, self._number()
        reduce, broadcast = pair.reduce, pair.broadcast
        is_root = rank == pair.root
        children = reduce.children[rank] if up else ()
        self._add(
            lambda **where: Lane(
                number,
                up=up,
                children=children,
                leaf_children=tuple(not reduce.children[child] for child in children),
                parent=reduce.parents[rank] if up and not is_root else ABSENT,
                down=down,
                source=broadcast.parents[rank] if down and not is_root else ABSENT,
                targets=broadcast.children[rank] if down else (),
                keeps=count > 0 and (down or is_root),
                gated=gated and is_root,
                input_offset=input_offset,
                result_offset=result_offset,
                **where,
            ),
            count,
        )

    def path(
        self, path: Sequence[int], count: int, *, gated: bool = False, input_offset: int = 0, result_offset: int = 0
    ) -> None:
        """Add a lane down one path: data enters at its first rank, and only the last one stores it."""
        number = self._number()
        if self._rank not in path:
            return
        place = path.index(self._rank)
        last = place == len(path) - 1
        self._add(
            lambda **where: Lane(
                number,
                down=True,
                source=path[place - 1] if place else ABSENT,
                targets=() if last else (path[place + 1],),
                keeps=last and count > 0,
                gated=gated and place == 0,
                input_offset=input_offset,
                result_offset=result_offset,
                **where,
            ),
            count,
        )

    def build(self) -> Program:
        """Return the program of the lanes added so far."""
        lanes = self._lanes
        gated = any(lane.gated for lane in lanes.values())
        gate = sum(lane.num_chunks for lane in lanes.values() if not lane.gated) if gated else 0
        neighbours = {
            other for lane in lanes.values() for other in (*lane.children, lane.parent, lane.source, *lane.targets)
        }
        return Program(lanes, self._chunk_elements, self._base, gate, frozenset(neighbours - {ABSENT}))


def all_reduce(
    rank: int, pairs: Sequence[GraphPair], count: int, chunk_elements: int, shares: Sequence[int] = ()
) -> Program:
    """Reduce and broadcast a share of ``count`` elements along each pair, equal parts without ``shares``.

    A buffer that travels whole has one pair.
    """
    builder = Builder(rank, chunk_elements)
    parts = share_out(count, shares) if shares else split(count, len(pairs))
    for pair, (offset, length) in zip(pairs, parts, strict=True):
        builder.tree(pair, length, up=True, down=True, input_offset=offset, result_offset=offset)
    return builder.build()


def windowed(program: Program, window: int) -> Program:
    """Return the program with at most ``window`` chunks of a leaf under way on each lane; the same if that is 0.

    A rank without children sends a chunk when the result of the one ``window`` before it has come. All ranks keep pace
    with the slowest then, whatever part of a port their traffic gets where it meets. No rank waits for ever: the oldest
    chunk without a result is within the window of all.
    """
    if not window:
        return program
    lanes = {
        number: replace(lane, window=window) if lane.is_clocked and window < lane.num_chunks else lane
        for number, lane in program.lanes.items()
    }
    return replace(program, lanes=lanes)


def reduce(rank: int, pair: GraphPair, count: int, chunk_elements: int) -> Program:
    """Reduce ``count`` elements to the root of ``pair``."""
    builder = Builder(rank, chunk_elements)
    builder.tree(pair, count, up=True)
    builder.tree(pair, 0, down=True, gated=True)
    return builder.build()


def broadcast(rank: int, pair: GraphPair, count: int, chunk_elements: int) -> Program:
    """Broadcast ``count`` elements from the root of ``pair``."""
    builder = Builder(rank, chunk_elements)
    builder.tree(pair, 0, up=True)
    builder.tree(pair, count, down=True, gated=True)
    return builder.build()


def gather(rank: int, pair: GraphPair, counts: Sequence[int], chunk_elements: int) -> Program:
    """Gather ``counts[r]`` elements of every rank ``r`` at the root, one after the other."""
    builder = Builder(rank, chunk_elements)
    # Up the broadcast graph: nothing is folded on the way, and a reduce graph, made for folding, may be long.
    for sender, (offset, count) in enumerate(_offsets(counts)):
        builder.path(tuple(reversed(pair.broadcast.path(sender))), count, result_offset=offset)
    builder.tree(pair, 0, down=True, gated=True)
    return builder.build()


def scatter(rank: int, pair: GraphPair, counts: Sequence[int], chunk_elements: int) -> Program:
    """Send ``counts[r]`` of the root's elements to every rank ``r``."""
    builder = Builder(rank, chunk_elements)
    builder.tree(pair, 0, up=True)
    for receiver, (offset, count) in enumerate(_offsets(counts)):
        builder.path(pair.broadcast.path(receiver), count, gated=True, input_offset=offset)
    return builder.build()


def all_gather(rank: int, rooted: Callable[[int], GraphPair], counts: Sequence[int], chunk_elements: int) -> Program:
    """Send ``counts[r]`` elements of every rank ``r`` to all; ``rooted(r)`` is the pair whose root is ``r``."""
    builder = Builder(rank, chunk_elements)
    for sender, (offset, count) in enumerate(_offsets(counts)):
        builder.tree(rooted(sender), count, down=True, result_offset=offset)
    return builder.build()


def reduce_scatter(
    rank: int, rooted: Callable[[int], GraphPair], counts: Sequence[int], chunk_elements: int, *,
    with_signals: bool = False,
) -> Program:  # fmt: skip
    """Reduce all inputs, and leave ``counts[r]`` elements of the result on every rank ``r``.

    ``with_signals``: an empty chunk also goes from every rank to all.
    """
    builder = Builder(rank, chunk_elements)
    for receiver, (offset, count) in enumerate(_offsets(counts)):
        builder.tree(rooted(receiver), count, up=True, input_offset=offset)
    if with_signals:
        for sender in range(len(counts)):
            builder.tree(rooted(sender), 0, down=True)
    return builder.build()


def all_to_all(rank: int, counts: Sequence[Sequence[int]], chunk_elements: int) -> Program:
    """Send ``counts[i][j]`` elements from every rank ``i`` directly to every rank ``j``."""
    builder = Builder(rank, chunk_elements)
    size = len(counts)
    input_offsets = [offset for offset, _ in _offsets(counts[rank])]
    result_offsets = [offset for offset, _ in _offsets([row[rank] for row in counts])]
    for sender in range(size):
        for receiver in range(size):
            path = (sender,) if sender == receiver else (sender, receiver)
            builder.path(
                path,
                counts[sender][receiver],
                input_offset=input_offsets[receiver] if sender == rank else 0,
                result_offset=result_offsets[sender] if receiver == rank else 0,
            )
    return builder.build()


@lru_cache(256)
def send(rank: int, count: int, chunk_elements: int) -> Program:
    """Send ``count`` elements from rank 0 to rank 1 of a group of two."""
    builder = Builder(rank, chunk_elements)
    builder.path((0, 1), count)
    builder.path((1, 0), 0, gated=True)
    return builder.build()


def barrier(rank: int, pair: GraphPair) -> Program:
    """Send empty chunks up and down: every rank has arrived before any leaves."""
    builder = Builder(rank, 1)
    builder.tree(pair, 0, up=True, down=True)
    return builder.build()


@lru_cache(64)
def elsewhere(rank: int, size: int) -> Program:
    """Exchange no chunks: the call is carried out outside the core, and ends with ``Machine.done_elsewhere``."""
    # Neighbours on a ring compare signatures, so that ranks that disagree find out.
    neighbours = frozenset({(rank - 1) % size, (rank + 1) % size}) - {rank}
    return Program({}, 1, 1, 0, neighbours)


def _offsets(counts: Iterable[int]) -> list[tuple[int, int]]:
    offsets = []
    offset = 0
    for count in counts:
        offsets.append((offset, count))
        offset += count
    return offsets
