"""Many stars of stars: one for each host, each with another host in the centre. Owns those graphs and their cost.

One pair for each host: in pair ``k`` the masters are under the master of host ``k``; inside the hosts are stars.
As `tree`, with the load of its centre shared by all masters. KungFu's ``MULTI_STAR``.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import hierarchy, host_sizes, star_edges
from kfcomm.types import Layout

FORMULA = "steps ≤ 4; bytes p−1+2(h−1)/h; between hosts 2(h−1)/h"


def multi_star(layout: Layout) -> Strategy:
    """One star of stars for each host."""
    hosts = layout.num_hosts
    trees = (hierarchy(layout, star_edges(hosts, centre)) for centre in range(hosts))
    return Strategy("multi_star", tuple(map(GraphPair.of, trees)))


def cost(layout: Layout) -> Cost:
    """Of ``h`` hosts with up to ``p`` ranks: 2([h > 1] + [p > 1]) steps, p−1+2(h−1)/h bytes, 2(h−1)/h between hosts."""
    hosts, most = layout.num_hosts, max(host_sizes(layout))
    between = Fraction(2 * (hosts - 1), hosts)
    return Cost(2 * (min(1, hosts - 1) + min(1, most - 1)), most - 1 + between, between)
