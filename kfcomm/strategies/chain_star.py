"""Chain and star: contributions pass through all ranks, results go to all at once. Owns those graphs and their cost.

One pair for each rank: pair ``r`` reduces along the chain r+1 → r+2 → … → r, as in a ring, and broadcasts along the
star around r. Where memory is shared this is the way with the fewest copies: a rank in the midst of a chain folds
straight into what it passes on, and a result is shown to all ranks at once. That is n + 1 copies for each pair, where a
ring and a clique make 2n − 1. For long messages on one host with more ranks than processors, where each copy is
everybody's time. Does not look at hosts.

Source: this project's measurements; see "Performance".
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost, crossings
from kfcomm.strategies.shapes import chain_along, host_sizes, star_around
from kfcomm.types import Layout

FORMULA = "steps n; bytes 2(n−1)/n; between hosts max ((n−1)c + p(n−p))/n"


def chain_star(layout: Layout) -> Strategy:
    """A chain towards each rank and a star from it."""
    ranks = tuple(range(layout.size))
    alone = tuple((rank,) for rank in ranks)
    return Strategy("chain_star", tuple(_pair(ranks, alone, root) for root in ranks))


def _pair(ranks: tuple[int, ...], alone: tuple[tuple[int], ...], root: int) -> GraphPair:
    upwards = ranks[root + 1 :] + ranks[:root]
    return GraphPair(chain_along((root, *reversed(upwards)), alone), star_around(len(ranks), root))


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks: n steps, 2(n−1)/n bytes.

    Between hosts the greatest ((n−1)c + p(n−p))/n bytes of a host with ``p`` ranks, of which ``c`` are followed by a
    rank of another host. (No steps for a single rank.)
    """
    size = layout.size
    onwards = [(rank, (rank + 1) % size) for rank in range(size)]
    of_hosts = zip(crossings(layout, onwards), host_sizes(layout), strict=True)
    busiest = max((size - 1) * c + p * (size - p) for c, p in of_hosts)
    return Cost(size if size > 1 else 0, Fraction(2 * (size - 1), size), Fraction(busiest, size))
