"""Star: rank 0 collects from everybody and sends the result back. Owns that graph and its cost.

One pair. Fewest steps and fewest messages, all of them through one rank: for short messages among few ranks.
KungFu's ``STAR``. Does not look at hosts.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import host_sizes, star_edges
from kfcomm.types import Layout

FORMULA = "steps 2; bytes n−1; between hosts n−p₀"


def star(layout: Layout) -> Strategy:
    """All ranks under rank 0."""
    return Strategy("star", (GraphPair.of(Graph.from_edges(layout.size, star_edges(layout.size))),))


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks, ``p₀`` of them on rank 0's host: 2 steps, n−1 bytes, n−p₀ bytes at that host's port.

    (No steps for a single rank.)
    """
    others = layout.size - 1
    return Cost(2 * min(1, others), Fraction(others), Fraction(layout.size - host_sizes(layout)[0]))
