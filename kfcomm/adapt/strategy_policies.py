"""Policies that change the strategy: by trials on the program's own steps, or by measuring the links."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from kfcomm.adapt.detectors import THRESHOLD, Interference, Trials, Verdict
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, Strategy, StrategySpec, names
from kfcomm.strategies.cost import predict_seconds
from kfcomm.strategies.plugins import build, check
from kfcomm.types import Layout

if TYPE_CHECKING:
    from kfcomm.probe import Probe
    from kfcomm.world.communicator import Communicator


PROBE_NBYTES, PROBE_ROUNDS = 1 << 17, 2
"""Options of a probe: 20 ms on 50 Mbit/s; with 8 hosts it takes a few seconds less than with the defaults."""

LEAST_GAIN = 1.05
"""A topology has to be faster by this factor to replace the one before."""

ABOUT_EQUAL = 1.1
"""Strategies that are predicted to take less than this times the shortest are tried: predictions are that exact."""

MOST_TRIED = 3
MOST_RANKS = 64
"""In larger groups only packed trees are tried: predicting all named strategies takes too long."""


async def measure(comm: Communicator) -> Probe:
    """Measure all links roughly, to find the slow ones; see ``Communicator.probe``."""
    return await comm.probe(nbytes=PROBE_NBYTES, rounds=PROBE_ROUNDS)


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

    changes_back = True

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
        Trials(1, steps=steps, rounds=rounds)  # it checks the numbers
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
            # Names may mean the same graphs in this layout, which are tried once.
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
        # Set by another policy, or by the program: its throughput says nothing about the network.
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


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Trial of candidates, and the strategy and throughput before."""

    before: AnyStrategy
    throughput: float
    candidates: tuple[Strategy, ...]
    trials: Trials


