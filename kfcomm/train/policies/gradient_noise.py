"""Policies that act on the noise of gradients: learning rate, wire dtype, and agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kfcomm.adapt.policy import Context
from kfcomm.errors import ConfigError
from kfcomm.train.gradient_statistics import gain
from kfcomm.train.policies.measured import GradientPolicy
from kfcomm.types import override

ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Unit roundoff: largest relative error of a number in this dtype (float16: within its range)."""


class WireByNoise(GradientPolicy):
    """Sends gradients in 16 bits while rounding adds little to their noise.

    The mean of B samples' gradients has the variance tr(Σ) / B. Each rounding of a sum to a dtype with unit roundoff u
    adds at most u²|ḡ|², and there are at most n roundings, one for each rank. The policy uses the first dtype for which
    n u² |ḡ|² is below ``part`` of tr(Σ) / B. |ḡ|² is taken as |G|² + tr(Σ) / B.

    Args:
        dtypes: names, the coarsest first.
        part: part of the gradients' own variance.
        warmup: number of steps with known norms before the first change.
        rest: number of steps from one change to the next.

    Raises:
        ConfigError: a dtype is unknown, or a number is out of its range.
    """

    _shared = ("_changed_at",)

    def __init__(
        self, dtypes: Sequence[str] = ("bfloat16",), *, part: float = 0.01, warmup: int = 50, rest: int = 50
    ) -> None:
        unknown = [name for name in dtypes if name not in ROUNDING]
        if isinstance(dtypes, str) or not dtypes or unknown:
            raise ConfigError(f"wire dtypes are some of {', '.join(ROUNDING)}, not {dtypes!r}")
        if not 0 < part < 1 or warmup < 1 or rest < 1:
            raise ConfigError(
                f"part is between 0 and 1, warmup and rest are at least 1, not {part!r}, {warmup!r} and {rest!r}"
            )
        self._dtypes = tuple(dtypes)
        self._part = part
        self._warmup = warmup
        self._rest = rest

    @override
    def on_start(self, ctx: Context) -> None:
        super().on_start(ctx)
        self._changed_at: int | None = None

    def after_step(self, ctx: Context) -> None:
        """Take the norms, and change the dtype where another one is good enough."""
        if ctx.metrics is None:
            return
        self._gradients.update(ctx.metrics)
        batch = ctx.hyperparameters.batch_size
        signal, noise = self._gradients.signal, self._gradients.noise
        if batch is None or signal is None or noise is None or self._gradients.num_updates < self._warmup:
            return
        if self._changed_at is not None and ctx.step < self._changed_at + self._rest:
            return
        variance = noise / batch
        added = {name: ctx.size * ROUNDING[name] ** 2 * (signal + variance) for name in self._dtypes}
        wanted = next((name for name, one in added.items() if one < self._part * variance), None)
        if wanted != ctx.hyperparameters.wire_dtype:
            self._changed_at = ctx.step
            ctx.set_wire_dtype(wanted, variance=variance, added=added, part=self._part)


