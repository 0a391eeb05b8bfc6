"""Binary tree: a heap over the ranks. Owns that graph and its cost.

One pair: rank ``i`` is above ranks ``2i+1`` and ``2i+2``. Few steps, and no rank has more than three edges: for
short messages among many ranks. KungFu's ``BINARY_TREE``. Does not look at hosts.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost, crossings
from kfcomm.strategies.shapes import heap_degree, heap_depth, heap_edges
from kfcomm.types import Layout

FORMULA = "steps 2⌊log₂n⌋; bytes ≤ 3; between hosts c"


def binary_tree(layout: Layout) -> Strategy:
    """All ranks in heap order under rank 0."""
    return Strategy("binary_tree", (GraphPair.of(Graph.from_edges(layout.size, heap_edges(layout.size))),))


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks: 2⌊log₂n⌋ steps; max(min(2, n−1), min(3, n−2)) bytes.

    Between hosts ``c`` bytes, the greatest number of edges between one host and others.
    """
    both_ways = [edge for a, b in heap_edges(layout.size) for edge in ((a, b), (b, a))]
    return Cost(
        steps=2 * heap_depth(layout.size),
        bytes=Fraction(heap_degree(layout.size)),
        cross_host_bytes=Fraction(max(crossings(layout, both_ways))),
    )
