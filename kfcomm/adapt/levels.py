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
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution, in MADs."""
LEAST_SIGMA = 0.25
"""Of a logarithm. After a plateau the MAD is 0: with z = 6 a jump is still a factor of e^1.5 = 4.5 at least."""
MAX_PER_STEP = 16
"""Values that are kept of a step, however many ranks there are."""
RENEWED = 16
"""Median and deviation are computed again when one in so many steps of the window is new: that takes 0.1 ms."""
LN_2, SQRT_HALF = 0.6931471805599453, 0.7071067811865476
LARGEST = 1e308
"""Of a quotient, which is infinite where m is tiny."""


def exact_log(x: float) -> float:
    """Natural logarithm of a positive, finite number: to 1e-15 of it, with the same bits on every host."""
    mantissa, exponent = math.frexp(x)  # exact
    if mantissa < SQRT_HALF:
        mantissa, exponent = 2 * mantissa, exponent - 1
    found: float = exponent * LN_2 + _log_near_1(mantissa)
    return found


def exact_logs(x: Array) -> Array:
    """``exact_log`` of all elements, with the same bits."""
    mantissas, exponents = np.frexp(x)
    is_small = mantissas < SQRT_HALF
    found: Array = (exponents - is_small) * LN_2 + _log_near_1(np.where(is_small, 2 * mantissas, mantissas))
    return found


def _log_near_1(m: Any) -> Any:
    # ln m = 2 artanh((m − 1) / (m + 1)), whose argument is below 0.172 here.
    t = (m - 1) / (m + 1)
    square, term, total = t * t, t, 0.0 * t
    for k in range(1, 23, 2):
        total = total + term / k
        term = term * square
    return 2 * total


class Level:
    """Values of the ranks in the last good steps.

    Numbers that were above 0 so far are compared by their logarithms; others, as losses that are negative, by
    sign(x) · ln(1 + |x| / m), with the median m of their absolute values.

    Args:
        window: number of steps.
    """

    def __init__(self, window: int) -> None:
        self._steps: deque[list[float]] = deque(maxlen=window)
        # The same values and their logarithms in rings of rows, nan where a step has fewer values.
        self._values = np.full((window, MAX_PER_STEP), math.nan)
        self._logs = np.full((window, MAX_PER_STEP), math.nan)
        self._row = 0
        self._scale: float | None = None  # m; None for plain logarithms
        self._known: tuple[float, float] | None = None  # median and sigma
        self._age = 0  # steps since these were computed

    @property
    def num_steps(self) -> int:
        """Number of steps with a value."""
        return len(self._steps)

    @property
    def median(self) -> float:
        """Median of the values; 0 without any."""
        return median([value for step in self._steps for value in step]) if self._steps else 0.0

    def z(self, x: float) -> float:
        """Robust z-score of a finite number; 0 where nothing is known beside which it could be high."""
        if not self._steps:
            return 0.0
        if self._known is None or self._age >= self.num_steps // RENEWED:
            self._known, self._age = self._statistics(), 0
        middle, sigma = self._known
        if self._scale is None:
            return (exact_log(x) - middle) / sigma if x > 0 else -math.inf
        return (float(self._signed(np.array([x]))[0]) - middle) / sigma

    def add(self, values: Iterable[float]) -> None:
        """Add the values of the ranks in a good step."""
        kept = sorted(values)
        if len(kept) > MAX_PER_STEP:
            kept = [kept[(2 * k + 1) * len(kept) // (2 * MAX_PER_STEP)] for k in range(MAX_PER_STEP)]
        if not kept:
            return
        self._steps.append(kept)
        for ring, row in ((self._values, kept), (self._logs, [exact_log(x) if x > 0 else -math.inf for x in kept])):
            ring[self._row] = math.nan
            ring[self._row, : len(row)] = row
        self._row = (self._row + 1) % len(self._values)
        self._age += 1

    def forget(self) -> None:
        """Begin anew."""
        self._steps.clear()
        self._values[:] = self._logs[:] = math.nan
        self._known = None

    @property
    def state(self) -> list[Any]:
        """Values by step, and what was computed of them, for another level; msgpack can carry it."""
        return [[list(step) for step in self._steps], self._known, self._scale, self._age]

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        steps, known, self._scale, age = state
        self.forget()
        for step in steps:
            self.add(map(float, step))
        self._known, self._age = None if known is None else (float(known[0]), float(known[1])), int(age)

    def _statistics(self) -> tuple[float, float]:
        is_value = ~np.isnan(self._values)
        converted, self._scale = self._logs[is_value], None
        if converted.min() == -math.inf:
            values = self._values[is_value]
            self._scale = float(np.median(np.abs(values)))
            converted = self._signed(values)
        middle = float(np.median(converted))
        return middle, max(LEAST_SIGMA, SIGMA_OF_MAD * float(np.median(np.abs(converted - middle))))

    def _signed(self, x: Array) -> Array:
        if not self._scale:  # most values were 0: no number is high beside them
            return np.zeros_like(x)
        with np.errstate(over="ignore"):
            quotients = np.minimum(np.abs(x) / self._scale, LARGEST)
        return np.copysign(exact_logs(1 + quotients), x)
