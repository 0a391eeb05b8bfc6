"""Schedule of a probe: slots of rank pairs, such that no two pairs of a slot share a port. Pure arithmetic.

Between hosts, rounds are those of a tournament (the circle method): in each, every host meets one other, and each of
its ranks meets each of the other's, one pair after the other. Inside of hosts there is one pair at a time, on all hosts
at once. With h hosts of p ranks that makes (h−1)·p² + p(p−1)/2 slots, where h is even, else h·p² + p(p−1)/2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kfcomm.types import Layout

Slot = tuple[tuple[int, int], ...]
"""Pairs of ranks that measure at the same time."""


def slots_of(layout: Layout) -> list[Slot]:
    """Slots in which every two ranks meet once."""
    groups = [layout.ranks_of(host) for host in range(layout.num_hosts)]
    slots: list[Slot] = []
    for meetings in _tournament(layout.num_hosts):
        slots += _side_by_side([list(itertools.product(groups[a], groups[b])) for a, b in meetings])
    slots += _side_by_side([list(itertools.combinations(ranks, 2)) for ranks in groups])
    return slots


def _tournament(size: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every two of ``size`` meet once, one pair each per round; one rests if the number is odd."""
    even = size + size % 2
    seats = list(range(even))
    for _ in range(even - 1):
        meetings = [(seats[k], seats[-1 - k]) for k in range(even // 2)]
        yield [(a, b) for a, b in meetings if a < size and b < size]
        seats[1:] = [seats[-1], *seats[1:-1]]


def _side_by_side(rows: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Slot]:
    """The first of each row, then the second of each, and so on."""
    for slot in itertools.zip_longest(*rows):
        pairs = tuple(pair for pair in slot if pair is not None)
        if pairs:
            yield pairs
