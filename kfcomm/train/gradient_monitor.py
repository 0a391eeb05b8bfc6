"""Monitor of gradients: their statistics, by numbers that travel with them.

`GradientMonitor` lets a row of numbers of each rank travel with the gradients, among them |g_i|², the samples of its
batch, and its share of |ḡ|² of the step before. ḡ is the same on all ranks, so that each rank squares only a part of
it, and the sum of the parts comes with the next step, without another collective or vector.

Invariant: a measurement follows from the rows of two steps, with the batch of the first of them, on all ranks from the
same bits. Ranks whose averages differ, which their rows show, all begin anew.
"""

from __future__ import annotations

import logging
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np

from kfcomm.arrays import adapt
from kfcomm.arrays.norms import squared_norm
from kfcomm.arrays.on_device import is_on_device
from kfcomm.errors import ConfigError
from kfcomm.train.cadence import Cadence, Every
from kfcomm.train.gradient_statistics import (
    GradientStatistics,
    MovingAverage,
    efficiency,
    gradient_variance,
    mean_cosine,
    share,
)
from kfcomm.train.noise_scale import DECAY, NoiseScale
from kfcomm.train.procedure import Comm, report

logger = logging.getLogger("kfcomm.train")

SUMS = "/sums"
"""Name of the array that travels with the gradients; in a tree only an array under an empty key has it."""
UNITS = {
    "noise_scale": "samples", "small_batch": "samples", "big_batch": "samples", "throughput": "samples/s",
    "goodput": "samples/s",
}  # fmt: skip
OBSERVED = ("local_norm", "gradient_norm", "small_batch", "big_batch", "measurement")
"""Names of a measurement, for ``Adaptation.observe``."""
SHARED = ("gradient_norm", "gradient_variance", "gradient_cosine", "noise_scale", *OBSERVED[2:])
"""Names of figures that are the same on all ranks."""
NOT_MEASURED = -1.0
"""In the place of |g_i|², which is not negative."""
CLOSE = 1e-4
"""Distance of the number of shares from a whole number that rounding in float32 explains."""


class Row(NamedTuple):
    """Numbers of one rank that all ranks get.

    Attributes:
        sq_norm: |g_i|²; `NOT_MEASURED` in a step that is not measured.
        batch: samples of the rank's gradient; 0 for a rank without samples, whose step is not measured.
        share: sum of the squares of this rank's share of the mean gradient of the step before.
        num_shares: 1 with a share of the rank's own, 0 without; less than 0 for one from a state, which may be a part
            of the shares of all ranks, divided anew.
        cost_s: seconds spent on measuring since the last step.
        step_s: seconds of the last step; 0 if unknown.
        digest: of the averages, to see that all ranks have the same ones: 24 bits, which float32 holds; 0 for a rank
            that is lost.
    """

    sq_norm: float
    batch: float
    share: float
    num_shares: float
    cost_s: float
    step_s: float
    digest: float


@dataclass(frozen=True, slots=True)
class Seen:
    """A measured step whose |ḡ|² is not known yet: the mean of |g_i|², the samples of a rank, and the ranks."""

    local_sq_norm: float
    small_batch: float
    size: int


