"""Pairwise covering of factors: few cases in which every two values of two factors meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Case: TypeAlias = "tuple[Any, ...]"
"""One value of each factor, in the order of the factors."""


def pairs_of(case: Case) -> set[tuple[int, Any, int, Any]]:
    """The pairs of values in a case, each with the numbers of its factors."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def covering(factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Case], bool]) -> list[Case]:
    """Cases in which every possible pair of values of two factors occurs; the same ones at each run.

    Greedy: each next case is the one, of the full product, that has the most pairs that no case before it has (AETG,
    Cohen et al. 1997, without its randomness). The full product is small here: some thousand cases.
    """
    possible = [case for case in product(*factors.values()) if is_possible(case)]
    pairs = {case: pairs_of(case) for case in possible}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(possible, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
