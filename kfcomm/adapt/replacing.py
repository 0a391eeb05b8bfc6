"""Ranks that are lastingly slower than the others are replaced: Or et al.'s rule for stragglers."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from kfcomm.adapt.detectors import THRESHOLD, Stragglers
from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError


class ReplaceStragglers(Policy):
    """Asks for another process in the place of a rank that holds up all others.

    A rank is slow while its smoothed speed is below ``threshold`` times the median of all: see `Stragglers`, and
    ``StepMetrics.speeds``, which leave out what a rank waits for others. Who is slow in ``patience`` steps running is
    replaced; the slowest first, and nobody else for ``rest`` steps, in which the next one begins: what is slow because
    of its host may be so again.

    Args:
        threshold: a part of the median, between 0 and 1.
        weight: of the newest speed in a rank's average, between 0 and 1.
        warmup: steps of a rank that are known before it can be slow, at least 1.
        patience: steps, at least 1.
        rest: steps from one replacement to the next, at least 1.

    Raises:
        ConfigError: a number is out of its range.

    Source: Or, Zhang and Freedman, "Resource Elasticity in Distributed Deep Learning", MLSys 2020, section 4.2.
    """

    def __init__(
        self, *, threshold: float = THRESHOLD, weight: float = 0.1, warmup: int = 3, patience: int = 10,
        rest: int = 100,
    ) -> None:  # fmt: skip
        if patience < 1 or rest < 1:
            raise ConfigError(f"patience and rest are steps, at least 1, not {patience!r} and {rest!r}")
        self._options: dict[str, Any] = {"threshold": threshold, "weight": weight, "warmup": warmup}
        Stragglers(1, **self._options)  # which refuses what cannot be
        self._patience = patience
        self._rest = rest

    def on_start(self, ctx: Context) -> None:
        """Begin to measure these ranks."""
        self._found = Stragglers(ctx.size, **self._options)
        self._running = [0] * ctx.size
        self._rests_until = 0

    def after_step(self, ctx: Context) -> None:
        """Look who is slow."""
        if ctx.metrics is None:
            return
        slow = self._found.update(ctx.metrics.speeds)
        self._running = [count + 1 if rank in slow else 0 for rank, count in enumerate(self._running)]
        due = [rank for rank, count in enumerate(self._running) if count >= self._patience]
        if due and ctx.step >= self._rests_until:
            self._replace(ctx, min(due, key=self._found.smoothed.__getitem__))

    def _replace(self, ctx: Context, rank: int) -> None:
        speeds = self._found.smoothed
        self._rests_until = ctx.step + self._rest
        ctx.replace(
            rank,
            steps_s=speeds[rank],
            median=median(one for one in speeds if not math.isnan(one)),
            threshold=self._options["threshold"],
            slow_in_steps=self._running[rank],
        )

    def state_dict(self) -> Any:
        """See `Policy`."""
        return self._rests_until

    def load_state_dict(self, state: Any) -> None:
        """Rest on, with other ranks."""
        self._rests_until = state
