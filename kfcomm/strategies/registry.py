"""Registry of the built-in strategies: one line each, with its cost formula.

The order is that of the documentation, and ``auto`` breaks ties by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kfcomm.strategies import builtin
from kfcomm.strategies.base import Strategy
from kfcomm.types import Layout


class Algorithm(NamedTuple):
    """A strategy for every layout.

    Attributes:
        build: makes the graphs; its name is the strategy's.
        formula: the cost in words; n ranks on h hosts, p on the busiest host, p₀ on the first one.
        pair_per_rank: it has as many pairs as ranks, so that its graphs take memory in n².
    """

    build: Callable[[Layout], Strategy]
    formula: str
    pair_per_rank: bool = False

    @property
    def name(self) -> str:
        """The name that users write."""
        return self.build.__name__


ALGORITHMS: Final = (
    Algorithm(builtin.star, "steps 2; bytes n−1; between hosts n−p₀"),
    Algorithm(builtin.ring, "steps 2(n−1); bytes 2(n−1)/n; between hosts 2(n−1)/n · c", pair_per_rank=True),
    Algorithm(builtin.clique, "steps 2; bytes 2(n−1)/n; between hosts max 2p(n−p)/n", pair_per_rank=True),
    Algorithm(builtin.direct, "steps 1; bytes n−1; between hosts max p(n−p)", pair_per_rank=True),
    Algorithm(builtin.chain_star, "steps n; bytes 2(n−1)/n; between hosts max ((n−1)c + p(n−p))/n", pair_per_rank=True),
    Algorithm(builtin.tree, "steps ≤ 4; bytes max(p₀+h−2, p); between hosts h−1"),
    Algorithm(builtin.binary_tree, "steps 2⌊log₂n⌋; bytes ≤ 3; between hosts c"),
    Algorithm(builtin.binary_tree_star, "steps ≤ 2⌊log₂h⌋+2; bytes ≤ p+2; between hosts ≤ 3"),
    Algorithm(builtin.multi_binary_tree_star, "steps ≤ 2⌊log₂h⌋+2; bytes p−1+2(h−1)/h; between hosts 2(h−1)/h"),
    Algorithm(builtin.multi_star, "steps ≤ 4; bytes p−1+2(h−1)/h; between hosts 2(h−1)/h"),
    Algorithm(builtin.binomial, "steps 2⌊log₂n⌋; bytes 2(n−1)/n; between hosts ≥ 2(h−1)/h", pair_per_rank=True),
)
