"""Policies that change the strategy: by trials on the program's own steps, or by measuring the links."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from statistics import median

from kfcomm.adapt.detectors import Trials
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.adapt.survey import Measure, NetworkWatch, Survey, measure, message_nbytes, survey
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, StrategySpec
from kfcomm.strategies.plugins import build, check

PACKED = "packed_trees"
LEAST_GAIN = 1.05
"""A topology has to be faster by this factor to replace the one before."""
FALSE_ALARMS = 1e-4


class AutoStrategy(Policy):
    """Tries strategies on the program's own steps and keeps the fastest; tries again when the network has changed.

    It compares the time of the network for a byte, ``network_s / nbytes`` of ``StepMetrics``, so that neither computing
    nor a late rank counts against a strategy. The trials are successive elimination, see `Trials`; strategies with the
    same graphs are tried once.

    Afterwards it follows the cost of a step with a sequential test, see `ChangeTest`. When that finds a lasting change,
    new trials begin, but not within ``rest`` steps after the last ones. Where the candidates are those that the links
    make likely, the links are measured before, and trials begin only if the model predicts a gain. So of T steps at
    most ``(1 + T / rest) * rounds * steps * len(candidates)`` are trials. Beyond running the best, each series costs at
    most ``rounds * steps`` times the sum of how much longer the candidates' steps take, in steps of the best.

    A series that a change of the network disturbs begins anew: a candidate costs more than twice, or less than half, of
    what it did in the round before, or the one that was kept differs at once from what it did in its trials.

    Args:
        candidates: names, or strategies for this number of ranks; ``"packed_trees"`` are made of measured links. None
            for packed trees, the strategy in force and what the model predicts to be about as fast, which are tried in
            the order of the predictions.
        steps: of a trial, see `Trials`.
        rounds: see `Trials`.
        rest: steps between the end of a series of trials and the next.
        measure: as for `AvoidSlowLinks`.
        false_alarms: see `ChangeTest`.

    Raises:
        ConfigError: no candidate, an unknown name, or a number out of range.
    """

    changes_back = True

    def __init__(
        self,
        candidates: Sequence[StrategySpec] | None = None,
        *,
        steps: int = 4,
        rounds: int = 2,
        rest: int = 25,
        measure: Measure = measure,
        false_alarms: float = FALSE_ALARMS,
    ) -> None:
        if isinstance(candidates, str) or (candidates is not None and not candidates):
            raise ConfigError(f"candidates are one or more strategies, not {candidates!r}")
        for one in candidates or ():
            if isinstance(one, str) and one != PACKED:
                check(one)  # an unknown name is refused at once
        if rest < 1:
            raise ConfigError(f"rest is at least 1 step, not {rest!r}")
        Trials(1, steps=steps, rounds=rounds)  # it checks the numbers
        self._specs = None if candidates is None else tuple(candidates)
        self._steps = steps
        self._rounds = rounds
        self._rest = rest
        self._measure = measure
        self._watch = NetworkWatch(rest, false_alarms)

    def on_start(self, ctx: Context) -> None:
        """Make the candidates for this layout, and begin with the first."""
        ctx.take_strategy()
        self._candidates: dict[bytes, AnyStrategy] = {}
        self._trials: Trials | None = None
        self._was_disturbed = False
        self._num_kept = 0  # steps since the trials
        self._watch = NetworkWatch(self._rest, self._watch.false_alarms)
        if not self._needs_links:
            self._begin(ctx, [build(spec, ctx.layout) for spec in self._specs or ()], "first trials")

    @property
    def _needs_links(self) -> bool:
        return self._specs is None or PACKED in self._specs

    def after_step(self, ctx: Context) -> Awaitable[None] | None:
        """Count the step's cost, and ask for what is to run next."""
        metrics = ctx.metrics
        if metrics is None or math.isnan(metrics.throughput):
            return None
        if self._trials is None:
            return self._look(ctx, metrics, "first trials")
        if not self._trials.is_over:
            self._try(ctx, metrics, self._trials)
            return None
        return self._keep(ctx, metrics, self._trials)

    async def _look(self, ctx: Context, metrics: StepMetrics, why: str) -> None:
        """Measure the links, and begin trials of what they make likely."""
        found = await survey(ctx, self._measure, message_nbytes(metrics))
        self._watch.looked(found.took_s)
        if self._specs is not None:
            packed = next(one for one in found.candidates if one.name == PACKED)
            self._begin(ctx, [packed if one == PACKED else build(one, ctx.layout) for one in self._specs], why)
        elif self._trials is None or found.is_worth_a_change:
            self._begin(ctx, [*found.candidates, ctx.strategy], why)
        else:
            ctx.decide(f"keeps {ctx.strategy.name}, which fits the links: {why}", **found.links)

    def _begin(self, ctx: Context, candidates: Sequence[AnyStrategy], why: str) -> None:
        by_digest: dict[bytes, AnyStrategy] = {}
        for one in candidates:
            by_digest.setdefault(one.digest, one)  # names may mean the same graphs in this layout, which are tried once
        self._candidates = by_digest
        self._numbers = {digest: number for number, digest in enumerate(self._candidates)}
        self._trials = Trials(len(self._candidates), steps=self._steps, rounds=self._rounds)
        ctx.decide(f"tries {', '.join(one.name for one in self._candidates.values())}: {why}")
        self._ask(ctx, self._trials)

    def _try(self, ctx: Context, metrics: StepMetrics, trials: Trials) -> None:
        number = self._numbers.get(metrics.strategy.digest)
        if number is not None:
            trials.add(number, 1 / metrics.throughput)
        if trials.is_disturbed and not self._was_disturbed:
            self._was_disturbed = True  # once: a network that does not rest must not be tried for ever
            self._begin(ctx, list(self._candidates.values()), "the network changed during the trials")
            return
        if trials.is_over:
            best = self._named(trials.best)
            self._num_kept = 0
            self._watch.looked()
            self._watch.follow(best, trials.costs_as_of_the_best)
            ctx.decide(f"keeps {best.name}, the fastest", **self._evidence(trials))
        self._ask(ctx, trials)

    def _ask(self, ctx: Context, trials: Trials) -> None:
        wanted = self._named(trials.wanted)
        if wanted.digest != ctx.strategy.digest:
            ctx.set_strategy(wanted, **self._evidence(trials))

    def _keep(self, ctx: Context, metrics: StepMetrics, trials: Trials) -> Awaitable[None] | None:
        best = self._named(trials.best)
        # Set by another policy, or by the program: its cost says nothing about the network.
        if metrics.strategy.digest != best.digest or len(self._candidates) < 2:
            return None
        self._num_kept += 1
        due = self._watch.update(metrics)
        if self._num_kept > 2 * self._steps:
            self._was_disturbed = False
        elif self._watch.pending is not None and not self._was_disturbed:
            self._was_disturbed = True
            self._begin(ctx, list(self._candidates.values()), "the network changed during the trials")
            return None
        if due is None:
            return None
        why = f"the network is {due}"
        if self._needs_links:
            return self._look(ctx, metrics, why)
        self._begin(ctx, list(self._candidates.values()), why)
        return None

    def _named(self, number: int) -> AnyStrategy:
        return list(self._candidates.values())[number]

    def _evidence(self, trials: Trials) -> dict[str, float]:
        """Megabytes per second of each candidate that was measured."""
        costs = zip(self._candidates.values(), trials.costs, strict=True)
        return {f"{one.name} MB/s": 1e-6 / cost for one, cost in costs if cost < math.inf}


