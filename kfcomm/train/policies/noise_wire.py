"""As what gradients travel, by their noise: what is lost among it anyway need not be sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.train.policies.gradients import GradientNoise

ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""By how much of itself a number changes at most when it is rounded to this dtype (float16: within its range)."""


class WireByNoise(Policy):
    """Sends gradients as halves while rounding adds little to the noise that they have.

    The mean of B samples' gradients has the variance tr(Σ) / B. Rounding to a dtype with unit u adds u²|ḡ|² at most for
    each time that a sum is rounded, which is once for each of n ranks at most. While n u² |ḡ|² is below ``part`` of
    tr(Σ) / B, it is used: of several the first that is good enough. |ḡ|² is taken as |G|² + tr(Σ) / B.

    Args:
        dtypes: names, the coarsest first.
        part: of the gradients' own variance.
        warmup: steps of which the norms are known, before the first change.
        rest: steps from one change to the next.

    Raises:
        ConfigError: there is no such dtype, or a number is out of its range.
    """

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

    def on_start(self, ctx: Context) -> None:
        """Begin to measure."""
        self._gradients = GradientNoise()
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

    def state_dict(self) -> Any:
        """See `Policy`."""
        return [self._gradients.state(), self._changed_at]

    def load_state_dict(self, state: Any) -> None:
        """See `Policy`."""
        self._gradients.load(state[0])
        self._changed_at = state[1]
