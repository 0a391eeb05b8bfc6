"""AdaScale: by how much a larger batch makes a step count for more. Floats in, floats out.

Source: Johnson, Agrawal, Gu, Guestrin, "AdaScale SGD: A User-Friendly Algorithm for Distributed Training", ICML 2020,
https://arxiv.org/abs/2007.05105; averages and bounds are those of fairscale's ``AdaScale``. A step with S times the
batch is worth r steps with the batch of the schedule, 1 ≤ r ≤ S: S where gradients are all noise, 1 where they are all
alike. The learning rate is multiplied by r, and the schedule is asked at the sum of all r, not at the number of steps.
"""

from __future__ import annotations

import math

from kfcomm.errors import ConfigError
from kfcomm.train.averages import MovingAverage

LEAST_VARIANCE = 1e-6


def gain(variance: float, signal: float, scale: float) -> float:
    """The gain r = (σ² + μ²) / (σ²/S + μ²).

    Args:
        variance: σ², of a gradient at scale 1.
        signal: μ², the squared norm of the true gradient.
        scale: S, the batch in batches of the schedule.

    Returns:
        Between 1 and S; 1 if both parts are zero.

    Raises:
        ConfigError: ``scale`` is not above 0.
    """
    if not scale > 0:
        raise ConfigError(f"the scale of a batch is above 0, not {scale!r}")
    below = variance / scale + signal
    return (variance + signal) / below if below > 0 else 1.0


class AdaScale:
    """The gain along training, with averages as fairscale keeps them.

    Args:
        num_gradients: cN, how many gradients make a step: ranks times accumulations; at least 2.
        scale: S, the batch of a step in batches of the schedule; None for ``num_gradients``.
        decay: of the averages; None for fairscale's max(1 − cN / 1000, 0).

    Attributes:
        scale: S.
        progress: the steps so far, in steps of the schedule: the sum of the gains.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(self, num_gradients: int, *, scale: float | None = None, decay: float | None = None) -> None:
        if num_gradients < 2:
            raise ConfigError(f"AdaScale compares at least 2 gradients, not {num_gradients!r}")
        self.scale = float(num_gradients) if scale is None else scale
        if not self.scale > 0:
            raise ConfigError(f"the scale of a batch is above 0, not {scale!r}")
        self.progress = 0.0
        self._num_gradients = num_gradients
        found = max(1 - num_gradients / 1000, 0.0) if decay is None else decay
        self._variance = MovingAverage(found)
        self._signal = MovingAverage(found)

    def update(self, local_sq_norm: float, global_sq_norm: float) -> float:
        """Take one step's norms; returns its gain, which is added to ``progress``.

        σ² = S (Σ|g_i|²/cN − |ḡ|²) / (cN − 1), at least 1e-6; μ² = |ḡ|² − σ²/S, at least 0. A step whose norms are not
        finite changes no average and adds the gain as it was.

        Args:
            local_sq_norm: the mean over the cN gradients of |g_i|².
            global_sq_norm: |ḡ|², of their mean.
        """
        variance = self.scale * (local_sq_norm - global_sq_norm) / (self._num_gradients - 1)
        signal = global_sq_norm - variance / self.scale
        if math.isfinite(variance) and math.isfinite(signal):
            self._variance.update(max(variance, LEAST_VARIANCE))
            self._signal.update(max(signal, 0.0))
        found = self.gain()
        self.progress += found
        return found

    def gain(self, scale: float | None = None) -> float:
        """r, by what is known so far; 1 before the first step.

        Args:
            scale: S of a batch that is thought of; None for the one that is.

        Raises:
            ConfigError: ``scale`` is not above 0.
        """
        if self._variance.value is None or self._signal.value is None:
            return 1.0
        return gain(self._variance.value, self._signal.value, self.scale if scale is None else scale)

    @property
    def variance(self) -> float | None:
        """The average of σ²; None before the first step."""
        return self._variance.value

    @property
    def signal(self) -> float | None:
        """The average of μ²; None before the first step."""
        return self._signal.value
