"""Statistics of gradients: squared norms, moving averages, variance between ranks, and what a larger batch is worth.

Statistics between ranks follow from two numbers: the mean over the n ranks of |g_i|², which travels as one scalar, and
|ḡ|² of the mean gradient, which every rank has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.errors import ConfigError


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


def check_decay(decay: float) -> None:
    """Raise for a decay of a moving average that is out of its range."""
    if not 0 <= decay < 1:
        raise ConfigError(f"the decay of a moving average is at least 0 and below 1, not {decay!r}")


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
        check_decay(decay)
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


def gain(variance: float, signal: float, scale: float) -> float:
    """AdaScale's gain r = (σ² + μ²) / (σ²/S + μ²), between 1 and S; 1 if both parts are zero.

    σ² is of a gradient at scale 1, μ² the squared norm of the true gradient, S the batch in batches of the schedule.
    """
    if not scale > 0:
        raise ConfigError(f"the scale of a batch is above 0, not {scale!r}")
    below = variance / scale + signal
    return (variance + signal) / below if below > 0 else 1.0


class GradientStatistics(NamedTuple):
    """Statistics of a gradient of the initial batch.

    Attributes:
        signal: μ², the squared norm of the true gradient.
        variance: σ², of a gradient of the initial batch.
    """

    signal: float
    variance: float


def efficiency(gradients: GradientStatistics, initial_batch: float, batch: float) -> float:
    """Efficiency of a sample of a batch of all ranks, relative to the initial batch: gain / scale, scale = B / B0.

    Raises:
        ConfigError: a batch is not above 0.
    """
    if not (initial_batch > 0 and batch > 0):
        raise ConfigError(f"batches have samples, not {initial_batch!r} and {batch!r}")
    scale = batch / initial_batch
    return gain(gradients.variance, gradients.signal, scale) / scale
