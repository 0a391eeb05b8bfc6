"""Tree: a star of stars. Owns that graph and its cost.

One pair: in each host the ranks are under the host's master (its first rank), the other masters are under the
first one. Each host's data crosses the network once. KungFu's ``TREE``.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import hierarchy, host_sizes, star_edges
from kfcomm.types import Layout

FORMULA = "steps ≤ 4; bytes max(p₀+h−2, p); between hosts h−1"


def tree(layout: Layout) -> Strategy:
    """All ranks under the masters of their hosts, all masters under the first."""
    return Strategy("tree", (GraphPair.of(hierarchy(layout, star_edges(layout.num_hosts))),))


def cost(layout: Layout) -> Cost:
    """Of ``h`` hosts with ``p₀, p₁, …`` ranks: 4 steps; the greatest of p₀+h−2, p₁, p₂, … bytes; h−1 between hosts.

    The steps are twice the depth: 2 if another host than the first has two ranks, else 1, or 0 for one rank.
    """
    first, *others = host_sizes(layout)
    depth = max([min(1, first - 1), *(min(2, p) for p in others)])
    return Cost(2 * depth, Fraction(max(first + len(others) - 1, *others, 0)), Fraction(len(others)))
