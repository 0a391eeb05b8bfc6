"""The learning rate from AdaScale's gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.train.adascale import gain
from kfcomm.train.policies.gradients import GradientNoise


class AdaScaleRate(Policy):
    """Multiplies the learning rate by AdaScale's gain for the batch that holds; see ``kfcomm.train.AdaScale``.

    The batch and the learning rate at the beginning are those of the schedule. A batch S times as large makes a step
    worth r steps of it, 1 ≤ r ≤ S, and the rate is multiplied by r. It is changed when it is more than ``tolerance``
    off, so that the ranks do not agree on another one in every step.

    Args:
        schedule: a factor for the learning rate after so many steps of the schedule (the sum of all gains); None for 1.
        tolerance: a part of the rate.
        warmup: steps of which the norms are known, before the first change.

    Raises:
        ConfigError: a number is out of its range.

    Source: Johnson et al., "AdaScale SGD", ICML 2020.
    """

    def __init__(
        self, schedule: Callable[[float], float] | None = None, *, tolerance: float = 0.05, warmup: int = 20
    ) -> None:
        if not 0 < tolerance < 1 or warmup < 1:
            raise ConfigError(f"tolerance is between 0 and 1 and warmup at least 1, not {tolerance!r} and {warmup!r}")
        self._schedule = schedule
        self._tolerance = tolerance
        self._warmup = warmup

    def on_start(self, ctx: Context) -> None:
        """Take what holds for what the schedule is made for."""
        self._gradients = GradientNoise()
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

    def state_dict(self) -> Any:
        """See `Policy`."""
        return [self._gradients.state(), self._progress, self._batch, self._rate]

    def load_state_dict(self, state: Any) -> None:
        """See `Policy`."""
        self._gradients.load(state[0])
        self._progress, self._batch, self._rate = state[1:]
