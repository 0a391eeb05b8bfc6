"""Strategies with a pair for each root, as one pair and the turns that make the others of it; and exchanges.

n pairs of n ranks take memory in n²: for 100,000 ranks only one of them can be built. The planner of a rank reads no
more of a pair than the rank's own place and its neighbours', so the others are views of the first.

An exchange in steps has no pairs: its ranks turn into each other. In `halving_doubling` among 2^b·m hosts with m odd,
the b upper digits of a host are turned by xor. Among m places, blocks that pass the end of the buffer travel in two
messages: so m hosts are simulated, or, where these are too many, one as if no block did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, cast

from kfcomm.core.exchange import Blocks, Exchange, Round
from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies import Direct, Strategy
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.strategies.builtin import binary_tree_star, dissemination, halving_doubling, star_around, tree
from kfcomm.types import Layout, override


@dataclass(frozen=True, slots=True)
class FullSymmetry:
    """A group of as many permutations of the ranks as there are ranks: turn ``by`` brings rank 0 to rank ``by``.

    The ranks are numbered by a high and a low digit, the low one below ``low``. High digits are added, modulo
    ``size / low``; low ones are combined by xor, where ``low`` is a power of two, or added modulo ``low``.
    """

    size: int
    low: int = 1
    is_xor: bool = False

    def onto(self, by: int, rank: int) -> int:
        """The rank to which turn ``by`` brings ``rank``."""
        if self.low == 1:
            return (rank + by) % self.size
        high = (rank // self.low + by // self.low) % (self.size // self.low)
        low = (rank ^ by) % self.low if self.is_xor else (rank + by % self.low) % self.low
        return high * self.low + low

    def back(self, by: int, rank: int) -> int:
        """The rank that turn ``by`` brings to ``rank``."""
        if self.low == 1:
            return (rank - by) % self.size
        high = (rank // self.low - by // self.low) % (self.size // self.low)
        low = (rank ^ by) % self.low if self.is_xor else (rank % self.low - by % self.low) % self.low
        return high * self.low + low


class Symmetry(Protocol):
    """Turns of the ranks that bring the simulated ones, and their messages, to all others."""

    @property
    def numbers(self) -> Sequence[int]:
        """The ranks that are simulated."""

    def origin(self, rank: int) -> tuple[int, int]:
        """The simulated rank that is brought to this one, and the turn that does so."""

    def back(self, by: int, rank: int) -> int:
        """The rank that turn ``by`` brings to ``rank``."""

    def lane_back(self, by: int, lane: int) -> int:
        """The lane that turn ``by`` brings to ``lane``."""


@dataclass(frozen=True, slots=True)
class BlockSymmetry(Symmetry):
    """Turns by multiples of ``block``, which bring the first block of ranks to all others."""

    turns: FullSymmetry
    block: int
    step: int = 1  # ranks between neighbouring roots; 0 if messages are numbered by sender, not by root

    @property
    @override
    def numbers(self) -> Sequence[int]:
        return range(self.block)

    @override
    def origin(self, rank: int) -> tuple[int, int]:
        first = rank % self.block
        return first, rank - first

    @override
    def back(self, by: int, rank: int) -> int:
        return self.turns.back(by, rank)

    @override
    def lane_back(self, by: int, lane: int) -> int:
        if not self.step:
            return _of_sender(self, by, lane, self.turns.size)
        return self.turns.back(by, lane * self.step) // self.step


@dataclass(frozen=True, slots=True)
class Swaps(Symmetry):
    """Turns of an exchange among hosts and inside of them, by xor of the upper digits of a host's and a rank's place.

    The turn ``by`` brings the rank with the lower digits of ``by``, and 0 above them, to rank ``by``.
    """

    size: int
    local: int  # ranks of a host
    low_hosts: int  # hosts below the upper digits: an odd number, or all
    low_ranks: int  # ranks of a host below them
    is_added: bool = False  # lower digits are turned too, by addition: as if no block passed the end of the buffer

    @property
    @override
    def numbers(self) -> Sequence[int]:
        if self.is_added:
            return (0,)
        return [host * self.local + rank for host in range(self.low_hosts) for rank in range(self.low_ranks)]

    @override
    def origin(self, rank: int) -> tuple[int, int]:
        host, place = divmod(rank, self.local)
        return (0 if self.is_added else host % self.low_hosts * self.local + place % self.low_ranks), rank

    @override
    def back(self, by: int, rank: int) -> int:
        (host, place), (by_host, by_place) = divmod(rank, self.local), divmod(by, self.local)
        return self._back(by_host, host, self.low_hosts) * self.local + self._back(by_place, place, self.low_ranks)

    def _back(self, by: int, place: int, low: int) -> int:
        below = place % low - by % low if self.is_added else place
        return (place // low ^ by // low) * low + below % low

    @override
    def lane_back(self, by: int, lane: int) -> int:
        return _of_sender(self, by, lane, self.size)


def _of_sender(group: Symmetry, by: int, lane: int, size: int) -> int:
    """Turn a lane of an exchange, whose number has its sender as the last digit."""
    number, sender = divmod(lane, size)
    return number * size + group.back(by, sender)


@dataclass(frozen=True, slots=True)
class TurnedStrategy:
    """A strategy whose pair ``k`` is its first pair after turn ``k · step``."""

    strategy: Strategy  # its pairs are views
    turns: FullSymmetry
    step: int  # ranks between neighbouring roots; 0 for an exchange in steps
    is_exact: bool  # whether all ranks take what arrives at one moment in orders that turn into each other
    has_one_sender: bool = False  # each rank receives from one other in each direction


class _View(Sequence[Any]):
    """A value for each rank of the first graph, as it is after a turn."""

    __slots__ = ("_by", "_of", "_turns", "_values")

    def __init__(
        self, values: Sequence[Any], turns: FullSymmetry, by: int, of: Callable[[FullSymmetry, int, Any], Any]
    ) -> None:
        self._values = values
        self._turns = turns
        self._by = by
        self._of = of

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self._values)))

    def __getitem__(self, rank: Any) -> Any:
        return self._of(self._turns, self._by, self._values[self._turns.back(self._by, rank)])


def _parent(turns: FullSymmetry, by: int, rank: int) -> int:
    return turns.onto(by, rank)


def _children(turns: FullSymmetry, by: int, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple([turns.onto(by, rank) for rank in ranks])


class _TurnedGraph:
    """A graph as programs and costs read it."""

    __slots__ = ("_by", "_graph", "_turns", "children", "parents", "root")

    def __init__(self, graph: Graph, turns: FullSymmetry, by: int) -> None:
        self._graph = graph
        self._turns = turns
        self._by = by
        self.parents = _View(graph.parents, turns, by, _parent)
        self.children = _View(graph.children, turns, by, _children)
        self.root = turns.onto(by, graph.root)

    @property
    def size(self) -> int:
        return self._graph.size

    @property
    def depth(self) -> int:
        return self._graph.depth

    @property
    def preorder(self) -> tuple[int, ...]:
        return _children(self._turns, self._by, self._graph.preorder)


class _TurnedPair:
    """A pair as programs and strategies read it."""

    __slots__ = ("broadcast", "reduce", "root", "size")

    digest = b""  # nothing compares signatures here

    def __init__(self, pair: GraphPair, turns: FullSymmetry, by: int) -> None:
        self.reduce = _TurnedGraph(pair.reduce, turns, by)
        self.broadcast = self.reduce if pair.broadcast is pair.reduce else _TurnedGraph(pair.broadcast, turns, by)
        self.root = self.reduce.root
        self.size = turns.size


def turned_pairs(pair: GraphPair, turns: FullSymmetry, step: int) -> tuple[GraphPair, ...]:
    """All pairs, as views of the first."""
    return tuple(cast(GraphPair, _TurnedPair(pair, turns, by)) for by in range(0, turns.size, step))


def solid(pair: GraphPair) -> GraphPair:
    """The graphs of a view."""
    graphs = (pair.reduce, pair.broadcast)
    reduce, broadcast = (Graph(tuple(one.parents), tuple(one.children), one.root) for one in graphs)
    return GraphPair(reduce, broadcast)


def turned(name: str, layout: Layout, nbytes: int) -> TurnedStrategy | None:
    """The built-in strategy of this name for messages of ``nbytes``; None if it is made in another way.

    The ranks must lie in blocks of equal size on their hosts.
    """
    size, local = layout.size, layout.size // layout.num_hosts
    make = _MAKERS.get(name)
    if make is None or size % local or layout.hosts != tuple(rank // local for rank in range(size)):
        return None
    return make(layout, local, nbytes)


def _of(name: str, pair: GraphPair, turns: FullSymmetry, step: int = 1, *, is_exact: bool = True) -> TurnedStrategy:
    return TurnedStrategy(Strategy(name, turned_pairs(pair, turns, step)), turns, step, is_exact)


def _ring(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    size = layout.size
    ring = _of("ring", GraphPair(_chain_up(size), Graph.from_parents([0, *range(size - 1)])), FullSymmetry(size))
    return replace(ring, has_one_sender=True)


def _chain_star(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    size = layout.size
    return _of("chain_star", GraphPair(_chain_up(size), star_around(size, 0)), FullSymmetry(size))


def _clique(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    pair = GraphPair.of(star_around(layout.size, 0))
    # Stars fold by rank: with ranks of the own host among them, these come first for some ranks and last for others.
    return _of("clique", pair, FullSymmetry(layout.size, local), is_exact=local == 1)


def _direct(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    chains = _chain_star(layout, local, nbytes)
    if nbytes > DIRECT_NBYTES:
        return replace(chains, strategy=replace(chains.strategy, name="direct", direct=Direct.CHAINS))
    stars = _clique(layout, local, nbytes)
    is_crowded = 0 < layout.num_cpus < local
    kind = Direct.STAR if is_crowded else Direct.ONE_STEP
    # Nothing is folded on the way.
    return replace(stars, strategy=replace(stars.strategy, name="direct", direct=kind), is_exact=True)


def _binomial(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    size = layout.size
    edges = [(label & (label - 1), label) for label in range(1, size)]
    pair = GraphPair(Graph.from_edges(size, edges), Graph.from_edges(size, reversed(edges)))
    # Chunks of several lanes arrive at one moment, and simulated one by one, ranks take them in unlike orders.
    return _of("binomial", pair, FullSymmetry(size, size & -size, is_xor=True), is_exact=False)


def _multi_star(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    return _of("multi_star", tree(layout).pairs[0], FullSymmetry(layout.size), local, is_exact=local == 1)


def _multi_binary_tree_star(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    pair = binary_tree_star(layout).pairs[0]
    return _of("multi_binary_tree_star", pair, FullSymmetry(layout.size), local, is_exact=False)


def _halving_doubling(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    return TurnedStrategy(halving_doubling(layout), FullSymmetry(layout.size), 0, is_exact=True)


def _dissemination(layout: Layout, local: int, nbytes: int) -> TurnedStrategy | None:
    strategy = dissemination(layout)
    if layout.num_hosts == 1 or not strategy.sends_at_once(nbytes):
        return None
    return TurnedStrategy(strategy, FullSymmetry(layout.size), 0, is_exact=True)


class CutExchange(Exchange):
    """An exchange as place 0 has it, whose blocks, among places of odd number, all travel as two messages.

    Of the other places about half do so in each step, and the others wait for them.
    """

    @override
    def rounds(self, place: int) -> Iterator[Round]:
        for one in super().rounds(place):
            is_halved = one.to == one.source
            yield one if is_halved else one._replace(sent=_cut(one.sent), received=_cut(one.received))


def _cut(blocks: Blocks) -> Blocks:
    """Two runs of blocks, as of those that pass the end of the buffer."""
    (begin, end), *_ = blocks
    middle = (begin + end) // 2
    return ((begin, middle), (middle, end)) if begin < middle else blocks


def odd_part(number: int) -> int:
    """The number without its factors of 2."""
    return number // (number & -number)


def _chain_up(size: int) -> Graph:
    """From rank 1 up to the last one, and to rank 0."""
    return Graph.from_parents([0, *((rank + 1) % size for rank in range(1, size))])


STARS: Final = ("clique", "chain_star", "multi_star")
"""Strategies with children in rank order, not in an order that turns with the root."""
_MAKERS: Final[Mapping[str, Callable[[Layout, int, int], TurnedStrategy | None]]] = {
    "ring": _ring,
    "clique": _clique,
    "direct": _direct,
    "chain_star": _chain_star,
    "binomial": _binomial,
    "halving_doubling": _halving_doubling,
    "dissemination": _dissemination,
    "multi_star": _multi_star,
    "multi_binary_tree_star": _multi_binary_tree_star,
}
