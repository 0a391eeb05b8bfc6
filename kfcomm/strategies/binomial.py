"""Binomial: recursive halving and doubling, as rotated binomial trees. Owns those graphs and their cost.

One pair for each rank: pair ``r`` is the binomial tree over the labels ``v``, in which the parent of ``v`` is
``v`` without its lowest bit set, and label 0 is rank ``r``. If n is a power of two, label ``v`` is rank
``r xor v``; then in all pairs together rank ``i`` talks to i xor 1, i xor 2, i xor 4, … only, with parts of
1/2, 1/4, 1/8, … of the message: recursive halving on the way up, doubling on the way down. For n = m·2^b with m
odd, the lower b bits of label and rank are combined by xor and the rest by addition modulo m: the same bytes,
over more links. Least bytes in few steps. Subtrees are blocks of neighbouring ranks, so that ranks numbered host
by host reduce inside their hosts first.

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH"
(2005).
"""

from __future__ import annotations

from fractions import Fraction

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost, crossings
from kfcomm.types import Layout

FORMULA = "steps 2⌊log₂n⌋; bytes 2(n−1)/n; between hosts ≥ 2(h−1)/h"


def binomial(layout: Layout) -> Strategy:
    """One rotated binomial tree for each rank."""
    return Strategy("binomial", tuple(_rotated(layout.size, root) for root in range(layout.size)))


def _rotated(size: int, root: int) -> GraphPair:
    """The small subtrees are folded first, the large ones are sent to first: each is ready, or needed, first."""
    edges = [(_neighbour(size, root, label & (label - 1)), _neighbour(size, root, label)) for label in range(1, size)]
    return GraphPair(Graph.from_edges(size, edges), Graph.from_edges(size, reversed(edges)))


def _neighbour(size: int, rank: int, label: int) -> int:
    """The rank at ``label`` as seen from ``rank``."""
    block = size & -size
    above = (rank // block + label // block) % (size // block)
    return above * block + (rank % block ^ label % block)


def cost(layout: Layout) -> Cost:
    """Of ``n`` ranks: 2⌊log₂n⌋ steps, 2(n−1)/n bytes.

    Between hosts (2/n)·Σ t·c(d) bytes over d = 1, 2, 4, … < n, of the busiest host: ``t`` labels below n have ``d`` as
    their lowest bit (t = ⌊(⌊(n−1)/d⌋+1)/2⌋), and ``c(d)`` ranks of the host have their neighbour at label ``d``
    elsewhere. For h hosts of 2^b ranks each, numbered host by host, that is 2(h−1)/h.
    """
    size = layout.size
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    crossing = [
        (rank, _neighbour(size, rank, d)) for d in distances for rank in range(size) for _ in range(_labels(size, d))
    ]
    return Cost(
        steps=2 * (size.bit_length() - 1),
        bytes=Fraction(2 * (size - 1), size),
        cross_host_bytes=Fraction(2 * max(crossings(layout, crossing)), size),
    )


def _labels(size: int, distance: int) -> int:
    """How many labels below ``size`` have ``distance`` as their lowest bit."""
    return ((size - 1) // distance + 1) // 2