@dataclass
class Attempt:
    """Trial of the candidates of a survey, one after the other, until one does what was predicted.

    The first step of each is not counted, because links are opened in it.
    """

    before: AnyStrategy
    cost: float  # seconds per byte of ``before``
    survey: Survey
    steps: int  # counted, of each candidate
    at: int = 0
    costs: list[list[float]] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.costs = [[] for _ in self.survey.candidates]
        self._skips = True

    @property
    def gains(self) -> list[float]:
        """How many times as fast as ``before`` each is; 0 for those that were not measured."""
        return [self.cost / median(one) if one else 0.0 for one in self.costs]

    @property
    def wanted(self) -> AnyStrategy:
        """Strategy to run next; at the end, the one that stays."""
        if not self.is_over:
            return self.survey.candidates[self.at]
        gains = self.gains
        return self.survey.candidates[gains.index(max(gains))] if max(gains) >= LEAST_GAIN else self.before

    def add(self, cost: float) -> None:
        """Add a step of the wanted candidate."""
        if self._skips:
            self._skips = False
            return
        self.costs[self.at].append(cost)
        gain, predicted = self.gains[self.at], self.survey.gains[self.at]
        if len(self.costs[self.at]) < self.steps and gain > 1 / 2:
            return
        # Half of the predicted gain (in orders of magnitude) is enough: others were predicted to be as fast.
        is_good = gain >= max(LEAST_GAIN, math.sqrt(predicted))
        self.is_over = is_good or self.at == len(self.costs) - 1
        if not self.is_over:
            self.at += 1
            self._skips = True


