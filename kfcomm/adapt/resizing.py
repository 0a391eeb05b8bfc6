"""Policies that change the number of ranks, or replace slow ones."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from kfcomm.adapt.detectors import THRESHOLD, Stragglers
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.types import override

THROUGHPUT = "throughput"
"""Name of the observed samples per second, of all ranks, in a program that does not follow a batch size."""


class MarginalUtility(Policy):
    """Adds workers as long as each new one adds enough throughput, compared with a worker before.

    The throughput R of k workers is the median of ``steps`` steps, not counting the first one after a change. After a
    change from k' to k workers, each new one has added (R - R') / (k - k'). While that is above ``threshold`` times
    R' / k', the policy asks for ``step`` more workers, up to ``most``; else it asks for the number before again, and
    rests for ``rest`` steps.

    If the job has no more workers, it waits for them without asking again. Samples per second follow from the batch
    size; a program without a batch size observes ``throughput``.

    Args:
        most: largest number of ranks.
        least: smallest number of ranks; None for the number at first.
        step: number of ranks that are added at a time.
        threshold: part of a worker's throughput, between 0 and 1.
        steps: number of measured steps, at least 2.
        rest: number of steps until the next attempt; None for no other attempt.

    Raises:
        ConfigError: a number is out of its range.

    Source: Or, Zhang and Freedman, "Resource Elasticity in Distributed Deep Learning", MLSys 2020, section 4.1.
    """

    changes_back = True

    def __init__(
        self, most: int, *, least: int | None = None, step: int = 1, threshold: float = 0.1, steps: int = 10,
        rest: int | None = 1000,
    ) -> None:  # fmt: skip
        if not 1 <= (least or 1) <= most:
            raise ConfigError(f"sizes are from 1 on, the least not above the most, and not {least!r} to {most!r}")
        if step < 1 or steps < 2 or (rest is not None and rest < 1) or not 0 < threshold < 1:
            raise ConfigError(
                f"step and rest are at least 1, steps 2, and threshold between 0 and 1, not {step!r}, {rest!r}, "
                f"{steps!r} and {threshold!r}"
            )
        self._most = most
        self._given_least = least
        self._step = step
        self._threshold = threshold
        self._steps = steps
        self._rest = rest

    def on_start(self, ctx: Context) -> None:
        """Begin to measure with these ranks."""
        self._rates: list[float] = []
        self._is_first = True
        self._before: tuple[int, float] | None = None
        self._asked: int | None = None
        self._rests_since: int | None = None
        self._least = self._given_least or ctx.size

    def after_step(self, ctx: Context) -> None:
        """Count the step; decide when there are enough."""
        metrics = ctx.metrics
        rate = None if metrics is None else samples_per_s(metrics)
        if rate is None:
            return
        if self._is_first:  # in which links are opened
            self._is_first = False
            return
        self._rates.append(rate)
        if len(self._rates) == self._steps and self._asked is None:
            self._decide(ctx, median(self._rates))
        elif self._rests_since is not None and self._rest is not None and ctx.step >= self._rests_since + self._rest:
            self._rates, self._before, self._rests_since, self._asked = [], None, None, None

    def _decide(self, ctx: Context, rate: float) -> None:
        size, before = ctx.size, self._before
        evidence: dict[str, Any] = {"samples_s": rate, "ranks": size}
        if before is not None and size > before[0]:
            # What one new rank brings, as a part of what each of those before brought.
            each = (rate - before[1]) / (size - before[0]) / (before[1] / before[0])
            evidence |= {"before": before[1], "each_new_one_brings": each, "threshold": self._threshold}
            if each <= self._threshold:
                self._rests_since = ctx.step
                self._ask(ctx, max(before[0], self._least), evidence)
                return
        wanted = min(self._most, size + self._step)
        if wanted > size:
            self._before = size, rate
            self._ask(ctx, wanted, evidence)
        else:
            self._rests_since = ctx.step

    def _ask(self, ctx: Context, size: int, evidence: dict[str, Any]) -> None:
        self._asked = size
        if size != ctx.size:
            ctx.resize(size, **evidence)

    @override
    def state_dict(self) -> Any:
        return [self._before, self._rests_since, self._least]

    def load_state_dict(self, state: Any) -> None:
        """Continue with other ranks, and the throughput of those before."""
        before, self._rests_since, self._least = state
        self._before = None if before is None else (before[0], before[1])
        if self._rests_since is not None:
            self._asked = -1  # more ranks were not worth it: measured again after a rest


def samples_per_s(metrics: StepMetrics) -> float | None:
    """Return samples per second, of all ranks; None if unknown."""
    batch, seconds = metrics.hyperparameters.batch_size, max(metrics.seconds)
    if batch is not None and seconds > 0:
        return batch / seconds
    observed = metrics.mean(THROUGHPUT)
    return observed if observed > 0 else None


class ReplaceStragglers(Policy):
    """Asks for another process in the place of a rank that delays all others.

    A rank is slow while its smoothed speed is below ``threshold`` times the median of all: see `Stragglers`, and
    ``StepMetrics.speeds``, which exclude its waits for other ranks. A rank that is slow in ``patience`` consecutive
    steps is replaced; the slowest first, and only one in ``rest`` steps, because its successor on a slow host may be
    slow, too.

    Args:
        threshold: part of the median, between 0 and 1.
        weight: weight of the newest speed in a rank's average, between 0 and 1.
        warmup: number of measured steps of a rank before it can be slow, at least 1.
        patience: number of steps, at least 1.
        rest: number of steps from one replacement to the next, at least 1.

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
        Stragglers(1, **self._options)  # it checks the options
        self._patience = patience
        self._rest = rest

    def on_start(self, ctx: Context) -> None:
        """Begin to measure these ranks."""
        self._found = Stragglers(ctx.size, **self._options)
        self._running = [0] * ctx.size
        self._rests_until = 0

    def after_step(self, ctx: Context) -> None:
        """Replace a rank that has been slow long enough."""
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

    @override
    def state_dict(self) -> Any:
        return self._rests_until

    def load_state_dict(self, state: Any) -> None:
        """Continue to rest, with other ranks."""
        self._rests_until = state