class GradientMonitor:
    """The statistics of a rank's gradients and of their mean, along training.

    It is given to `SynchronousSGD`. A program that averages gradients itself says::

        found = await comm.all_reduce_many({**gradients, SUMS: monitor.sums(gradients)}, op="avg")
        monitor.update(found.pop(SUMS), found)

    One that squares its gradients itself, as they come, says, with any exchange of numbers between the ranks::

        rows = exchanged(monitor.tell(sq_norm))      # the numbers of each rank, by rank
        if monitor.learn(rows):                      # then the step is measured
            monitor.keep_share(sq_norm_of_this_ranks_share_of_the_mean_gradient)

    Policies of an `Adaptation` get each measurement once, with the batch that it was made with::

        adaptation.observe(**monitor.observed())

    When ranks join or leave, give the algorithm that it is in, or a monitor by itself, to ``kfcomm.elastic.State``, so
    that all ranks continue with the same averages. Ranks whose averages differ all begin anew, which is logged.

    Args:
        comm: where the figures are shown: in ``statistics().gauges``, at the Prometheus endpoint, in the timeline.
        batch: samples of this rank's gradient. Ranks may have different ones, where their gradients are averaged
            without weights: then what is estimated holds for their harmonic mean.
        initial_batch: B0, of all ranks, beside which goodput is counted; None for the first step's.
        every: gradients are looked at in every so many steps, the same number on all ranks. ``"auto"``: in as many as
            cost at most ``max_cost``; the ranks tell each other what it costs, and choose the same number.
        decay: of the moving averages.
        max_cost: part of a step's time that ``every="auto"`` spends.
        clock: gives seconds.

    Attributes:
        batch: as given; may be changed between steps. 0: the rank has no samples in a step, which is not measured.
        noise_scale: see `NoiseScale`.
        values: the latest figures by name: ``local_norm``, ``gradient_norm``, ``gradient_variance``,
            ``gradient_cosine``, ``noise_scale`` (in samples), all of the measured step before the last; of that step
            ``small_batch`` and ``big_batch`` (of a rank and of all, in samples) and ``measurement`` (its number);
            ``throughput`` (samples a second), ``goodput``. What is unknown is left out.

    Raises:
        ConfigError: a number is out of its range.

    Cost:
        A pass over the local gradients and over one n-th of the mean, at every ``every``-th step; 28 n bytes in a
        collective that is made anyway (56 n, where all gradients are float64).
    """

    def __init__(
        self, comm: Comm, batch: int, *, initial_batch: float | None = None, every: Every = 1, decay: float = DECAY,
        max_cost: float = 0.01, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        for what, value in (("batch", batch), ("initial_batch", 1 if initial_batch is None else initial_batch)):
            if not value > 0:
                raise ConfigError(f"{what} is above 0, not {value!r}")
        self.comm = comm
        self.batch = batch
        self._cadence = Cadence(every, max_cost)
        self._decay = decay
        self._given_batch = initial_batch
        self._clock = clock
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.noise_scale = NoiseScale(self._decay)
        self.values: dict[str, float] = {}
        self._cadence.begin()
        self._initial_batch = self._given_batch
        self._seen: Seen | None = None
        self._num_measured = 0
        self._own_sq_norm: float | None = None  # of the step in `_seen`
        self._told_sq_norm = NOT_MEASURED
        self._share = self._num_shares = 0.0
        self._news: dict[str, float] = {}  # of a measurement that was not observed yet
        self._forget_times()

    def _forget_times(self) -> None:
        self._cost_s = 0.0
        self._last_s = 0.0
        self._step_s = MovingAverage(self._decay)
        self._updated_s: float | None = None

    @property
    def every(self) -> Every:
        """As given."""
        return self._cadence.every

    @property
    def period(self) -> int:
        """Present number of steps from one measured step to the next."""
        return self._cadence.period

    @property
    def is_due(self) -> bool:
        """Whether the step that the next ``tell`` belongs to is to be measured."""
        return self._cadence.is_due

    # ---------------------------------------------------------------- with the gradients

    def sums(self, gradients: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Array to average with this rank's gradients (``op="avg"``): float64 if all of these are, else float32.

        Raises:
            ConfigError: a gradient is on a device.
        """
        if any(map(is_on_device, gradients.values())):
            raise ConfigError(
                "a GradientMonitor squares gradients in host memory; those of a model on a device are measured by "
                "kfcomm.torch.attach(..., monitor=True)"
            )
        row = self.tell(self._timed(gradients.values()) if self.is_due else None)
        is_double = all(adapt(x).dtype == np.float64 for x in gradients.values())
        size = self.comm.size
        told = np.zeros((size, len(row)), np.float64 if is_double else np.float32)
        with np.errstate(over="ignore"):
            told[self.comm.rank] = np.multiply(row, size)  # the mean over the ranks is the row itself
        return told.reshape(-1)

    def update(self, sums: Any, gradients: Mapping[str, Any]) -> None:
        """Add a step: the means of the ranks' sums, and the mean gradient."""
        rows = np.asarray(sums, np.float64).reshape(-1, len(Row._fields)).tolist()
        if self.learn(rows):
            in_order = [gradients[name] for name in sorted(gradients)]
            self.keep_share(self._timed(share(in_order, self.comm.rank, len(rows))))

    def _timed(self, arrays: Iterable[Any]) -> float:
        if self.every != "auto":
            return squared_norm(arrays)
        begun_s = self._clock()
        found = squared_norm(arrays)
        self._cost_s += self._clock() - begun_s
        return found

    # ---------------------------------------------------------------- with numbers only

    def tell(self, sq_norm: float | None, cost_s: float = 0.0) -> list[float]:
        """Begin a step; return this rank's numbers for all ranks, which are to travel without loss.

        Args:
            sq_norm: |g_i|² of this rank's gradient; None where ``is_due`` is false.
            cost_s: seconds that measuring has taken since the last step, for ``every="auto"``.
        """
        self._told_sq_norm = NOT_MEASURED if sq_norm is None or not self.is_due else float(sq_norm)
        row = Row(
            self._told_sq_norm, float(self.batch), self._share, self._num_shares, self._cost_s + cost_s, self._last_s,
            self._digest(),
        )  # fmt: skip
        self._cost_s = 0.0
        return list(row)

    def amend(self, sq_norm: float) -> None:
        """Set |g_i|² of the latest ``tell``, where it was not known yet; before ``learn``."""
        if self._told_sq_norm != NOT_MEASURED:
            self._told_sq_norm = sq_norm

    def learn(self, rows: Sequence[Sequence[float]], scale: float = 1.0) -> bool:
        """Take the numbers of all ranks, by rank, the same on every rank.

        Args:
            rows: results of ``tell``; zeros for a rank that is lost.
            scale: factor of the loss whose gradients were squared, the same on every rank, as of a ``GradScaler``.

        Returns:
            Whether the step is measured: then ``keep_share`` is to be called before the next step, on every rank.
        """
        told = [_unscaled(Row(*row), scale) for row in rows]
        if self._told_sq_norm != NOT_MEASURED:
            self._told_sq_norm /= scale * scale
        there = [row for row in told if row.digest]
        if len({row.digest for row in there}) > 1:
            logger.warning("the averages of the ranks' monitors differ, and begin anew: see GradientMonitor, State")
            sq_norm = self._told_sq_norm
            self._begin_anew()
            self._told_sq_norm = sq_norm
        elif self._seen is not None and _are_complete([row.num_shares for row in there], self._seen.size):
            self._measure(self._seen, sum(row.share for row in there))
        self._seen, self._share, self._num_shares = None, 0.0, 0.0
        batches = [row.batch for row in there if row.batch > 0]
        small_batch = len(batches) / sum(1 / one for one in batches) if batches else 0.0
        if len(batches) == len(told) and all(row.sq_norm != NOT_MEASURED for row in told):
            mean = sum(row.sq_norm for row in told) / len(told)
            self._seen, self._own_sq_norm = Seen(mean, small_batch, len(told)), self._told_sq_norm
        self._cadence.advance(
            measured=self._seen is not None,
            costs_s=[row.cost_s for row in there], steps_s=[row.step_s for row in there],
        )  # fmt: skip
        self._count(len(batches) * small_batch)
        report(self.comm, self.values, UNITS)
        return self._seen is not None

    def keep_share(self, sq_norm: float) -> None:
        """Keep |ḡ|² of this rank's share of the mean gradient; the shares of all ranks are all of its elements once."""
        self._share, self._num_shares = sq_norm, 1.0

    # ---------------------------------------------------------------- for policies, and for ranks that join

    def observed(self) -> dict[str, float]:
        """Return the latest measurement, once, for ``Adaptation.observe``; empty if it was returned before.

        ``local_norm`` is this rank's |g_i|, ``gradient_norm`` |ḡ|, ``small_batch`` and ``big_batch`` the samples of a
        rank and of all, and ``measurement`` the number of the measurement.
        """
        news, self._news = self._news, {}
        return news

    def state_dict(self) -> dict[str, Any]:
        """State for ranks that join, and for checkpoints; ``merging`` tells what differs between ranks in it."""
        return {
            "noise_scale": self.noise_scale.state_dict(),
            "cadence": self._cadence.state,
            "initial_batch": self._initial_batch,
            "num_measured": self._num_measured,
            "values": {name: self.values.get(name, math.nan) for name in SHARED},
            "seen": list(astuple(self._seen or Seen(0.0, 0.0, 0))),
            "share": np.array([self._share, abs(self._num_shares)]),
        }

    def merging(self) -> dict[str, str]:
        """How ``State`` converts what differs between ranks: the shares of |ḡ|² are added, and divided anew."""
        return {"share": "sum"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; then all ranks have the same averages, to the bit.

        Raises:
            ConfigError: it is not the state of a monitor; nothing is loaded.
        """
        if lacking := self.state_dict().keys() - state.keys():
            raise ConfigError(
                f"expected the state of a GradientMonitor; the given one lacks {', '.join(sorted(lacking))}"
            )
        self._begin_anew()
        self.noise_scale.load_state_dict(state["noise_scale"])
        self._cadence.state = state["cadence"]
        self._initial_batch = state["initial_batch"]
        self._num_measured = int(state["num_measured"])
        self.values.update((name, float(one)) for name, one in state["values"].items() if not math.isnan(one))
        local_sq_norm, small_batch, size = state["seen"]
        if size:
            self._seen = Seen(float(local_sq_norm), float(small_batch), int(size))
        share, num_shares = (float(one) for one in state["share"])
        self._share, self._num_shares = share, -num_shares

    def _digest(self) -> int:
        """Of what all ranks share: ranks with different averages would measure different steps."""
        scale, seen = self.noise_scale.state_dict(), self._seen
        numbers = [
            scale["num_updates"], scale["num_left_out"], *scale["averages"], *self._cadence.state, self._num_measured,
            *((0.0,) * 3 if seen is None else (seen.local_sq_norm, seen.small_batch, seen.size)),
        ]  # fmt: skip
        return zlib.crc32(struct.pack(f"{len(numbers)}d", *numbers)) & 0xFFFFFF | 1

    def _measure(self, seen: Seen, global_sq_norm: float) -> None:
        local_sq_norm, size, small_batch = seen.local_sq_norm, seen.size, seen.small_batch
        own_sq_norm = local_sq_norm if self._own_sq_norm is None else self._own_sq_norm
        self._num_measured += 1
        batches = small_batch, size * small_batch
        numbers = math.sqrt(own_sq_norm), math.sqrt(global_sq_norm), *batches, float(self._num_measured)
        self._news = dict(zip(OBSERVED, numbers, strict=True))
        self.values["local_norm"] = numbers[0]
        if size > 1:
            self.noise_scale.update(local_sq_norm, global_sq_norm, *batches)
        if not (math.isfinite(local_sq_norm) and math.isfinite(global_sq_norm)):
            return
        self.values |= self._news
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
        self._last_s = now_s - before_s
        self._step_s.update(self._last_s)
        step_s, signal, noise = self._step_s.value, self.noise_scale.signal, self.noise_scale.noise
        if not step_s or not batch:
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


def _are_complete(nums: Sequence[float], size: int) -> bool:
    """Whether these shares are those of all ranks once."""
    # A lost rank's share is lost. Shares of a state are complete together; beside a rank's own they are copies.
    return min(nums) * max(nums) >= 0 and abs(sum(map(abs, nums)) - size) < CLOSE


def _unscaled(row: Row, scale: float) -> Row:
    return row if row.sq_norm == NOT_MEASURED else row._replace(sq_norm=row.sq_norm / (scale * scale))
