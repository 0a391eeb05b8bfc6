"""The strategies by name: how each is built, what it costs, and its formula in words.

Owns the list and nothing else; the graphs and formulas are in one file for each. The order is that in which
people meet them, and in which ``auto`` breaks ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kfcomm.strategies import (
    binary_tree,
    binary_tree_star,
    binomial,
    chain_star,
    clique,
    direct,
    multi_binary_tree_star,
    multi_star,
    ring,
    star,
    tree,
)
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import Cost
from kfcomm.types import Layout


class Algorithm(NamedTuple):
    """A strategy for every layout.

    Attributes:
        name: as users write it.
        build: makes the graphs.
        cost: the closed formula of what they cost.
        formula: the same in words; n ranks on h hosts, p on the busiest host, p₀ on the first one.
        pair_per_rank: it has as many pairs as ranks, so that its graphs take memory in n².
    """

    name: str
    build: Callable[[Layout], Strategy]
    cost: Callable[[Layout], Cost]
    formula: str
    pair_per_rank: bool = False


ALGORITHMS: Final = (
    Algorithm("star", star.star, star.cost, star.FORMULA),
    Algorithm("ring", ring.ring, ring.cost, ring.FORMULA, pair_per_rank=True),
    Algorithm("clique", clique.clique, clique.cost, clique.FORMULA, pair_per_rank=True),
    Algorithm("direct", direct.direct, direct.cost, direct.FORMULA, pair_per_rank=True),
    Algorithm("chain_star", chain_star.chain_star, chain_star.cost, chain_star.FORMULA, pair_per_rank=True),
    Algorithm("tree", tree.tree, tree.cost, tree.FORMULA),
    Algorithm("binary_tree", binary_tree.binary_tree, binary_tree.cost, binary_tree.FORMULA),
    Algorithm("binary_tree_star", binary_tree_star.binary_tree_star, binary_tree_star.cost, binary_tree_star.FORMULA),
    Algorithm(
        "multi_binary_tree_star",
        multi_binary_tree_star.multi_binary_tree_star,
        multi_binary_tree_star.cost,
        multi_binary_tree_star.FORMULA,
    ),
    Algorithm("multi_star", multi_star.multi_star, multi_star.cost, multi_star.FORMULA),
    Algorithm("binomial", binomial.binomial, binomial.cost, binomial.FORMULA, pair_per_rank=True),
)
