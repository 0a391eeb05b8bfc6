"""Strategies with a pair for each root, as one pair and the turns that make the others of it.

n pairs of n ranks take memory in n²: for 100,000 ranks only one of them can be built. The planner of a rank reads no
more of a pair than the rank's own place and its neighbours', so the others are views of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies import Direct, Strategy
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.strategies.builtin import binary_tree_star, star_around, tree
from kfcomm.types import Layout


@dataclass(frozen=True, slots=True)
class Turns:
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


@dataclass(frozen=True, slots=True)
class TurnedStrategy:
    """A strategy whose pair ``k`` is its first pair after turn ``k · step``."""

    strategy: Strategy  # its pairs are views
    turns: Turns
    step: int  # ranks between neighbouring roots
    is_exact: bool  # whether all ranks take what arrives at one moment in orders that turn into each other


class _View(Sequence[Any]):
    """A value for each rank of the first graph, as it is after a turn."""

    __slots__ = ("_by", "_of", "_turns", "_values")

    def __init__(self, values: Sequence[Any], turns: Turns, by: int, of: Callable[[Turns, int, Any], Any]) -> None:
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


def _parent(turns: Turns, by: int, rank: int) -> int:
    return turns.onto(by, rank)


def _children(turns: Turns, by: int, ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple([turns.onto(by, rank) for rank in ranks])


class _TurnedGraph:
    """A graph as programs and costs read it."""

    __slots__ = ("_by", "_graph", "_turns", "children", "parents", "root")

    def __init__(self, graph: Graph, turns: Turns, by: int) -> None:
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

    def __init__(self, pair: GraphPair, turns: Turns, by: int) -> None:
        self.reduce = _TurnedGraph(pair.reduce, turns, by)
        self.broadcast = self.reduce if pair.broadcast is pair.reduce else _TurnedGraph(pair.broadcast, turns, by)
        self.root = self.reduce.root
        self.size = turns.size


def turned_pairs(pair: GraphPair, turns: Turns, step: int) -> tuple[GraphPair, ...]:
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


def _of(name: str, pair: GraphPair, turns: Turns, step: int = 1, *, is_exact: bool = True) -> TurnedStrategy:
    return TurnedStrategy(Strategy(name, turned_pairs(pair, turns, step)), turns, step, is_exact)


def _ring(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    size = layout.size
    return _of("ring", GraphPair(_chain_up(size), Graph.from_parents([0, *range(size - 1)])), Turns(size))


def _chain_star(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    size = layout.size
    return _of("chain_star", GraphPair(_chain_up(size), star_around(size, 0)), Turns(size))


def _clique(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    pair = GraphPair.of(star_around(layout.size, 0))
    # Stars fold by rank: with ranks of the own host among them, these come first for some ranks and last for others.
    return _of("clique", pair, Turns(layout.size, local), is_exact=local == 1)


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
    return _of("binomial", pair, Turns(size, size & -size, is_xor=True), is_exact=False)


def _multi_star(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    return _of("multi_star", tree(layout).pairs[0], Turns(layout.size), local, is_exact=local == 1)


def _multi_binary_tree_star(layout: Layout, local: int, nbytes: int) -> TurnedStrategy:
    pair = binary_tree_star(layout).pairs[0]
    return _of("multi_binary_tree_star", pair, Turns(layout.size), local, is_exact=False)


def _chain_up(size: int) -> Graph:
    """From rank 1 up to the last one, and to rank 0."""
    return Graph.from_parents([0, *((rank + 1) % size for rank in range(1, size))])


_MAKERS: Final[Mapping[str, Callable[[Layout, int, int], TurnedStrategy]]] = {
    "ring": _ring,
    "clique": _clique,
    "direct": _direct,
    "chain_star": _chain_star,
    "binomial": _binomial,
    "multi_star": _multi_star,
    "multi_binary_tree_star": _multi_binary_tree_star,
}
