"""Clique: every rank is the centre of a star for its own part. Owns those graphs and their cost.

One pair for each rank: pair ``r`` is the star around ``r``. Fewest steps and least bytes at once, paid for
with n(n−1) links and as many messages: for ranks that are cheap to reach, as through shared memory. KungFu's
``CLIQUE``. Does not look at hosts.
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.strategies.shapes import host_sizes, star_around
from kfcomm.types import Layout

FORMULA = "steps 2; bytes 2(n−1)/n; between hosts max 2p(n−p)/n"


def clique(layout: Layout) -> Strategy:
    """One star around each rank."""
    size = layout.size
    return Strategy("clique", tuple(GraphPair.of(star_around(size, r)) for r in range(size)))


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks: 2 steps, 2(n−1)/n bytes; between hosts the greatest 2p(n−p)/n of a host with ``p`` ranks.

    (No steps for a single rank.)
    """
    size = layout.size
    return Cost(
        steps=2 * min(1, size - 1),
        bytes=Fraction(2 * (size - 1), size),
        cross_host_bytes=max(Fraction(2 * p * (size - p), size) for p in host_sizes(layout)),
    )
