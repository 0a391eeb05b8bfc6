"""Monitor of gradients while they are averaged, from three numbers that travel with them.

One array of three numbers travels with the gradients of a rank: |g_i|², one over its batch, and its share of |ḡ|² of
the step before. The mean gradient ḡ is the same on all ranks, so that each rank squares only a part of it, and the sum
of the parts comes with the next step. Their means over the ranks are enough for the noise scale, the variance and the
cosine of that step, without another collective or vector.

Invariant: statistics of a step follow from the sums of that step only, at the end of the next one, on all ranks from
the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.errors import ConfigError
from kfcomm.train.agreement import count_problem
from kfcomm.train.gradient_statistics import (
    DECAY,
    MovingAverage,
    NoiseScale,
    gradient_variance,
    mean_cosine,
    share,
    squared_norm,
)
from kfcomm.train.pollux import GradientStatistics, efficiency
from kfcomm.train.procedure import Comm, report

SUMS = "/sums"
"""Name of the array that travels with the gradients; in a tree only an array under an empty key has it."""

UNITS = {"noise_scale": "samples", "throughput": "samples/s", "goodput": "samples/s"}


class _Unfinished(NamedTuple):
    """Measurements of a step whose |ḡ|² is not known yet.

    Attributes:
        own_sq_norm: |g_i|² of this rank.
        local_sq_norm: the mean of all ranks'.
        small_batch: samples of one rank's gradient, the harmonic mean.
        size: number of ranks.
    """

    own_sq_norm: float
    local_sq_norm: float
    small_batch: float
    size: int


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
        problem = count_problem("every", every)
        if problem is not None:
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
        self._own_share = 0.0
        """Share of |ḡ|² of the step before; 0 if that step was not measured."""
        self._seen: _Unfinished | None = None
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
        if seen is not None and seen.size == size:  # else a share is missing
            self._learn(seen, size * of_shares)
        self._seen, self._own_share = None, 0.0
        if self._looks:
            self._seen = _Unfinished(self._own_sq_norm, local_sq_norm, 1 / of_batch, size)
            in_order = [gradients[name] for name in sorted(gradients)]
            self._own_share = squared_norm(share(in_order, self.comm.rank, size))
        self._count(size / of_batch)
        report(self.comm, self.values, UNITS)

    @property
    def _looks(self) -> bool:
        """Whether the gradients of the step that is under way are looked at: of the first, and every so many."""
        return (self._num_steps - 1) % self.every == 0

    def _learn(self, seen: _Unfinished, global_sq_norm: float) -> None:
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
        if self._initial_batch is None:
            self._initial_batch = batch
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