class AvoidSlowLinks(Policy):
    """Measures all links when the network is slower for most ranks, and sets the graphs that fit them.

    1. The throughput of each step is compared with a reference that follows slowly; see `Interference`.
    2. When more than half of the ranks find it too low in two consecutive steps, all ranks probe their links together
       at the end of the next step.
    3. ``packed_trees`` of the measured links are set at once. If the model of costs predicts for named strategies that
       they take about as long (up to 10 % more than the best), at most two of them are tried as well, each for
       ``steps`` steps, and the fastest is kept; see `Trials`.
    4. If that is not faster by 5 % than the step in which the interference was found, the strategy before is restored.

    While a choice of its own is in force it also measures when most ranks find the network that much *faster* than the
    reference: the link may have recovered. After each measurement it rests.

    Steps in which a rank's collectives carry less than ``least_nbytes`` are skipped: the time of small messages depends
    on the ranks' processors more than on their links.

    Cost: a probe, see ``Communicator.probe``, for each look; at most one look in ``rest`` steps.

    Args:
        measure: ``measure(comm)`` gives latencies and bandwidths, the same on every rank.
        steps: of each trial, at least 3.
        rest: steps from one look to the next, at least 4 times ``steps``.
        least_nbytes: bytes.

    Raises:
        ConfigError: a number is out of range.
    """

    changes_back = True

    def __init__(
        self,
        *,
        measure: Callable[[Communicator], Awaitable[Probe]] = measure,
        steps: int = 3,
        rest: int = 25,
        least_nbytes: int = 1 << 18,
    ) -> None:
        Trials(1, steps=steps)  # it checks the number
        if rest < 4 * steps:
            raise ConfigError(f"rest is at least 4 times steps, {4 * steps}, not {rest!r}")
        self._measure = measure
        self._steps = steps
        self._rest = rest
        self._least_nbytes = least_nbytes

    def on_start(self, ctx: Context) -> None:
        """Make the detectors for this number of ranks; forget what others have measured."""
        self._looked_at: int | None = None
        self._compared: bytes | None = None
        self._own: bytes | None = None
        self._attempt: _Attempt | None = None
        self._slower = Interference(ctx.size)
        self._faster = Interference(ctx.size)

    def after_step(self, ctx: Context) -> Awaitable[None] | None:
        """Compare what is tried, or this step with those before; look at the links where that is due."""
        metrics = ctx.metrics
        if metrics is None or math.isnan(metrics.throughput) or min(metrics.nbytes) < self._least_nbytes:
            return None
        if self._attempt is not None:
            self._compare(ctx, metrics, self._attempt)
            return None
        if metrics.strategy.digest != self._compared:
            self._compared = metrics.strategy.digest
            self._slower.reset()
            self._faster.reset()
            return None  # its first step, in which links are opened
        slower = self._slower.update(metrics.throughputs)
        faster = self._faster.update([1 / one for one in metrics.throughputs])
        if self._looked_at is not None and ctx.step < self._looked_at + self._rest:
            return None
        if slower.is_interference:
            return self._look(ctx, metrics, slower, "slower")
        # Only a choice of its own: the link that it avoids may have recovered.
        if faster.is_interference and self._own == metrics.strategy.digest:
            return self._look(ctx, metrics, faster, "faster")
        return None

    async def _measured(self, comm: Communicator) -> dict[str, Any]:
        """Measure the links, in the form of a record."""
        return (await self._measure(comm)).as_json()

    async def _look(self, ctx: Context, metrics: StepMetrics, verdict: Verdict, how: str) -> None:
        self._looked_at = ctx.step
        before = ctx.strategy
        slowest = metrics.slowest_peer
        waited = {} if slowest is None else {"most waited for": f"rank {slowest}", "s": metrics.waited_s[slowest]}
        evidence = {
            "MB/s": metrics.throughput / 1e6,
            "reference": median(self._slower.references) / 1e6,
            "threshold": THRESHOLD,
            "votes": verdict.votes,
            **waited,
        }
        ctx.decide(f"{len(verdict.votes)} of {ctx.size} ranks find the network {how}: measures the links", **evidence)
        probe = _probe_of(await ctx.together("probe the links", self._measured), ctx.layout)
        nbytes = round(median(nbytes / count for nbytes, count in zip(metrics.nbytes, metrics.counts, strict=True)))
        candidates = fitting(probe, nbytes)
        links = _links(probe)
        if candidates[0].digest == before.digest:
            ctx.decide(f"keeps {before.name}, which fits the links", **links)
            return
        await ctx.set_strategy(candidates[0], **links)
        trials = Trials(len(candidates), steps=self._steps, rounds=1)
        self._attempt = _Attempt(before, metrics.throughput, candidates, trials)

    def _compare(self, ctx: Context, metrics: StepMetrics, attempt: _Attempt) -> None:
        trials, candidates = attempt.trials, attempt.candidates
        tried = [one.digest for one in candidates]
        if not {ctx.strategy.digest, metrics.strategy.digest} <= set(tried):
            self._attempt = None  # another policy, or the program, has changed it: nothing is left to compare
            return
        trials.add(tried.index(metrics.strategy.digest), 1 / metrics.throughput)
        costs = zip(candidates, trials.costs, strict=True)
        evidence = {"MB/s before": attempt.throughput / 1e6}
        evidence |= {one.name: 1e-6 / cost for one, cost in costs if cost < math.inf}
        wanted: AnyStrategy = candidates[trials.wanted]
        if trials.is_over:
            self._attempt = None
            gain = 1 / trials.costs[trials.best] / attempt.throughput
            if gain >= LEAST_GAIN:
                self._own = wanted.digest
                ctx.decide(f"keeps {wanted.name}, {gain:.2f} times as fast as before", **evidence)
            else:
                wanted = attempt.before
                ctx.decide(f"goes back to {wanted.name}: nothing is faster", **evidence)
        if wanted.digest != ctx.strategy.digest:
            ctx.set_strategy(wanted, **evidence)


def fitting(probe: Probe, nbytes: int) -> tuple[Strategy, ...]:
    """Packed trees, and what is predicted to be about as fast for messages of ``nbytes`` bytes, the fastest first."""
    packed, layout = probe.packed_trees(), probe.layout
    if layout.size > MOST_RANKS:
        return (packed,)
    network = probe.network()
    named = {made.digest: made for made in (build(name, layout).select(nbytes) for name in names())}
    named.pop(packed.digest, None)
    seconds = {digest: predict_seconds(made, layout, nbytes, network) for digest, made in named.items()}
    bound = ABOUT_EQUAL * min([predict_seconds(packed, layout, nbytes, network), *seconds.values()])
    others = sorted((digest for digest in named if seconds[digest] <= bound), key=seconds.__getitem__)
    return packed, *(named[digest] for digest in others[: MOST_TRIED - 1])


def _probe_of(record: dict[str, Any], layout: Layout) -> Probe:
    """The probe, with what is known of these hosts beside."""
    from kfcomm.probe.record import Probe

    return replace(Probe.from_json(record), layout=layout)


def _links(probe: Probe) -> dict[str, Any]:
    """Slowest link, and the median bandwidth of the links."""
    rates = [probe.bandwidth[a, b] for a in range(probe.size) for b in range(probe.size) if a != b]
    if not rates:
        return {}
    a, b = probe.slowest(1)[0]
    return {"slowest link": f"{a} -> {b}", "its MB/s": min(rates) / 1e6, "median MB/s": float(median(rates)) / 1e6}
