"""From one way to agree to another, when the gradients' noise says so."""

from __future__ import annotations

from typing import Any

from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.train.policies.gradients import GradientNoise


class SwitchAgreement(Policy):
    """``first`` at the beginning, ``then`` after a step, or as soon as averaging gradients is worth it; once.

    Synchronous SGD makes one step of all ranks' samples. Where their number is above the noise scale it loses the
    steps, and the noise, that small batches have; SMA keeps them. The noise scale grows along training: once it is
    above ``ratio`` times the batch in ``patience`` steps running, a sample in a batch of all ranks counts about as much
    as one in a batch of one. KungFu's AdaSGD (Mai et al., OSDI 2020) changes after a given step.

    Args:
        first: the name of the agreement at first.
        then: of the one afterwards.
        at_step: change after this step, whatever the noise; None for by the noise alone.
        ratio: of the noise scale to the batch.
        patience: steps.
        warmup: steps of which the norms are known, before they count.

    Raises:
        ConfigError: a number is out of its range.
    """

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

    def on_start(self, ctx: Context) -> None:
        """Ask for the first one, if it does not hold."""
        self._gradients = GradientNoise()
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

    def state_dict(self) -> Any:
        """See `Policy`."""
        return [self._gradients.state(), self._running, self._is_done]

    def load_state_dict(self, state: Any) -> None:
        """See `Policy`."""
        self._gradients.load(state[0])
        self._running, self._is_done = state[1:]
