"""Sequential test for a change in the cost of a step, with a stated rate of false alarms.

Pure and deterministic, without a clock: ranks that feed the same numbers get the same results.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from statistics import median, quantiles, stdev

from kfcomm.errors import ConfigError

MEMORY = 64
"""Steps of the reference: the latest calm ones."""
LAG = 8
"""The newest steps are not in the reference yet, so that a change does not become its own reference."""
LEAST_NOISE = 0.05
"""The noise of a step's cost is taken for at least 5 %."""
_FEW = 16
"""Below so many steps, quantiles are no estimate of the noise."""
_FAR = 3.0
"""Distance of the most extreme calm step, in units of the noise, at most."""
_LEAST_STEPS = 3
"""A change needs the evidence of so many steps: one or two may be a stall."""


class Change(StrEnum):
    """Direction of a change."""

    SLOWER = "slower"
    FASTER = "faster"


class ChangeTest:
    """Finds lasting changes of a positive cost, in noise that it measures itself.

    The logarithm of each cost is compared with the median of up to `MEMORY` earlier ones, in units of their noise. The
    distance becomes a p-value by Student's distribution with 4 degrees of freedom, whose heavy tails allow for
    outliers; the p-value becomes a factor of evidence, ½ p^(−½), whose mean is 1 as long as nothing changes. Evidence
    is multiplied from step to step, and begins anew where it is below 1. An alarm is given when it reaches
    1 / ``false_alarms``: without a change that happens once in at least so many steps on average, if the steps'
    costs are independent and their noise has no heavier tails. One step counts for at most the third root of that, so
    that one or two stalls are never a change.

    With noise of 5 % a cost that doubles is found in 3 steps, one that rises by half in 4, by 30 % in 5; with noise of
    20 %, one that doubles in 8. After an alarm the changed costs are the new reference.

    Source: Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential change detection" (2022);
    Vovk, Nouretdinov and Gammerman, "Testing exchangeability on-line" (2003), for the factor.

    Args:
        false_alarms: per step, above 0 and below 1.
        warmup: steps before it may give an alarm, at least 5.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(self, *, false_alarms: float = 1e-4, warmup: int = 8) -> None:
        if not 0 < false_alarms < 1:
            raise ConfigError(f"false_alarms is a rate above 0 and below 1, not {false_alarms!r}")
        if warmup < 5:
            raise ConfigError(f"warmup is at least 5 steps, not {warmup!r}")
        self.false_alarms = false_alarms
        self.warmup = warmup
        self._most = (1 / false_alarms) ** (1 / _LEAST_STEPS) * (1 + 1e-9)  # evidence of one step
        self.reset()

    def reset(self, costs: Sequence[float] = ()) -> None:
        """Begin anew, with these costs as the reference."""
        self._reference = deque(map(math.log, costs), maxlen=MEMORY)
        self._recent: deque[float] = deque()  # the newest, which are not in the reference yet
        self._evidence = dict.fromkeys(Change, 1.0)
        self._since = dict.fromkeys(Change, 0)  # steps of which the evidence is
        self.former = self.former_noise = math.nan

    former: float
    """Median cost before the last alarm; nan without one."""
    former_noise: float
    """Relative noise of the costs before it: 0.05 for 5 %."""

    @property
    def level(self) -> float:
        """Median cost since the last alarm, or of the reference; nan without a step."""
        known = self._reference or self._recent
        return math.exp(median(known)) if known else math.nan

    @property
    def is_warm(self) -> bool:
        """Whether there are enough steps to compare with."""
        return len(self._reference) >= self.warmup

    def update(self, cost: float) -> Change | None:
        """Add the cost of a step, in any unit; return the change that is certain now, if there is one.

        A cost of nan, infinity, or 0 or less (nothing was measured) is left out.
        """
        if not 0 < cost < math.inf:
            return None
        value = math.log(cost)
        found = self._weigh(value) if self.is_warm else None
        self._recent.append(value)
        if found is not None:
            self._begin_at_the_change(found)
        elif len(self._recent) > LAG or not self.is_warm:
            self._reference.append(self._recent.popleft())
        return found

    def _weigh(self, value: float) -> Change | None:
        distance = (value - median(self._reference)) / self._noise()
        for change, side in ((Change.SLOWER, distance), (Change.FASTER, -distance)):
            evidence = self._evidence[change] * min(0.5 * _p_value(side) ** -0.5, self._most)
            self._evidence[change] = max(1.0, evidence)
            self._since[change] = self._since[change] + 1 if evidence > 1 else 0
            if evidence * self.false_alarms >= 1:
                return change
        return None

    def _begin_at_the_change(self, change: Change) -> None:
        """Continue with the costs since the evidence began."""
        latest = list(self._recent)[-self._since[change] :]
        former, noise = self.level, self._noise()
        self.reset()
        self.former, self.former_noise = former, noise
        self._reference.extend(latest)

    def _noise(self) -> float:
        values = self._reference
        if len(values) < _FEW:
            # one estimate from few values is too small as often as not
            spread = stdev(values) * (1 + 4 / len(values))
        else:
            tenths = quantiles(values, n=10)
            # As of a normal distribution; and what was there before, however rare, is not far out.
            spread = max(
                (tenths[8] - tenths[4]) / 1.2816, (tenths[4] - tenths[0]) / 1.2816,
                (max(values) - tenths[4]) / _FAR, (tenths[4] - min(values)) / _FAR,
            )  # fmt: skip
        return max(LEAST_NOISE, spread)


def _p_value(distance: float) -> float:
    """Probability of at least this distance by Student's distribution with 4 degrees of freedom."""
    if distance > 30:  # the leading term, since the difference below loses its digits
        return 3.0 / distance**4
    part: float = distance**2 / (4 + distance**2)
    # Regularised incomplete beta function of (2, ½), in closed form.
    tail: float = 0.5 - 0.75 * math.sqrt(part) + 0.25 * part**1.5
    return tail if distance > 0 else 1 - tail
