"""Statistics of gradients: variance between ranks, the gradient noise scale, and the monitor that measures them.

Statistics between ranks follow from two numbers: the mean over the n ranks of |g_i|², which travels as one scalar, and
|ḡ|² of the mean gradient, which every rank has.

`GradientMonitor` lets one array of three numbers travel with the gradients of a rank: |g_i|², one over its batch, and
its share of |ḡ|² of the step before. ḡ is the same on all ranks, so that each rank squares only a part of it, and the
sum of the parts comes with the next step, without another collective or vector.

Source of the noise scale: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018,
https://arxiv.org/abs/1812.06162, appendix A. With the gradient G of the loss and the covariance Σ of one sample's
gradient, B_simple = tr(Σ) / |G|². A much smaller batch gains almost as much from each sample as possible, a much larger
one gains little from more. The mean of B gradients has E|G_B|² = |G|² + tr(Σ) / B, so that two batch sizes determine
both; the ranks have them: the batch b of one rank, and the batch B of all of them together.

Invariant: statistics of a step follow from the sums of that step only, at the end of the next one, on all ranks from
the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.errors import ConfigError
from kfcomm.train.procedure import Comm, report
from kfcomm.train.rules import count_problem

BLOCK = 1 << 16
"""Elements whose squares are added in the array's own precision, for float32 to about 1e-6; blocks are in float64."""


def squared_norm(arrays: Iterable[Any]) -> float:
    """Σ x² over all elements of arrays in host memory; infinite or NaN where an element is, without a warning."""
    # One pass: about 5 ms for 25 million elements of float32.
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
    dtype = flat.dtype if flat.dtype in (np.float32, np.float64) else np.dtype(np.float32)
    blocks = (flat[at : at + BLOCK].astype(dtype, copy=False) for at in range(0, flat.size, BLOCK))
    return float(sum(float(np.dot(block, block)) for block in blocks))


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


SUMS = "/sums"
"""Name of the array that travels with the gradients; in a tree only an array under an empty key has it."""
UNITS = {"noise_scale": "samples", "throughput": "samples/s", "goodput": "samples/s"}


class GradientMonitor:
    """The statistics of a rank's gradients and of their mean, along training.

    It is given to `SynchronousSGD`. A program that averages gradients itself says::

        found = await comm.all_reduce_many({**gradients, SUMS: monitor.sums(gradients)}, op="avg")
        monitor.update(found.pop(SUMS), found)

    Args:
        comm: where the figures are shown: in ``statistics().gauges``, at the Prometheus endpoint, in the timeline.
        batch: samples of this rank's gradient. Ranks may have different ones, where their gradients are averaged
            without weights: then what is estimated holds for their harmonic mean.
        initial_batch: B0, of all ranks, beside which goodput is counted; None for the first step's.
        every: gradients are looked at in every so many steps, the same number on all ranks.
        decay: of the moving averages.
        clock: gives seconds.

    Attributes:
        batch: as given; may be changed between steps.
        noise_scale: see `NoiseScale`.
        every: as given.
        values: the latest figures by name: ``local_norm``, ``gradient_norm``, ``gradient_variance``,
            ``gradient_cosine``, ``noise_scale`` (in samples), all of the step before the last; ``throughput`` (samples
            a second), ``goodput``. What is unknown is left out.

    Raises:
        ConfigError: a number is out of its range.

    Cost:
        A pass over the local gradients and over one n-th of the mean, at every ``every``-th step; 12 bytes in a
        collective that is made anyway.
    """

    def __init__(
        self, comm: Comm, batch: int, *, initial_batch: float | None = None, every: int = 1, decay: float = DECAY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if (problem := count_problem("every", every)) is not None:
            raise ConfigError(problem)
        for what, value in (("batch", batch), ("initial_batch", 1 if initial_batch is None else initial_batch)):
            if not value > 0:
                raise ConfigError(f"{what} is above 0, not {value!r}")
        self.comm = comm
        self.batch = batch
        self.noise_scale = NoiseScale(decay)
        self.values: dict[str, float] = {}
        self.every = every
        self._initial_batch = initial_batch
        self._num_steps = 0
        self._own_sq_norm = 0.0
        # Of |ḡ|² of the step before, or 0 if that was not measured: each rank squares one n-th of the mean, and the
        # shares are summed with the next step's gradients, without a collective of their own.
        self._own_share = 0.0
        # Of a step whose |ḡ|² is not known yet: |g_i|², its mean over the ranks, a rank's samples, and the ranks.
        self._seen: tuple[float, float, float, int] | None = None
        self._step_s = MovingAverage(decay)
        self._clock = clock
        self._updated_s: float | None = None

    def sums(self, gradients: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Array to average with this rank's gradients (``op="avg"``): float64 if all of these are, else float32."""
        self._num_steps += 1
        if self._looks:
            self._own_sq_norm = squared_norm(gradients.values())
        is_double = all(adapt(x).dtype == np.float64 for x in gradients.values())
        told = [self._own_sq_norm, 1 / self.batch, self._own_share]
        return np.array(told, np.float64 if is_double else np.float32)

    def update(self, sums: Any, gradients: Mapping[str, Any]) -> None:
        """Add a step: the means of the ranks' sums, and the mean gradient."""
        local_sq_norm, of_batch, of_shares = (float(one) for one in sums)
        size, seen = self.comm.size, self._seen
        if seen is not None and seen[-1] == size:  # else a share is missing
            self._learn(seen, size * of_shares)
        self._seen, self._own_share = None, 0.0
        if self._looks:
            self._seen = self._own_sq_norm, local_sq_norm, 1 / of_batch, size
            in_order = [gradients[name] for name in sorted(gradients)]
            self._own_share = squared_norm(share(in_order, self.comm.rank, size))
        self._count(size / of_batch)
        report(self.comm, self.values, UNITS)

    @property
    def _looks(self) -> bool:
        """Whether the step under way is measured: the first, and each ``every``-th."""
        return (self._num_steps - 1) % self.every == 0

    def _learn(self, seen: tuple[float, float, float, int], global_sq_norm: float) -> None:
        own_sq_norm, local_sq_norm, small_batch, size = seen
        self._note("local_norm", math.sqrt(own_sq_norm))
        if size > 1:
            self.noise_scale.update(local_sq_norm, global_sq_norm, small_batch, size * small_batch)
        if math.isfinite(local_sq_norm) and math.isfinite(global_sq_norm):
            self._note("gradient_norm", math.sqrt(global_sq_norm))
            self._note("gradient_variance", gradient_variance(local_sq_norm, global_sq_norm))
            self._note("gradient_cosine", mean_cosine(local_sq_norm, global_sq_norm, size))
            self._note("noise_scale", self.noise_scale.value)

    def _count(self, batch: float) -> None:
        """Throughput and goodput of a step of ``batch`` samples that has ended now."""
        now_s, before_s = self._clock(), self._updated_s
        self._updated_s = now_s
        self._initial_batch = self._initial_batch or batch
        if before_s is None:
            return
        self._step_s.update(now_s - before_s)
        step_s, signal, noise = self._step_s.value, self.noise_scale.signal, self.noise_scale.noise
        if not step_s:
            return
        self._note("throughput", batch / step_s)
        if self.noise_scale.value is not None and signal is not None and noise is not None:
            gradients = GradientStatistics(signal, max(noise, 0.0) / self._initial_batch)
            self._note("goodput", batch / step_s * efficiency(gradients, self._initial_batch, batch))

    def _note(self, name: str, value: float | None) -> None:
        if value is None:
            self.values.pop(name, None)
        else:
            self.values[name] = value
