"""Policy that keeps the fastest of several strategies, and the trials by which it finds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kfcomm.adapt.detectors import Interference
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.strategies.plugins import build, check


@dataclass
class _Candidate:
    costs: list[float] = field(default_factory=list)
    seen: int = 0  # steps in this round

    @property
    def cost(self) -> float:
        return median(self.costs) if self.costs else math.inf


class Trials:
    """Successive elimination among candidates 0, 1, ..., in rounds of trials: finds the cheapest at a bounded cost.

    Pure and deterministic: ranks that feed the same costs try the same candidates in the same order, and keep the same.

    In a round each remaining candidate runs for ``steps`` steps. The first of them is not counted, because links are
    opened in it. The last one is the step in which the ranks agree on the change. A candidate that costs more than
    ``give_up`` times the best so far after its first counted step is replaced at once. At the end of a round,
    candidates whose median cost is more than ``margin`` above the lowest are eliminated. When one remains, or after
    ``rounds`` rounds, the one with the lowest median is kept.

    Regret, the cost of trials beyond running the best from the beginning: candidate c, whose step takes w(c) times the
    best's, runs for at most ``rounds * steps`` steps (the first one, for one more), or for 3 if w(c) is above
    ``give_up`` and the best was tried before. So the regret is at most ``rounds * steps * sum(w(c) - 1)`` steps of the
    best, however long the job is. This holds for constant costs; with noise, the choice is as wrong as medians of
    ``steps - 1`` costs are.

    Args:
        num_candidates: at least 1.
        steps: at least 3.
        rounds: at least 1.
        margin: above 0.
        give_up: above 1.

    Raises:
        ConfigError: one of them is out of range.
    """

    def __init__(
        self, num_candidates: int, *, steps: int = 4, rounds: int = 2, margin: float = 0.1, give_up: float = 2.0
    ) -> None:
        for name, value, least in (("candidates", num_candidates, 1), ("steps", steps, 3), ("rounds", rounds, 1)):
            if value < least:
                raise ConfigError(f"trials need at least {least} {name}, not {value!r}")
        if not margin > 0:
            raise ConfigError(f"margin is above 0, not {margin!r}")
        if not give_up > 1:
            raise ConfigError(f"give_up is above 1, not {give_up!r}")
        self._candidates = [_Candidate() for _ in range(num_candidates)]
        self._steps = steps
        self._rounds = rounds
        self._margin = margin
        self._give_up = give_up
        self._remaining = list(range(num_candidates))
        self._queue = list(self._remaining)

    @property
    def wanted(self) -> int:
        """Candidate that should run; at the end, the one that is kept."""
        return self._queue[0] if self._queue else self.best

    @property
    def is_over(self) -> bool:
        """Whether the choice is made."""
        return not self._queue

    @property
    def best(self) -> int:
        """The remaining candidate with the lowest median cost; of equals, the first."""
        return min(self._remaining, key=lambda number: self._candidates[number].cost)

    @property
    def remaining(self) -> tuple[int, ...]:
        """Candidates that are not eliminated."""
        return tuple(self._remaining)

    @property
    def costs(self) -> tuple[float, ...]:
        """Median costs, by candidate; inf without a measurement."""
        return tuple(one.cost for one in self._candidates)

    def add(self, number: int, cost: float) -> None:
        """Add the cost of a step of a candidate, which may already be about to be replaced."""
        candidate = self._candidates[number]
        candidate.seen += 1
        if candidate.seen > 1:
            candidate.costs.append(cost)
        if not self._queue or number != self._queue[0]:
            return
        counted = candidate.seen - 1
        is_hopeless = counted >= 1 and candidate.cost > self._give_up * self._lowest()
        if counted >= self._steps - 2 or is_hopeless:
            self._queue.pop(0)
            if not self._queue:
                self._end_of_round()

    def _lowest(self) -> float:
        return self._candidates[self.best].cost

    def _end_of_round(self) -> None:
        self._rounds -= 1
        bound = (1 + self._margin) * self._lowest()
        self._remaining = [number for number in self._remaining if self._candidates[number].cost <= bound]
        if self._rounds > 0 and len(self._remaining) > 1:
            self._queue = self._in_order()
            for number in self._queue:
                self._candidates[number].seen = 0

    def _in_order(self) -> list[int]:
        """Remaining candidates, the best last: if it stays the best, no change is needed afterwards."""
        best = self.best
        return [number for number in self._remaining if number != best] + [best]


PATIENCE = 3
"""Consecutive low steps before new trials, which cost more than a look at the links."""


class AutoStrategy(Policy):
    """Tries strategies on the program's own steps and keeps the fastest; tries again when the network has changed.

    It compares the time of the network for a byte, ``network_s / nbytes`` of ``StepMetrics``, so that neither computing
    nor a late rank counts against a strategy. The trials are successive elimination, see `Trials`; strategies with the
    same graphs are tried once.

    Afterwards it compares the throughput of each step with a reference (`Interference`). If most ranks find it too low,
    it begins new trials, but not within ``rest`` steps after the last ones. So of T steps at most
    ``(1 + T / rest) * rounds * steps * len(candidates)`` are trials. Beyond running the best, each series costs at most
    ``rounds * steps`` times the sum of how much longer the candidates' steps take, in steps of the best.

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
