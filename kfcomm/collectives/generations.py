"""Plans cached per strategy of a group.

Every change of strategy is a generation of its own, and every chunk carries its number. A plan depends on the strategy
alone, so a program that goes back and forth between strategies plans each kind of collective once for each. Beyond
`MAX_STRATEGIES` the cache is emptied.
"""

from __future__ import annotations

from kfcomm.collectives.plans import Plan, Planner, Plans, agreement
from kfcomm.core.graph import GraphPair
from kfcomm.strategies import AnyStrategy, build
from kfcomm.types import Layout

MAX_STRATEGIES = 64


class Generations:
    """Plans of one rank of a group, by strategy.

    Args:
        rank: of the group.
        layout: hosts of its members.
    """

    def __init__(self, rank: int, layout: Layout) -> None:
        self._rank = rank
        self._layout = layout
        here = layout.ranks_of(layout.hosts[rank])
        self._local = here if 1 < len(here) < layout.size else ()
        self._tree: GraphPair | None = None
        self._plans: dict[tuple[str, bytes], Plans] = {}
        self._agreements: dict[tuple[str, bytes], Plan] = {}

    def plans(self, strategy: AnyStrategy, generation: int) -> Plans:
        """The plans under a strategy that comes into force as this generation."""
        key = (strategy.name, strategy.digest)
        known = self._plans.get(key)
        if known is None:
            self._make_room()
            known = self._plans[key] = Plans(Planner(self._rank, self._layout.size, strategy, self._local))
        return known.again(generation)

    def agreement(self, strategy: AnyStrategy) -> Plan:
        """The barrier in which the members agree on a strategy."""
        key = (strategy.name, strategy.digest)
        plan = self._agreements.get(key)
        if plan is None:
            self._make_room()
            if self._tree is None:
                self._tree = build("binary_tree", self._layout).select(0).pairs[0]
            plan = self._agreements[key] = agreement(self._rank, self._tree, strategy)
        return plan

    def _make_room(self) -> None:
        if len(self._plans) >= MAX_STRATEGIES or len(self._agreements) >= MAX_STRATEGIES:
            self._plans.clear()
            self._agreements.clear()
