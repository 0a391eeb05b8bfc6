"""The gradient noise scale: how large a batch is worth its samples. Floats in, floats out.

Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018,
https://arxiv.org/abs/1812.06162, appendix A. With the gradient G of the loss and the covariance Σ of one sample's
gradient, B_simple = tr(Σ) / |G|². A batch much smaller than that gains almost as much from each sample as possible, a
much larger one gains little from more. The mean of B gradients has E|G_B|² = |G|² + tr(Σ) / B, so that two batch sizes
tell both; the ranks have them: one rank's batch b, and that of all of them together, B.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kfcomm.errors import ConfigError
from kfcomm.train.averages import MovingAverage

DECAY = 0.99
"""Of the averages: a single step's estimate of |G|² is often off by its own size."""


class NoiseEstimate(NamedTuple):
    """What one step tells, without bias and with much variance.

    Attributes:
        signal: |G|², the squared norm of the true gradient. It can come out negative.
        noise: tr(Σ), the variance of one sample's gradient. It can come out negative, too.
    """

    signal: float
    noise: float


def noise_estimate(local_sq_norm: float, global_sq_norm: float, small_batch: float, big_batch: float) -> NoiseEstimate:
    """|G|² = (B|G_B|² − b|G_b|²) / (B − b) and tr(Σ) = (|G_b|² − |G_B|²) / (1/b − 1/B).

    Args:
        local_sq_norm: |G_b|², best as the mean over all ranks: one rank's is as noisy as its batch.
        global_sq_norm: |G_B|², of the mean gradient of all ranks.
        small_batch: b, samples of one rank's gradient.
        big_batch: B, samples of all.

    Raises:
        ConfigError: b is not above 0, or B not above b.
    """
    if not 0 < small_batch < big_batch:
        raise ConfigError(
            f"a noise scale needs two batch sizes, 0 < small < big, not {small_batch!r} and {big_batch!r}"
        )
    signal = (big_batch * global_sq_norm - small_batch * local_sq_norm) / (big_batch - small_batch)
    noise = (local_sq_norm - global_sq_norm) / (1 / small_batch - 1 / big_batch)
    return NoiseEstimate(signal, noise)


class NoiseScale:
    """The noise scale along training: both parts are averaged, each by itself, and then divided.

    Averages of the quotients would be biased, and infinite where a step's |G|² is zero.

    Args:
        decay: of the moving averages, which are corrected for their start.

    Attributes:
        num_updates: steps that count.
        num_left_out: steps whose norms were not finite: they count for nothing.

    Raises:
        ConfigError: ``decay`` is not at least 0 and below 1.
    """

    def __init__(self, decay: float = DECAY) -> None:
        self._signal = MovingAverage(decay)
        self._noise = MovingAverage(decay)
        self.num_updates = 0
        self.num_left_out = 0

    def update(self, local_sq_norm: float, global_sq_norm: float, small_batch: float, big_batch: float) -> None:
        """Take one step's norms; see `noise_estimate`. The batch sizes may change from step to step.

        Raises:
            ConfigError: b is not above 0, or B not above b.
        """
        found = noise_estimate(local_sq_norm, global_sq_norm, small_batch, big_batch)
        if not (math.isfinite(found.signal) and math.isfinite(found.noise)):
            self.num_left_out += 1
            return
        self.num_updates += 1
        self._signal.update(found.signal)
        self._noise.update(found.noise)

    @property
    def signal(self) -> float | None:
        """The average of |G|²; None before the first step."""
        return self._signal.value

    @property
    def noise(self) -> float | None:
        """The average of tr(Σ); None before the first step."""
        return self._noise.value

    @property
    def value(self) -> float | None:
        """B_simple, in samples; None while it is unknown: there was no step, or |G|² is not above 0 yet.

        It is 0 where the ranks' gradients differ less than not at all, which chance can do to equal ones.
        """
        signal, noise = self.signal, self.noise
        if signal is None or noise is None or signal <= 0:
            return None
        return max(noise, 0.0) / signal
