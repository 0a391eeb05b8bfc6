"""Trials of several candidates, to find the cheapest at a cost that is bounded: successive elimination.

Pure and deterministic: costs in, the next candidate out. Ranks that feed the same costs try the same candidates in the
same order and keep the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from kfcomm.errors import ConfigError


@dataclass
class _Candidate:
    costs: list[float] = field(default_factory=list)
    seen: int = 0  # steps in this round

    @property
    def cost(self) -> float:
        return median(self.costs) if self.costs else math.inf


class Trials:
    """A series of trials among candidates 0, 1, ..., in rounds.

    In a round each remaining candidate runs for ``steps`` steps. The first of them is not counted: links are opened in
    it. The last one is the step in which the ranks agree on the change. Who costs more than ``give_up`` times the best
    so far after its first counted step is changed at once. At the end of a round those are out whose median cost is
    more than ``margin`` above the lowest. When one is left, or after ``rounds`` rounds, the one with the lowest median
    stays.

    Regret, what the trials cost beyond running the best from the beginning: candidate c, whose step takes w(c) times
    the best's, runs for at most ``rounds * steps`` steps (the first one, for one more), or for 3 if w(c) is above
    ``give_up`` and the best was tried before. So it is at most ``rounds * steps * sum(w(c) - 1)`` steps of the best,
    however long the job is. That holds for costs that are the same at each step; with noise, the choice is wrong by as
    much as medians of ``steps - 1`` costs are.

    Args:
        num_candidates: at least 1.
        steps: at least 3.
        rounds: at least 1.
        margin: above 0.
        give_up: above 1.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(
        self, num_candidates: int, *, steps: int = 4, rounds: int = 2, margin: float = 0.1, give_up: float = 2.0
    ) -> None:
        for name, value, least in (("candidates", num_candidates, 1), ("steps", steps, 3), ("rounds", rounds, 1)):
            if value < least:
                raise ConfigError(f"trials need at least {least} {name}, not {value!r}")
        if not margin > 0:
            raise ConfigError(f"margin is above 0, not {margin!r}")
        if not give_up > 1:
            raise ConfigError(f"give_up is above 1, not {give_up!r}")
        self._candidates = [_Candidate() for _ in range(num_candidates)]
        self._steps = steps
        self._rounds = rounds
        self._margin = margin
        self._give_up = give_up
        self._remaining = list(range(num_candidates))
        self._queue = list(self._remaining)

    @property
    def wanted(self) -> int:
        """The candidate that should run; at the end, the one that stays."""
        return self._queue[0] if self._queue else self.best

    @property
    def is_over(self) -> bool:
        """Whether the choice is made."""
        return not self._queue

    @property
    def best(self) -> int:
        """The remaining candidate with the lowest median cost; of equals, the first."""
        return min(self._remaining, key=lambda number: self._candidates[number].cost)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Those that are not out."""
        return tuple(self._remaining)

    @property
    def costs(self) -> tuple[float, ...]:
        """The median costs, by candidate; inf for those without one."""
        return tuple(one.cost for one in self._candidates)

    def add(self, number: int, cost: float) -> None:
        """A step of candidate ``number``, wanted or about to be left, has cost so much."""
        candidate = self._candidates[number]
        candidate.seen += 1
        if candidate.seen > 1:
            candidate.costs.append(cost)
        if not self._queue or number != self._queue[0]:
            return
        counted = candidate.seen - 1
        is_hopeless = counted >= 1 and candidate.cost > self._give_up * self._lowest()
        if counted >= self._steps - 2 or is_hopeless:
            self._queue.pop(0)
            if not self._queue:
                self._end_of_round()

    def _lowest(self) -> float:
        return self._candidates[self.best].cost

    def _end_of_round(self) -> None:
        self._rounds -= 1
        bound = (1 + self._margin) * self._lowest()
        self._remaining = [number for number in self._remaining if self._candidates[number].cost <= bound]
        if self._rounds > 0 and len(self._remaining) > 1:
            self._queue = self._in_order()
            for number in self._queue:
                self._candidates[number].seen = 0

    def _in_order(self) -> list[int]:
        """The best last: it runs then, and if it stays the best no change is needed."""
        best = self.best
        return [number for number in self._remaining if number != best] + [best]
