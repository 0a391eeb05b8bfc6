"""Cadence of measurements: every k-th step, with k as given, or such that measuring costs a small part of a step.

Invariant: the ranks feed equal numbers, so that they measure the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import MovingAverage
from kfcomm.train.rules import count_problem

Every: TypeAlias = int | Literal["auto"]

MAX_PERIOD = 1000
"""Steps from one measured step to the next at most."""
MEMORY = 0.8
"""Decay of the averages: of about five costs, and of as many steps."""
LONGEST = 4.0
"""A step counts as this many average ones at most: it may hold a pause, as when ranks join."""


class Cadence:
    """Choice of the measured steps.

    Args:
        every: number of steps from one measured step to the next; ``"auto"``: as few as keep the cost below
            ``max_cost``.
        max_cost: part of a step's time, between 0 and 1.

    Attributes:
        every: as given.
        period: present number of steps from one measured step to the next.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(self, every: Every, max_cost: float) -> None:
        if every != "auto" and (problem := count_problem("every", every)) is not None:
            raise ConfigError(f'{problem}; or "auto"')
        if not 0 < max_cost < 1:
            raise ConfigError(f"max_cost is a part of a step, between 0 and 1, not {max_cost!r}")
        self.every = every
        self._max_cost = max_cost
        self.begin()

    def begin(self) -> None:
        """Begin anew: the next step is measured."""
        self.period = 1 if self.every == "auto" else self.every
        self._num_since = self.period  # steps since the last measured one, with it
        self._spent_s = 0.0
        self._cost_s = MovingAverage(MEMORY)
        self._step_s = MovingAverage(MEMORY)

    @property
    def is_due(self) -> bool:
        """Whether the next step is measured."""
        return self._num_since >= self.period

    def advance(self, *, measured: bool, costs_s: Sequence[float], steps_s: Sequence[float]) -> None:
        """Count a step.

        Args:
            measured: whether it was measured.
            costs_s: seconds that each rank has spent on measuring since the last step.
            steps_s: seconds of each rank's last step; 0 where it is unknown.
        """
        if self.every == "auto":
            self._weigh(measured, max(costs_s), min(steps_s))
        self._num_since = 1 if measured else self._num_since + 1

    def _weigh(self, measured: bool, cost_s: float, step_s: float) -> None:
        # All ranks wait for the slowest one to measure, and their steps take equally long.
        self._spent_s += cost_s
        if step_s > 0:
            usual_s = self._step_s.value
            self._step_s.update(step_s if usual_s is None else min(step_s, LONGEST * usual_s))
        usual_s = self._step_s.value
        if not measured or usual_s is None:
            return
        self._cost_s.update(self._spent_s)
        self._spent_s = 0.0
        wanted = math.ceil((self._cost_s.value or 0.0) / (self._max_cost * usual_s))
        # Twice as many at most: the first pass over new memory takes longer than the next ones.
        self.period = max(1, min(wanted, 2 * self.period, MAX_PERIOD))

    @property
    def state(self) -> list[float]:
        """State for ranks that join: numbers, the same on all ranks."""
        return [self.period, self._num_since, self._spent_s, *self._cost_s.state, *self._step_s.state]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        period, num_since, spent_s, *averages = state
        if self.every == "auto":
            self.period = int(period)
        self._num_since, self._spent_s = int(num_since), float(spent_s)
        self._cost_s.state, self._step_s.state = averages[:2], averages[2:]
