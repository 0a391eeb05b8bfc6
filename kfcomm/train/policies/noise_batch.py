"""The batch from the gradient noise scale: KungFu's policy."""

from __future__ import annotations

from typing import Any

from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.train.policies.gradients import GradientNoise


class NoiseScaleBatch(Policy):
    """Sets the batch to the gradient noise scale, as that grows or falls along training.

    A batch far below the noise scale gains from each further sample almost as much as from the first; one far above
    gains little (McCandlish et al., 2018). KungFu adapts the batch by it (Mai et al., OSDI 2020, section 5.2).

    The batch is the noise scale rounded to a multiple of ``multiple`` for each rank, between ``least`` and ``most``. It
    is changed when that is a factor of ``factor`` or more away, by that factor at most, and not within ``rest`` steps
    of the last change. The learning rate stays: `AdaScaleRate` beside it follows the batch.

    Args:
        most: samples of all ranks.
        least: samples of all ranks; None for what holds at first.
        multiple: of a rank's samples.
        factor: above 1.
        warmup: steps of which the norms are known, before the first change.
        rest: steps from one change to the next.

    Raises:
        ConfigError: a number is out of its range.
    """

    def __init__(
        self, most: int, *, least: int | None = None, multiple: int = 1, factor: float = 2.0, warmup: int = 50,
        rest: int = 50,
    ) -> None:  # fmt: skip
        if not 1 <= (least or 1) <= most:
            raise ConfigError(f"batches are from 1 on, the least not above the most, and not {least!r} to {most!r}")
        if multiple < 1 or warmup < 1 or rest < 1:
            raise ConfigError(f"multiple, warmup and rest are at least 1, not {multiple!r}, {warmup!r} and {rest!r}")
        if not factor > 1:
            raise ConfigError(f"factor is above 1, not {factor!r}")
        self._most = most
        self._given_least = least
        self._multiple = multiple
        self._factor = factor
        self._warmup = warmup
        self._rest = rest

    def on_start(self, ctx: Context) -> None:
        """Begin to measure."""
        self._gradients = GradientNoise()
        self._changed_at: int | None = None
        self._least = self._given_least or ctx.hyperparameters.batch_size or 1

    def after_step(self, ctx: Context) -> None:
        """Take the norms, and change the batch if it is far from the noise scale."""
        if ctx.metrics is None:
            return
        self._gradients.update(ctx.metrics)
        scale, batch = self._gradients.scale, ctx.hyperparameters.batch_size
        if scale is None or batch is None or self._gradients.num_updates < self._warmup:
            return
        if self._changed_at is not None and ctx.step < self._changed_at + self._rest:
            return
        wanted = self.fitting(min(max(scale, batch / self._factor), batch * self._factor), ctx.size)
        if max(wanted, batch) < min(wanted, batch) * self._factor and batch % ctx.size == 0:
            return
        if wanted != batch:
            self._changed_at = ctx.step
            ctx.set_batch_size(wanted, **self._gradients.evidence)

    def fitting(self, batch: float, size: int) -> int:
        """The nearest batch that divides among ``size`` ranks and is in the bounds, if any is."""
        unit = self._multiple * size
        count = max(1, round(batch / unit))
        count = max(count, -(-self._least // unit))
        return max(1, min(count, self._most // unit)) * unit

    def state_dict(self) -> Any:
        """See `Policy`."""
        return [self._gradients.state(), self._changed_at, self._least]

    def load_state_dict(self, state: Any) -> None:
        """See `Policy`."""
        self._gradients.load(state[0])
        self._changed_at, self._least = state[1:]
