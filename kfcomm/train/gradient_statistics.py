"""Statistics of gradients: squared norms, moving averages, variance between ranks, and the gradient noise scale.

Statistics between ranks follow from two numbers: the mean over the n ranks of |g_i|², which travels as one scalar, and
|ḡ|² of the mean gradient, which every rank has.

Source of the noise scale: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018,
https://arxiv.org/abs/1812.06162, appendix A. With the gradient G of the loss and the covariance Σ of one sample's
gradient, B_simple = tr(Σ) / |G|². A much smaller batch gains almost as much from each sample as possible, a much larger
one gains little from more. The mean of B gradients has E|G_B|² = |G|² + tr(Σ) / B, so that two batch sizes determine
both; the ranks have them: the batch b of one rank, and the batch B of all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.errors import ConfigError

BLOCK = 1 << 16
"""Elements whose squares are added in the array's own precision, for float32 to about 1e-6; blocks are in float64."""


def squared_norm(arrays: Iterable[Any]) -> float:
    """Σ x² over all elements of all arrays, which are in host memory.

    Infinite or NaN where an element is, without a warning.

    Cost: one pass over them: about 5 ms for 25 million elements of float32.
    """
    return float(sum(_of_one(adapt(x).flat) for x in arrays))


def share(arrays: Iterable[Any], part: int, parts: int) -> list[np.ndarray[Any, Any]]:
    """One of ``parts`` shares of all elements, end to end: views of the arrays that it touches. Sizes differ by one."""
    flats = [adapt(x).flat for x in arrays]
    total = sum(flat.size for flat in flats)
    first, end, at = part * total // parts, (part + 1) * total // parts, 0
    found = []
    for flat in flats:
        low, high = max(first - at, 0), min(end - at, flat.size)
        if low < high:
            found.append(flat[low:high])
        at += flat.size
    return found


@np.errstate(all="ignore")
def _of_one(flat: np.ndarray[Any, Any]) -> float:
    # Squares of float16 overflow above 256, and bfloat16 loses most of its digits in a sum.
    if flat.dtype not in (np.float32, np.float64):
        return float(sum(_of_block(flat[at : at + BLOCK].astype(np.float32)) for at in range(0, flat.size, BLOCK)))
    return float(sum(_of_block(flat[at : at + BLOCK]) for at in range(0, flat.size, BLOCK)))


def _of_block(block: np.ndarray[Any, Any]) -> float:
    return float(np.dot(block, block))


class MovingAverage:
    """Exponential moving average, corrected for its start at zero: a weighted mean of its values.

    After t values the weight of the k-th last is decay^k (1 − decay) / (1 − decay^t), as in Adam (Kingma and Ba,
    https://arxiv.org/abs/1412.6980, section 3). With decay 0 it is the latest value.

    Args:
        decay: at least 0 and below 1; the average is of about 1 / (1 − decay) values.

    Raises:
        ConfigError: ``decay`` is out of its range.
    """

    __slots__ = ("_decay", "_sum", "_weight")

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"the decay of a moving average is at least 0 and below 1, not {decay!r}")
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def update(self, value: float) -> None:
        """Take one more value."""
        self._sum = self._decay * self._sum + (1 - self._decay) * value
        self._weight = self._decay * self._weight + (1 - self._decay)

    @property
    def state(self) -> tuple[float, float]:
        """Weighted sum, and sum of the weights, for another average to continue from."""
        return self._sum, self._weight

    @state.setter
    def state(self, state: Sequence[float]) -> None:
        self._sum, self._weight = state

    @property
    def value(self) -> float | None:
        """The average; None before the first value."""
        return self._sum / self._weight if self._weight else None


def gradient_variance(local_sq_norm: float, global_sq_norm: float) -> float:
    """Σ|g_i|² / n − |ḡ|²: the squared distance of a rank's gradient from the mean, on average over the ranks.

    Rounding can make it negative where all gradients are alike: then it is 0.

    Args:
        local_sq_norm: Σ|g_i|² / n.
        global_sq_norm: |ḡ|².
    """
    return max(local_sq_norm - global_sq_norm, 0.0)


def mean_cosine(local_sq_norm: float, global_sq_norm: float, size: int) -> float | None:
    """The cosine between the gradients of two ranks, over all pairs: Σ g_i·g_j / Σ |g_i||g_j| where norms are alike.

    (n|ḡ|² − Σ|g_i|²/n) / ((n − 1) Σ|g_i|²/n): 1 for equal gradients, 0 for orthogonal ones, at least −1/(n − 1). It is
    exactly the mean of the pairs' cosines where all |g_i| are equal, and else their inner products over the mean of
    |g_i|².

    Args:
        local_sq_norm: Σ|g_i|² / n.
        global_sq_norm: |ḡ|².
        size: n.

    Returns:
        None for one rank, or where all gradients are zero.

    Raises:
        ConfigError: ``size`` is not at least 1.
    """
    if size < 1:
        raise ConfigError(f"there is at least one rank, not {size!r}")
    if size == 1 or local_sq_norm <= 0:
        return None
    return (size * global_sq_norm - local_sq_norm) / ((size - 1) * local_sq_norm)


DECAY = 0.99
"""Of the averages: a single step's estimate of |G|² is often off by its own size."""


class NoiseEstimate(NamedTuple):
    """Estimate from one step, without bias and with much variance.

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
