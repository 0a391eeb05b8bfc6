"""Least squares of a few parameters within bounds: Levenberg and Marquardt's method.

Marquardt, "An Algorithm for Least-Squares Estimation of Nonlinear Parameters", 1963. A parameter at a bound that the
gradient would take beyond it is held there for that step. Pure and deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]

MOST_STEPS = 200
LEAST_GAIN = 1e-12
DIFFERENCE = 1e-7
MOST_DAMPING = 1e12


class Minimum(NamedTuple):
    """Where the search has ended, or is.

    Attributes:
        values: the parameters.
        cost: the sum of the squared residuals there.
    """

    values: Vector
    cost: float


@dataclass(frozen=True)
class LeastSquares:
    """Residuals whose squares are to have a small sum.

    Attributes:
        residuals: of the parameters; finite wherever these are within their bounds.
        lower: the least that each parameter may be.
        upper: the most.
        free: which parameters may change.
    """

    residuals: Callable[[Vector], Sequence[float]]
    lower: Vector
    upper: Vector
    free: NDArray[np.bool_]

    def minimize(self, start: Sequence[float]) -> Minimum:
        """A local minimum, found from ``start``.

        Cost: a call of ``residuals`` for each free parameter and step, and some more; at most 200 steps.
        """
        at, damping = self._at(np.asarray(start, np.float64)), 1e-3
        for _ in range(MOST_STEPS):
            jacobian, found = self._jacobian(at.values)
            gradient = jacobian.T @ found
            moves = self.free & ~((at.values <= self.lower) & (gradient > 0))
            moves &= ~((at.values >= self.upper) & (gradient < 0))
            hessian = jacobian.T @ jacobian
            hessian, gradient = hessian[np.ix_(moves, moves)], gradient[moves]
            while True:
                step = np.zeros_like(at.values)
                curvature = np.maximum(np.diag(hessian), 1e-30)
                step[moves] = -np.linalg.solve(hessian + damping * np.diag(curvature), gradient)
                nearer = self._at(np.clip(at.values + step, self.lower, self.upper))
                if nearer.cost < at.cost:
                    break
                damping *= 4
                if damping > MOST_DAMPING:
                    return at
            gained, at, damping = at.cost - nearer.cost, nearer, max(damping / 5, 1e-12)
            if gained <= LEAST_GAIN * at.cost:
                return at
        return at

    def _at(self, values: Vector) -> Minimum:
        found = np.asarray(self.residuals(values))
        return Minimum(values, float(found @ found))

    def _jacobian(self, values: Vector) -> tuple[Vector, Vector]:
        """By differences, taken inwards where the upper bound is near; and the residuals."""
        found = np.asarray(self.residuals(values))
        jacobian = np.zeros((len(found), len(values)))
        for number in np.flatnonzero(self.free):
            change = DIFFERENCE * max(abs(values[number]), 1e-3)
            if values[number] + change > self.upper[number]:
                change = -change
            moved = values.copy()
            moved[number] += change
            jacobian[:, number] = (np.asarray(self.residuals(moved)) - found) / change
        return jacobian, found
