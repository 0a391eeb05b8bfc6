"""Ring: every rank talks to its two neighbours only. Owns those graphs and their cost.

One pair for each rank: pair ``r`` reduces along the chain r+1 → r+2 → … → r and broadcasts along
r → r+1 → … → r−1 (all modulo n). Together the pairs load every rank alike, which is the ring all_reduce:
least bytes, most steps, for long messages. KungFu's ``RING``. Neighbours are neighbours by rank, whatever
their hosts.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost, crossings
from kfcomm.strategies.shapes import chain_along
from kfcomm.types import Layout

FORMULA = "steps 2(n−1); bytes 2(n−1)/n; between hosts 2(n−1)/n · c"


def ring(layout: Layout) -> Strategy:
    """One pair of chains for each rank."""
    ranks = tuple(range(layout.size))
    alone = tuple((rank,) for rank in ranks)
    return Strategy("ring", tuple(_chains(ranks, alone, root) for root in ranks))


def _chains(ranks: tuple[int, ...], alone: tuple[tuple[int], ...], root: int) -> GraphPair:
    onwards = ranks[root:] + ranks[:root]
    return GraphPair(
        reduce=chain_along((root, *reversed(onwards[1:])), alone),
        broadcast=chain_along(onwards, alone),
    )


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks: 2(n−1) steps, 2(n−1)/n bytes.

    Between hosts 2(n−1)/n · c bytes, where ``c`` is the greatest number of ranks on one host whose next rank
    is on another (1 where the ranks of a host are numbered in one block).
    """
    size = layout.size
    per_edge = Fraction(2 * (size - 1), size)
    onwards = ((rank, (rank + 1) % size) for rank in range(size))
    return Cost(2 * (size - 1), per_edge, per_edge * max(crossings(layout, onwards)))
