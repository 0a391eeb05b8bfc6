"""Candidates of `auto` for hosts in racks: graphs in the order of the racks, and combinations inside and between racks.

An uplink is a port that the hosts of a rack share. So graphs that look at racks as others look at hosts use it little:
a ring through one rack after the other, and combinations, in which each rack sends one copy of everything. Ranks may be
numbered in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.builtin import binomial, clique, double_tree, ring
from kfcomm.strategies.combine import combined
from kfcomm.types import Layout, Rates

_LONG: Final = 1 << 30
# By the uplink alone many of these cost the same: the first of them is the quickest in the simulator.
_INSIDE: Final[tuple[Callable[[Layout], Strategy], ...]] = (clique, binomial)
_BETWEEN: Final[tuple[Callable[[Layout], Strategy], ...]] = (ring, clique, double_tree)


def by_rack(layout: Layout, rates: Rates, most_entries: int) -> Iterator[Strategy]:
    """Candidates; none without uplinks. Those of more than ``most_entries`` pairs times ranks are left out."""
    if not rates.uplinks or layout.size**2 > most_entries:
        return
    racks = [rates.rack_of[host] for host in layout.hosts]
    # A host without a rack is one by itself.
    names = [(0, rack) if rack is not None else (1, host) for rack, host in zip(racks, layout.hosts, strict=True)]
    order = sorted(range(layout.size), key=lambda rank: (names[rank], layout.hosts[rank], rank))
    places = Layout.of(names[rank] for rank in order)
    if order != list(range(layout.size)):
        yield replace(_placed(ring(places), order), name="ring by racks")
    seen: set[bytes] = set()
    for inside in _INSIDE:
        for between in _BETWEEN:
            made = _placed(combined(places, inside, between).select(_LONG), order)
            if made.digest not in seen:
                seen.add(made.digest)
                yield replace(made, name=f"inside racks: {inside.__name__}, between racks: {between.__name__}")


def _placed(strategy: Strategy, order: Sequence[int]) -> Strategy:
    """The strategy of places as one of the ranks at them."""
    return replace(strategy, pairs=tuple(_pair_at(pair, order) for pair in strategy.pairs))


def _pair_at(pair: GraphPair, order: Sequence[int]) -> GraphPair:
    reduce = _graph_at(pair.reduce, order)
    if pair.reduce is pair.broadcast:
        return GraphPair.of(reduce)
    return GraphPair(reduce, _graph_at(pair.broadcast, order))


def _graph_at(graph: Graph, order: Sequence[int]) -> Graph:
    parents, children = list(graph.parents), list(graph.children)
    for place, rank in enumerate(order):
        parents[rank] = order[graph.parents[place]]
        children[rank] = tuple([order[below] for below in graph.children[place]])
    return Graph(tuple(parents), tuple(children), order[graph.root])
