"""The batch that follows the gradient noise scale, and its learning rate."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

from kfcomm.adapt.policy import Context
from kfcomm.errors import ConfigError
from kfcomm.train.policies.measured import GradientPolicy
from kfcomm.train.policies.rates import AUTO, BatchRate, checked_rule, rule_for
from kfcomm.types import override

logger = logging.getLogger("kfcomm.adapt")

TOLERANCE = 0.1
"""Part by which the learning rate may be off, so that the ranks do not agree on another one in every step."""
MEMORY = 0.97
"""Decay of the averages, which are of about 33 measurements.

The noise scale of a short training grows by a tenth in so many steps. Longer averages lag behind it, and shorter ones
have wide intervals, which delay decisions as much (``python -m bench.batches``).
"""
STRIDE = 8.0
ROUNDING = 1e-9
"""Of logarithms: a distance of exactly the factor counts."""
STAYS = (
    "NoiseScaleBatch(rate=None) changes the batch and leaves the learning rate, which suits the first batch: larger "
    "ones then learn more slowly. Leave rate out, unless something else follows the batch"
)


class NoiseScaleBatch(GradientPolicy):
    """Sets the batch to the gradient noise scale, as that grows or falls along training, and the learning rate with it.

    A batch far below the noise scale gains from each further sample almost as much as from the first; one far above
    gains little (McCandlish et al., 2018). KungFu adapts the batch by it (Mai et al., OSDI 2020, section 5.2).

    The batch is changed when the whole confidence interval of the noise scale is a factor of ``factor`` or more away:
    by the largest power of ``factor`` that is within that distance. So a noise scale of 100 makes batches of 8, 16 and
    32 one of 64, and leaves that. The batch is a multiple of ``multiple`` for each rank, between ``least`` and
    ``most``, and is not changed within ``rest`` steps of the last change.

    The learning rate is that of the first batch, times a factor of the present one: AdaScale's gain (``"adascale"``,
    which needs measurements), the square root of the batch's growth (``"sqrt"``, for Adam and the like) or the growth
    itself (``"linear"``). A rate that another policy sets, such as a schedule, is taken as the present batch's; with
    `AdaScaleRate` beside it both ask for the same.

    Args:
        most: largest batch of all ranks, in samples.
        least: smallest batch of all ranks, in samples; None for the first batch.
        multiple: divisor of a rank's samples.
        factor: distance at which the batch is changed, above 1.
        warmup: number of measurements before the first change; an interval needs five.
        rest: number of steps from one change to the next.
        stride: largest change of the batch at once, at least ``factor``; None for 8, or a larger factor.
        z: quantile of the interval, see ``kfcomm.train.NoiseScale.interval``; 1 is for 68 %.
        rate: ``"auto"``, ``"adascale"``, ``"sqrt"``, ``"linear"``; None: the learning rate stays, with a warning.
            ``"auto"`` is the square root if ``optimizer`` is like Adam, and else AdaScale's gain.

    Attributes:
        optimizer: name of the optimizer's class, for ``rate="auto"``; who drives the policy sets it, as torch's
            ``attach`` does. None for SGD.

    Raises:
        ConfigError: a number is out of its range, or the rate is another.
    """

    _decay = MEMORY
    _shared = ("_changed_at", "_least", "_rate_state")
    optimizer: str | None = None

    def __init__(
        self, most: int, *, least: int | None = None, multiple: int = 1, factor: float = 2.0, warmup: int = 10,
        rest: int = 10, stride: float | None = None, z: float = 1.0, rate: str | None = AUTO,
    ) -> None:  # fmt: skip
        if not 1 <= (least or 1) <= most:
            raise ConfigError(f"batches are from 1 on, the least not above the most, and not {least!r} to {most!r}")
        if multiple < 1 or warmup < 1 or rest < 1:
            raise ConfigError(f"multiple, warmup and rest are at least 1, not {multiple!r}, {warmup!r} and {rest!r}")
        if not factor > 1:
            raise ConfigError(f"factor is above 1, not {factor!r}")
        if not (stride is None or stride >= factor):
            raise ConfigError(f"stride is at least the factor of {factor!r}, not {stride!r}")
        if not z > 0:
            raise ConfigError(f"z is above 0, as 1.96 is for 95 %, not {z!r}")
        self._rule = checked_rule(rate)
        if rate is None:
            warnings.warn(STAYS, stacklevel=2)
        self._most = most
        self._given_least = least
        self._multiple = multiple
        self._factor = factor
        self._stride = stride or max(factor, STRIDE)
        self._warmup = warmup
        self._rest = rest
        self._z = z

    @override
    def on_start(self, ctx: Context) -> None:
        super().on_start(ctx)
        given = ctx.hyperparameters
        self._changed_at: int | None = None
        self._least = self._given_least or given.batch_size or 1
        self._rate: BatchRate | None = None
        if self._rule is not None and given.learning_rate is not None:
            rule = rule_for(self.optimizer) if self._rule == AUTO else self._rule
            self._rate = BatchRate(rule, TOLERANCE, ctx)
        elif self._rule is not None:
            logger.warning(
                "%s: the program follows no learning rate, which larger batches need: give "
                "Hyperparameters(learning_rate=...)", self.name,
            )  # fmt: skip

    def after_step(self, ctx: Context) -> None:
        """Take what was measured, change the batch if it is far from the noise scale, and let the rate follow."""
        batch = ctx.hyperparameters.batch_size
        if ctx.metrics is None or batch is None:
            return
        self._gradients.update(ctx.metrics)
        wanted = self._wanted(ctx, batch)
        if wanted != batch:
            self._changed_at = ctx.step
            ctx.set_batch_size(wanted, **self._evidence)
        if self._rate is not None and self._gradients.num_updates >= self._warmup:
            self._rate.follow(ctx, self._gradients, wanted)

    def _wanted(self, ctx: Context, batch: int) -> int:
        """The batch for the next steps; the present one while it is near enough, or too little is known."""
        interval = self._gradients.interval(self._z)
        if interval is None or self._gradients.num_updates < self._warmup:
            return batch
        if self._changed_at is not None and ctx.step < self._changed_at + self._rest:
            return batch
        least, most = interval
        up, down = self._power(least / batch), self._power(batch / most if most else math.inf)
        # A batch that the ranks, which may have changed, cannot share equally is changed however near it is.
        is_changed = up > 1 or down > 1 or batch % ctx.size
        return self.fitting(batch * up / down, ctx.size) if is_changed else batch

    def _power(self, distance: float) -> float:
        """Return the largest power of the factor that is at most ``distance``, and at most the stride; at least 1."""
        reach = min(max(distance, 1.0), self._stride)
        return self._factor ** math.floor(math.log(reach, self._factor) + ROUNDING)

    @property
    def _evidence(self) -> dict[str, Any]:
        return {**self._gradients.evidence, "interval": self._gradients.interval(self._z)}

    def fitting(self, batch: float, size: int) -> int:
        """The nearest batch that divides among ``size`` ranks and is in the bounds, if any is."""
        unit = self._multiple * size
        count = max(1, round(batch / unit))
        count = max(count, -(-self._least // unit))
        return max(1, min(count, self._most // unit)) * unit

    @property
    def _rate_state(self) -> list[Any] | None:
        return None if self._rate is None else self._rate.state

    @_rate_state.setter
    def _rate_state(self, state: list[Any] | None) -> None:
        if self._rate is not None and state is not None:
            self._rate.state = state
