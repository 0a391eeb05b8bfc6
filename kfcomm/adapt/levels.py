"""Usual level of a number along training, and robust z-scores beside it. Pure.

A z-score is (x − median) / (1.4826 · MAD), with the median and the median absolute deviation of the values of earlier
good steps: single wrong values move neither. It is taken of logarithms, so that a jump is a factor.

Ranks decide by z-scores alike, so they must come to the same bits on hosts with different mathematical libraries. Hence
only additions, multiplications and divisions, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution, in MADs."""
LEAST_SIGMA = 0.25
"""Of a logarithm. After a plateau the MAD is 0: with z = 6 a jump is still a factor of e^1.5 = 4.5 at least."""
MAX_PER_STEP = 16
"""Values that are kept of a step, however many ranks there are."""
LN_2 = 0.6931471805599453
LARGEST = 1e308
"""Of a quotient, which is infinite where m is tiny."""


def exact_log(x: float) -> float:
    """Natural logarithm of a positive, finite number: to 1e-15 of it, with the same bits on every host."""
    mantissa, exponent = math.frexp(x)  # exact
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2 * mantissa, exponent - 1
    # ln m = 2 artanh((m − 1) / (m + 1)), whose argument is below 0.172 here.
    t = (mantissa - 1) / (mantissa + 1)
    square, term, total = t * t, t, 0.0
    for k in range(1, 23, 2):
        total += term / k
        term *= square
    return exponent * LN_2 + 2 * total


class Level:
    """Values of the ranks in the last good steps.

    Numbers that were above 0 so far are compared by their logarithms; others, as losses that are negative, by
    sign(x) · ln(1 + |x| / m), with the median m of their absolute values.

    Args:
        window: number of steps.
    """

    def __init__(self, window: int) -> None:
        self._steps: deque[list[float]] = deque(maxlen=window)
        self._scale: float | None = None  # m; None for plain logarithms
        self._known: tuple[float, float] | None = None  # median and sigma, until another step is added
        self._median = 0.0

    @property
    def num_steps(self) -> int:
        """Number of steps with a value."""
        return len(self._steps)

    @property
    def median(self) -> float:
        """Median of the values; 0 without any."""
        if self._known is None and self._steps:
            self._known = self._statistics()
        return self._median

    def z(self, x: float) -> float:
        """Robust z-score of a finite number; 0 where nothing is known beside which it could be high."""
        if not self._steps:
            return 0.0
        if self._known is None:
            self._known = self._statistics()
        middle, sigma = self._known
        if self._scale is None and x <= 0:
            return -math.inf
        return (self._converted(x) - middle) / sigma

    def add(self, values: Iterable[float]) -> None:
        """Add the values of the ranks in a good step."""
        kept = sorted(values)
        if len(kept) > MAX_PER_STEP:
            kept = [kept[(2 * k + 1) * len(kept) // (2 * MAX_PER_STEP)] for k in range(MAX_PER_STEP)]
        if kept:
            self._steps.append(kept)
            self._known = None

    def forget(self) -> None:
        """Begin anew."""
        self._steps.clear()
        self._known = None

    @property
    def state(self) -> list[list[float]]:
        """Values by step, for another level."""
        return [list(step) for step in self._steps]

    @state.setter
    def state(self, steps: Sequence[Sequence[float]]) -> None:
        self.forget()
        self._steps.extend([float(one) for one in step] for step in steps)

    def _statistics(self) -> tuple[float, float]:
        values = [value for step in self._steps for value in step]
        self._median = median(values)
        self._scale = None if min(values) > 0 else median(map(abs, values))
        converted = [self._converted(value) for value in values]
        middle = median(converted)
        return middle, max(LEAST_SIGMA, SIGMA_OF_MAD * median(abs(one - middle) for one in converted))

    def _converted(self, x: float) -> float:
        if self._scale is None:
            return exact_log(x)
        if self._scale == 0:  # most values were 0: no number is high beside them
            return 0.0
        return math.copysign(exact_log(1 + min(abs(x) / self._scale, LARGEST)), x)