class AdaScaleRate(GradientPolicy):
    """Multiplies the learning rate by AdaScale's gain for the present batch; see ``kfcomm.train.AdaScale``.

    The first batch and learning rate are those of the schedule. A step with S times the batch is worth r steps of the
    schedule, 1 ≤ r ≤ S, and the rate is multiplied by r. It is changed when it is off by more than ``tolerance``, so
    that the ranks do not agree on another rate in every step.

    Args:
        schedule: factor of the learning rate after a number of steps of the schedule (the sum of all gains); None for
            1.
        tolerance: part of the rate.
        warmup: number of steps with known norms before the first change.

    Raises:
        ConfigError: a number is out of its range.

    Source: Johnson et al., "AdaScale SGD", ICML 2020.
    """

    _shared = ("_progress", "_batch", "_rate")

    def __init__(
        self, schedule: Callable[[float], float] | None = None, *, tolerance: float = 0.05, warmup: int = 20
    ) -> None:
        if not 0 < tolerance < 1 or warmup < 1:
            raise ConfigError(f"tolerance is between 0 and 1 and warmup at least 1, not {tolerance!r} and {warmup!r}")
        self._schedule = schedule
        self._tolerance = tolerance
        self._warmup = warmup

    @override
    def on_start(self, ctx: Context) -> None:
        super().on_start(ctx)
        # What holds now is what the schedule is made for.
        self._progress = 0.0
        self._batch = ctx.hyperparameters.batch_size
        self._rate = ctx.hyperparameters.learning_rate

    def after_step(self, ctx: Context) -> None:
        """Count the step, and change the rate if it is off."""
        metrics = ctx.metrics
        if metrics is None:
            return
        self._gradients.update(metrics)
        self._progress += self._gain(metrics.hyperparameters.batch_size)
        rate, now = self._rate, ctx.hyperparameters.learning_rate
        if rate is None or now is None or self._gradients.num_updates < self._warmup:
            return
        found = self._gain(ctx.hyperparameters.batch_size)
        wanted = rate * found * (1.0 if self._schedule is None else self._schedule(self._progress))
        if abs(wanted - now) > self._tolerance * max(now, wanted):
            ctx.set_learning_rate(wanted, gain=found, progress=self._progress, **self._gradients.evidence)

    @property
    def progress(self) -> float:
        """The steps so far, in steps of the schedule."""
        return self._progress

    def _gain(self, batch: int | None) -> float:
        signal, noise = self._gradients.signal, self._gradients.noise
        if batch is None or self._batch is None or signal is None or noise is None:
            return 1.0
        return gain(noise / self._batch, signal, batch / self._batch)


class SwitchAgreement(GradientPolicy):
    """Changes once from agreement ``first`` to ``then``: after a step, or when averaging gradients pays.

    Synchronous SGD makes one step of all ranks' samples. If their number is above the noise scale it loses the many
    steps, and the noise, of small batches; SMA keeps them. The noise scale grows along training: once it is above
    ``ratio`` times the batch in ``patience`` consecutive steps, a sample in a batch of all ranks counts about as much
    as one in a batch of one rank. KungFu's AdaSGD (Mai et al., OSDI 2020) changes after a given step.

    Args:
        first: name of the agreement at first.
        then: name of the agreement afterwards.
        at_step: step after which it changes, whatever the noise; None to change by the noise only.
        ratio: ratio of the noise scale to the batch.
        patience: number of steps.
        warmup: number of steps with known norms before they count.

    Raises:
        ConfigError: a number is out of its range.
    """

    _shared = ("_running", "_is_done")

    def __init__(
        self, first: str = "sma", then: str = "ssgd", *, at_step: int | None = None, ratio: float = 1.0,
        patience: int = 10, warmup: int = 50,
    ) -> None:  # fmt: skip
        if not ratio > 0 or patience < 1 or warmup < 1 or (at_step is not None and at_step < 0):
            raise ConfigError(
                f"ratio is above 0, patience and warmup are at least 1 and at_step is at least 0, not {ratio!r}, "
                f"{patience!r}, {warmup!r} and {at_step!r}"
            )
        self._first = first
        self._then = then
        self._at_step = at_step
        self._ratio = ratio
        self._patience = patience
        self._warmup = warmup

    @override
    def on_start(self, ctx: Context) -> None:
        super().on_start(ctx)
        self._running = 0
        self._is_done = False
        if ctx.step == 0 and ctx.hyperparameters.agreement != self._first:
            ctx.set_agreement(self._first)

    def after_step(self, ctx: Context) -> None:
        """Take the norms; change when it is time."""
        metrics, batch = ctx.metrics, ctx.hyperparameters.batch_size
        if metrics is None or self._is_done:
            return
        self._gradients.update(metrics)
        scale = self._gradients.scale
        is_noisy = scale is not None and batch is not None and scale > self._ratio * batch
        is_known = self._gradients.num_updates >= self._warmup
        self._running = self._running + 1 if is_noisy and is_known else 0
        is_late = self._at_step is not None and ctx.step >= self._at_step
        if is_late or self._running >= self._patience:
            self._is_done = True
            ctx.set_agreement(self._then, batch=batch, **self._gradients.evidence)
