"""Many binary trees of stars: one for each host, each with another host on top. Owns those graphs and their cost.

One pair for each host: in pair ``k`` the masters form a binary tree in the order of their hosts, beginning with
host ``k``; inside the hosts are stars. The rotation loads all masters alike. KungFu's
``MULTI_BINARY_TREE_STAR``.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import heap_depth, heap_edges, hierarchy, host_sizes
from kfcomm.types import Layout

FORMULA = "steps ≤ 2⌊log₂h⌋+2; bytes p−1+2(h−1)/h; between hosts 2(h−1)/h"


def multi_binary_tree_star(layout: Layout) -> Strategy:
    """One binary tree of stars for each host."""
    hosts = layout.num_hosts
    trees = (hierarchy(layout, heap_edges(hosts, offset)) for offset in range(hosts))
    return Strategy("multi_binary_tree_star", tuple(map(GraphPair.of, trees)))


def cost(layout: Layout) -> Cost:
    """Of ``h`` hosts with up to ``p`` ranks: 2(⌊log₂h⌋ + [p > 1]) steps, p−1+2(h−1)/h bytes, 2(h−1)/h between hosts."""
    hosts, most = layout.num_hosts, max(host_sizes(layout))
    between = Fraction(2 * (hosts - 1), hosts)
    return Cost(2 * (heap_depth(hosts) + min(1, most - 1)), most - 1 + between, between)
