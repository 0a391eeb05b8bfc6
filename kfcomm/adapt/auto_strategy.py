"""A policy that keeps the fastest of several strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kfcomm.adapt.detectors import Interference
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.adapt.trials import Trials
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.strategies.plugins import build, check

PATIENCE = 3
"""Low steps running before trials begin anew: they cost more than a look at the links."""


class AutoStrategy(Policy):
    """Tries strategies on the program's own steps and keeps the fastest; tries again when the network has changed.

    What is compared is the time that the network takes for a byte: ``network_s / nbytes`` of ``StepMetrics``, so that
    neither computing nor a rank that is late is blamed on a strategy. The trials are successive elimination, see
    `Trials`; strategies with the same graphs are tried once.

    Afterwards the throughput of each step is compared with a reference (`Interference`). When most ranks find it
    too low the trials begin anew, but not within ``rest`` steps of the end of the last. So of T steps at most
    ``(1 + T / rest) * rounds * steps * len(candidates)`` are trials, and each series costs, beyond running the best,
    at most ``rounds * steps`` times the sum over the candidates of how much longer their steps take, in steps of the
    best.

    Args:
        candidates: names, or strategies for this number of ranks; at least one.
        steps: of a trial, see `Trials`.
        rounds: see `Trials`.
        rest: steps between the end of a series of trials and the next.

    Raises:
        ConfigError: no candidate, an unknown name, or a number out of range.
    """

    def __init__(
        self,
        candidates: Sequence[StrategySpec] = ("ring", "binary_tree", "multi_binary_tree_star", "star", "clique"),
        *,
        steps: int = 4,
        rounds: int = 2,
        rest: int = 100,
    ) -> None:
        if isinstance(candidates, str) or not candidates:
            raise ConfigError(f"candidates are one or more strategies, not {candidates!r}")
        for one in candidates:
            if isinstance(one, str):
                check(one)  # an unknown name is refused at once
        if rest < 1:
            raise ConfigError(f"rest is at least 1 step, not {rest!r}")
        Trials(1, steps=steps, rounds=rounds)
        self._specs = tuple(candidates)
        self._steps = steps
        self._rounds = rounds
        self._rest = rest
        self._rested = 0
        self._candidates: list[AnyStrategy] = []

    def on_start(self, ctx: Context) -> None:
        """Make the candidates for this layout, and begin with the first."""
        by_digest: dict[bytes, AnyStrategy] = {}
        for spec in self._specs:
            made = build(spec, ctx.layout)
            by_digest.setdefault(made.digest, made)
        self._candidates = list(by_digest.values())
        self._numbers = {digest: number for number, digest in enumerate(by_digest)}
        self._interference = Interference(ctx.size, patience=PATIENCE)
        self._begin(ctx, "first trials")

    def after_step(self, ctx: Context) -> None:
        """Count the step's cost, and ask for what is to run next."""
        metrics = ctx.metrics
        if metrics is None or math.isnan(metrics.throughput):
            return
        if self._trials.is_over:
            self._watch(ctx, metrics)
        else:
            self._try(ctx, metrics)

    def _try(self, ctx: Context, metrics: StepMetrics) -> None:
        number = self._numbers.get(metrics.strategy.digest)
        if number is not None:
            self._trials.add(number, 1 / metrics.throughput)
        if self._trials.is_over:
            self._rested = 0
            self._interference.reset()
            name = self._candidates[self._trials.best].name
            ctx.decide(f"keeps {name}, the fastest", **self._evidence())
        self._ask(ctx)

    def _begin(self, ctx: Context, why: str) -> None:
        self._trials = Trials(len(self._candidates), steps=self._steps, rounds=self._rounds)
        ctx.decide(f"tries {', '.join(one.name for one in self._candidates)}: {why}")
        self._ask(ctx)

    def _ask(self, ctx: Context) -> None:
        wanted = self._candidates[self._trials.wanted]
        if wanted.digest != ctx.strategy.digest:
            ctx.set_strategy(wanted, **self._evidence())

    def _watch(self, ctx: Context, metrics: StepMetrics) -> None:
        self._rested += 1
        if metrics.strategy.digest != self._candidates[self._trials.best].digest:
            return
        verdict = self._interference.update(metrics.throughputs)
        if verdict.is_interference and self._rested >= self._rest and len(self._candidates) > 1:
            self._begin(
                ctx, f"{len(verdict.votes)} of {ctx.size} ranks have less than 0.8 of their reference throughput"
            )

    def _evidence(self) -> dict[str, float]:
        """Megabytes per second of each candidate that was measured."""
        costs = zip(self._candidates, self._trials.costs, strict=True)
        return {f"{one.name} MB/s": 1e-6 / cost for one, cost in costs if cost < math.inf}
