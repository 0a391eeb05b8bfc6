"""The gradient noise scale: estimates of single steps, averages, and a confidence interval. Floats in, floats out.

Source: McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training", 2018,
https://arxiv.org/abs/1812.06162, appendix A. With the gradient G of the loss and the covariance Σ of one sample's
gradient, B_simple = tr(Σ) / |G|². A much smaller batch gains almost as much from each sample as possible, a much larger
one gains little from more. The mean of B gradients has E|G_B|² = |G|² + tr(Σ) / B, so that two batch sizes determine
both; the ranks have them: the batch b of one rank, and the batch B of all of them together.

Numerator and denominator are averaged separately, each without bias, and then divided: averages of the quotients would
be biased, and infinite where a step's |G|² is zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import check_decay

DECAY = 0.99
"""Of the averages: a single step's estimate of |G|² is often off by its own size."""
EFFICIENCY = 2 / 3
"""Of a variance by differences: so many degrees of freedom for each of one by deviations from a constant mean."""
LEAST_FREEDOM = 2.6
"""Degrees of freedom below which an interval is not known: five measurements that count about alike have as many."""


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
    """The noise scale along training: moving averages of its two parts, and how well they are known.

    After t measurements the weight of the k-th last is decay^k (1 − decay) / (1 − decay^t): the averages are corrected
    for their start, as Adam's are.

    Args:
        decay: of the moving averages, at least 0 and below 1: they are of about 1 / (1 − decay) measurements.

    Attributes:
        num_updates: measurements that count.
        num_left_out: measurements whose norms were not finite: they count for nothing.

    Raises:
        ConfigError: ``decay`` is not at least 0 and below 1.
    """

    __slots__ = (
        "_decay", "_difference_weight", "_last", "_means", "_moments", "_sq_weight", "_weight", "num_left_out",
        "num_updates",
    )  # fmt: skip

    def __init__(self, decay: float = DECAY) -> None:
        check_decay(decay)
        self._decay = decay
        self.num_updates = 0
        self.num_left_out = 0
        self._weight = 0.0  # sum of the weights, and of their squares
        self._sq_weight = 0.0
        self._means = (0.0, 0.0)  # of signal and noise
        self._moments = (0.0, 0.0, 0.0)  # weighted sums of half the products of differences: signal², both, noise²
        self._difference_weight = 0.0
        self._last: NoiseEstimate | None = None

    def update(self, local_sq_norm: float, global_sq_norm: float, small_batch: float, big_batch: float) -> None:
        """Take one step's norms, with the batches they were measured with, which may change from step to step.

        See `noise_estimate`.

        Raises:
            ConfigError: b is not above 0, or B not above b.
        """
        found = noise_estimate(local_sq_norm, global_sq_norm, small_batch, big_batch)
        if not (math.isfinite(found.signal) and math.isfinite(found.noise)):
            self.num_left_out += 1
            return
        self.num_updates += 1
        self._add(found)

    def _add(self, found: NoiseEstimate) -> None:
        decay, fresh = self._decay, 1 - self._decay
        self._weight = decay * self._weight + fresh
        self._sq_weight = decay**2 * self._sq_weight + fresh**2
        part = fresh / self._weight
        self._means = tuple(mean + part * (x - mean) for mean, x in zip(self._means, found, strict=True))  # type: ignore[assignment]
        # From differences of successive measurements (von Neumann et al., "The mean square successive difference",
        # 1941): noise, and not the change of the noise scale along training, makes the interval wide.
        if self._last is not None:
            signal, noise = (x - before for x, before in zip(found, self._last, strict=True))
            products = signal * signal / 2, signal * noise / 2, noise * noise / 2
            self._moments = tuple(decay * sum_ + fresh * x for sum_, x in zip(self._moments, products, strict=True))  # type: ignore[assignment]
            self._difference_weight = decay * self._difference_weight + fresh
        self._last = found

    @property
    def signal(self) -> float | None:
        """The average of |G|²; None before the first measurement."""
        return self._means[0] if self._weight else None

    @property
    def noise(self) -> float | None:
        """The average of tr(Σ); None before the first measurement."""
        return self._means[1] if self._weight else None

    @property
    def value(self) -> float | None:
        """B_simple, in samples; None while it is unknown: nothing was measured, or |G|² is not above 0 yet.

        It is 0 where the ranks' gradients differ less than not at all, which chance can do to equal ones.
        """
        signal, noise = self.signal, self.noise
        if signal is None or noise is None or signal <= 0:
            return None
        return max(noise, 0.0) / signal

    def interval(self, z: float = 1.96) -> tuple[float, float] | None:
        """Confidence interval of the noise scale, in samples: from 0 on, and infinite at its end while |G|² may be 0.

        Both averages vary as their measurements do, which are taken to be independent of each other; the interval is
        Fieller's for the quotient of two correlated normal numbers, with Student's quantiles. While the noise scale
        changes it is that of the mean over the time of the averages.

        Args:
            z: quantile of the normal distribution: 1.96 for 95 %, 1.64 for 90 %.

        Returns:
            Least and most; None before five measurements.

        Raises:
            ConfigError: ``z`` is not above 0.

        Source: E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16, 1954.
        """
        if not 0 < z < math.inf:
            raise ConfigError(f"z is above 0, as 1.96 is for 95 %, not {z!r}")
        part = self._sq_weight / self._weight**2 if self._weight else 1.0
        freedom = EFFICIENCY * (1 / part - 1)
        if freedom < LEAST_FREEDOM:
            return None
        # The variances of both averages, and their covariance, times the squared quantile.
        scaled = students(z, freedom) ** 2 * part / self._difference_weight
        of_signal, both, of_noise = (scaled * moment for moment in self._moments)
        return _fieller(self._means, of_signal, both, of_noise)

    def state_dict(self) -> dict[str, Any]:
        """State for ranks that join, and for checkpoints: the same on all ranks."""
        return {
            "num_updates": self.num_updates,
            "num_left_out": self.num_left_out,
            "averages": [
                self._weight,
                self._sq_weight,
                *self._means,
                *self._moments,
                self._difference_weight,
                *(self._last or (0.0, 0.0)),
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with this object's own decay."""
        averages: Sequence[float] = [float(one) for one in state["averages"]]
        self.num_updates, self.num_left_out = int(state["num_updates"]), int(state["num_left_out"])
        self._weight, self._sq_weight = averages[:2]
        self._means = averages[2], averages[3]
        self._moments = averages[4], averages[5], averages[6]
        self._difference_weight = averages[7]
        self._last = NoiseEstimate(*averages[8:]) if self.num_updates else None


def students(z: float, freedom: float) -> float:
    """Quantile of Student's t for that of the normal distribution, by Fisher's expansion; within 3 % from 4 on."""
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def _fieller(means: tuple[float, float], of_signal: float, both: float, of_noise: float) -> tuple[float, float]:
    """All quotients r with (noise − r·signal)² ≤ of_noise − 2r·both + r²·of_signal, from 0 on."""
    signal, noise = means
    if signal <= 0:
        return 0.0, math.inf
    square, half, rest = signal**2 - of_signal, signal * noise - both, noise**2 - of_noise
    root = math.sqrt(max(half**2 - square * rest, 0.0))
    below = half + root
    # The least root is (half − root) / square, written so that it is also right where |G|² may be 0 (square ≤ 0).
    least = max(rest / below, 0.0) if rest > 0 and noise > 0 and below > 0 else 0.0
    most = max(below / square, 0.0) if square > 0 else math.inf
    return min(least, most), most