class AvoidSlowLinks(Policy):
    """Measures all links when the network has become slower, and sets the graphs that fit them.

    1. The cost of a step's bytes on the median rank is followed by a sequential test, see `ChangeTest`.
    2. When that finds the network lastingly slower, all ranks probe their links together at the end of the next step.
    3. If the model of costs predicts that another strategy is faster by 10 %, by a second probe too, it is set:
       packed trees of the measured links, or a named strategy that is predicted to be as fast. If it does not reach
       half of the predicted gain in ``steps`` steps, the next of at most three is tried.
    4. If none is faster by 5 % than the strategy before, that is restored.

    While a choice of its own is in force it also measures when the network has become *faster*: the link may have
    recovered. After each measurement it rests, for at least 50 times as long as that took.

    Steps in which a rank's collectives carry less than ``least_nbytes`` are skipped: the time of small messages depends
    on the ranks' processors more than on their links.

    Cost: one or two probes, see ``Communicator.probe``, for each look; they take at most 2 % of the time.

    Args:
        measure: ``measure(comm)`` gives latencies and bandwidths, the same on every rank.
        steps: counted of each trial, at least 2.
        rest: steps from one look to the next, at least 4 times ``steps``.
        least_nbytes: bytes.
        false_alarms: see `ChangeTest`.

    Raises:
        ConfigError: a number is out of range.
    """

    changes_back = True

    def __init__(
        self,
        *,
        measure: Measure = measure,
        steps: int = 3,
        rest: int = 25,
        least_nbytes: int = 1 << 18,
        false_alarms: float = FALSE_ALARMS,
    ) -> None:
        if steps < 2:
            raise ConfigError(f"steps is at least 2, not {steps!r}")
        if rest < 4 * steps:
            raise ConfigError(f"rest is at least 4 times steps, {4 * steps}, not {rest!r}")
        self._measure = measure
        self._steps = steps
        self._rest = rest
        self._least_nbytes = least_nbytes
        self._watch = NetworkWatch(rest, false_alarms)

    def on_start(self, ctx: Context) -> None:
        """Forget what others have measured."""
        ctx.take_strategy()
        self._watch = NetworkWatch(self._rest, self._watch.false_alarms)
        self._own: bytes | None = None
        self._attempt: Attempt | None = None

    def after_step(self, ctx: Context) -> Awaitable[None] | None:
        """Compare what is tried, or this step with those before; look at the links where that is due."""
        metrics = ctx.metrics
        if metrics is None or math.isnan(metrics.throughput) or min(metrics.nbytes) < self._least_nbytes:
            return None
        if self._attempt is not None:
            self._compare(ctx, metrics, self._attempt)
            return None
        due = self._watch.update(metrics)
        # Only with a choice of its own: the link that it avoids may have recovered.
        if due is None or (due == "faster" and self._own != metrics.strategy.digest):
            return None
        return self._look(ctx, metrics, due)

    async def _look(self, ctx: Context, metrics: StepMetrics, how: str) -> None:
        before = ctx.strategy
        slowest = metrics.slowest_peer
        waited = {} if slowest is None else {"most waited for": f"rank {slowest}", "s": metrics.waited_s[slowest]}
        ctx.decide(f"the network is {how}: measures the links", **self._watch.evidence, **waited)
        cost = self._watch.cost
        found = await survey(ctx, self._measure, message_nbytes(metrics))
        self._watch.looked(found.took_s)
        evidence = {**found.links, "predicted gain": found.gains[0]}
        if found.candidates[0].digest == before.digest or not found.is_worth_a_change:
            ctx.decide(f"keeps {before.name}, which fits the links", **evidence)
            return
        await ctx.set_strategy(found.candidates[0], **evidence)
        self._attempt = Attempt(before, cost, found, self._steps)

    def _compare(self, ctx: Context, metrics: StepMetrics, attempt: Attempt) -> None:
        candidates = {one.digest for one in attempt.survey.candidates}
        if not {ctx.strategy.digest, metrics.strategy.digest} <= candidates:
            self._attempt = None  # another policy, or the program, has changed it: nothing is left to compare
            return
        if metrics.strategy.digest == attempt.wanted.digest:
            attempt.add(1 / metrics.throughput)
        wanted, gains = attempt.wanted, attempt.gains
        evidence = {"MB/s before": 1e-6 / attempt.cost}
        names_and_gains = zip(attempt.survey.candidates, gains, strict=True)
        evidence |= {one.name: 1e-6 * gain / attempt.cost for one, gain in names_and_gains if gain}
        if attempt.is_over:
            self._attempt = None
            if wanted is attempt.before:
                ctx.decide(f"goes back to {wanted.name}: nothing is faster", **evidence)
            else:
                self._own = wanted.digest
                ctx.decide(f"keeps {wanted.name}, {max(gains):.2f} times as fast as before", **evidence)
        if wanted.digest != ctx.strategy.digest:
            ctx.set_strategy(wanted, **evidence)
