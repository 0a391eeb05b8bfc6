"""Binary tree of stars: a heap over the hosts, a star inside each. Owns that graph and its cost.

One pair: in each host the ranks are under the host's master (its first rank); the masters form a binary tree
in the order of their hosts. KungFu's ``BINARY_TREE_STAR``, its default for several hosts.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import heap_degree, heap_depth, heap_edges, hierarchy, host_sizes
from kfcomm.types import Layout

FORMULA = "steps ≤ 2⌊log₂h⌋+2; bytes ≤ p+2; between hosts ≤ 3"


def binary_tree_star(layout: Layout) -> Strategy:
    """All ranks under the masters of their hosts, the masters in heap order."""
    return Strategy("binary_tree_star", (GraphPair.of(hierarchy(layout, heap_edges(layout.num_hosts))),))


def cost(layout: Layout) -> Cost:
    """Of ``h`` hosts, host ``k`` with ``p`` ranks at heap level ⌊log₂(k+1)⌋ and with ``d`` edges to other hosts.

    Twice the greatest ⌊log₂(k+1)⌋ + [p > 1] steps; the greatest p−1+d bytes; between hosts the greatest d, which
    is max(min(2, h−1), min(3, h−2)).
    """
    sizes = host_sizes(layout)
    degrees = [min(2, max(0, len(sizes) - 2 * k - 1)) + min(1, k) for k in range(len(sizes))]
    return Cost(
        steps=2 * max(heap_depth(k + 1) + min(1, p - 1) for k, p in enumerate(sizes)),
        bytes=Fraction(max(p - 1 + degree for p, degree in zip(sizes, degrees, strict=True))),
        cross_host_bytes=Fraction(heap_degree(len(sizes))),
    )
