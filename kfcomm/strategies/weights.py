"""Weights of things that share places, such that the busiest place is as little busy as can be. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

_ROUNDS: Final = 1000
_STEP: Final = 0.1


def balanced(loads: Sequence[Mapping[Any, float]]) -> list[float]:
    """Weights that add up to 1 and make ``max over places of Σ weight · load`` nearly as small as possible.

    By multiplicative weights: places have prices, which grow with what is put on them; each round takes what is
    cheapest by the prices, and as much of it as fills one place. Nothing but sums, products and quotients, so that
    every rank comes to the same weights.

    Source: N. Garg and J. Könemann, "Faster and simpler algorithms for multicommodity flow and other fractional packing
    problems" (1998).

    Args:
        loads: of each thing, how busy it alone makes each place; what is left out is 0.
    """
    prices: dict[Hashable, float] = {place: 1.0 for load in loads for place in load}
    fullest = [max(load.values()) for load in loads]
    taken = [0.0] * len(loads)
    for _ in range(_ROUNDS):
        costs = [sum(prices[place] * amount for place, amount in load.items()) for load in loads]
        cheapest = costs.index(min(costs))
        taken[cheapest] += 1 / fullest[cheapest]
        for place, amount in loads[cheapest].items():
            prices[place] *= 1 + _STEP * amount / fullest[cheapest]
    total = sum(taken)
    return [times / total for times in taken]
