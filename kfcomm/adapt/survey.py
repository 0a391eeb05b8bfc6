"""Candidates for a network, from measured links and the model of costs; and when it is time to measure them.

A `Survey` is the same on every rank, since the ranks share what they measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.adapt.change import Change, ChangeTest
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context
from kfcomm.strategies import AnyStrategy, Strategy, names
from kfcomm.strategies.cost import predict_seconds
from kfcomm.strategies.plugins import build

if TYPE_CHECKING:
    from kfcomm.probe import Probe
    from kfcomm.world.communicator import Communicator

Measure = Callable[["Communicator"], Awaitable["Probe"]]
"""``measure(comm)`` gives latencies and bandwidths, the same on every rank."""

PROBE_NBYTES, PROBE_ROUNDS = 1 << 16, 1
"""Options of a probe: 10 ms for each way on 50 Mbit/s, 90 on 6; what leads to a change is measured twice anyway."""
PROBE_SHARE = 0.02
"""Probes take at most this part of the time since the last one."""

WORTH = 1.1
"""Another strategy is tried if the model predicts that it is faster by this factor: predictions are that exact."""
MOST_TRIED = 3
MOST_RANKS = 64
"""In larger groups only packed trees are tried: predicting all named strategies takes too long."""


async def measure(comm: Communicator) -> Probe:
    """Measure all links roughly, to find the slow ones; see ``Communicator.probe``."""
    return await comm.probe(nbytes=PROBE_NBYTES, rounds=PROBE_ROUNDS)


@dataclass(frozen=True, slots=True)
class Survey:
    """Candidates by the measured links.

    Attributes:
        candidates: packed trees, and named strategies that are predicted to be about as fast; the fastest first.
        gains: how many times as fast as the strategy in force each is predicted to be.
        links: the slowest link, its rate and the median, for the log.
        took_s: seconds of its probes.
    """

    candidates: tuple[Strategy, ...]
    gains: tuple[float, ...]
    links: dict[str, Any]
    took_s: float

    @property
    def is_worth_a_change(self) -> bool:
        """Whether a candidate is predicted to be clearly faster than the strategy in force."""
        return self.gains[0] >= WORTH


async def survey(ctx: Context, measure: Measure, nbytes: int) -> Survey:
    """Measure the links on all ranks together; predict for messages of ``nbytes`` bytes.

    Noise makes links look slow, never fast: what would lead to a change is measured twice, and the better measurement
    of each link counts.
    """
    before = ctx.strategy
    probe, took_s = await _measured(ctx, measure)
    found = _survey_of(probe, before, nbytes, took_s)
    if not found.is_worth_a_change:
        return found
    again, more_s = await _measured(ctx, measure)
    better = replace(
        probe,
        latency_s=np.minimum(probe.latency_s, again.latency_s),
        bandwidth=np.maximum(probe.bandwidth, again.bandwidth),
    )
    return _survey_of(better, before, nbytes, took_s + more_s)


async def _measured(ctx: Context, measure: Measure) -> tuple[Probe, float]:
    from kfcomm.probe.record import Probe

    async def probe(comm: Communicator) -> dict[str, Any]:
        start_s = time.perf_counter()
        record = (await measure(comm)).as_json()
        took_s = np.array([time.perf_counter() - start_s])
        # the longest of all ranks, so that they count alike
        return {
            "probe": record,
            "took_s": float((await comm.all_reduce(took_s, "kfcomm/adaptation/probe", op="max"))[0]),
        }

    found = await ctx.together("probe the links", probe)
    return replace(Probe.from_json(found["probe"]), layout=ctx.layout), found["took_s"]


def _survey_of(probe: Probe, before: AnyStrategy, nbytes: int, took_s: float) -> Survey:
    network, layout = probe.network(), probe.layout
    candidates = fitting(probe, nbytes)
    now_s = predict_seconds(before, layout, nbytes, network)
    gains = tuple(now_s / predict_seconds(one, layout, nbytes, network) for one in candidates)
    return Survey(candidates, gains, _links(probe), took_s)


def fitting(probe: Probe, nbytes: int) -> tuple[Strategy, ...]:
    """Packed trees, and what is predicted to be about as fast for messages of ``nbytes`` bytes, the fastest first."""
    packed, layout = probe.packed_trees(), probe.layout
    made = {packed.digest: packed}
    if layout.size <= MOST_RANKS:
        made = {one.digest: one for one in (build(name, layout).select(nbytes) for name in names())} | made
    network = probe.network()
    seconds = {digest: predict_seconds(one, layout, nbytes, network) for digest, one in made.items()}
    fast = sorted(
        (digest for digest in made if seconds[digest] <= WORTH * min(seconds.values())), key=seconds.__getitem__
    )
    chosen = [digest for digest in fast if digest != packed.digest][: MOST_TRIED - 1]
    return tuple(made[digest] for digest in sorted([packed.digest, *chosen], key=seconds.__getitem__))


def _links(probe: Probe) -> dict[str, Any]:
    """Slowest link, and the median bandwidth of the links."""
    rates = [probe.bandwidth[a, b] for a in range(probe.size) for b in range(probe.size) if a != b]
    if not rates:
        return {}
    a, b = probe.slowest(1)[0]
    return {"slowest link": f"{a} -> {b}", "its MB/s": min(rates) / 1e6, "median MB/s": float(median(rates)) / 1e6}


def message_nbytes(metrics: StepMetrics) -> int:
    """Bytes of a usual collective of the step."""
    return round(median(nbytes / count for nbytes, count in zip(metrics.nbytes, metrics.counts, strict=True) if count))


@dataclass
class NetworkWatch:
    """Tells when the network has changed for most ranks, and the time has come for a look at its links.

    It follows the cost of a step's bytes on the median rank, see `ChangeTest`. A change that is found too soon after a
    look is reported later, unless the opposite is found before.

    Args:
        rest: steps from one look to the next.
        false_alarms: see `ChangeTest`.
    """

    rest: int
    false_alarms: float
    pending: Change | None = None
    _test: ChangeTest = field(init=False)
    _digest: bytes | None = None
    _steps: float = math.inf  # since the last look
    _elapsed_s: float = 0.0  # likewise
    _took_s: float = 0.0  # of the last look

    def __post_init__(self) -> None:
        self._test = ChangeTest(false_alarms=self.false_alarms)

    @property
    def evidence(self) -> dict[str, float]:
        """Throughput now and before the change, and its noise, for the log."""
        return {"MB/s": 1e-6 / self._test.level, "before": 1e-6 / self._test.former, "noise": self._test.former_noise}

    @property
    def cost(self) -> float:
        """Seconds per byte since the last change."""
        return self._test.level

    def follow(self, strategy: AnyStrategy, costs: Sequence[float] = ()) -> None:
        """Begin with a strategy that was just set, and what is known of its costs."""
        self._digest, self.pending = strategy.digest, None
        self._test.reset(costs)

    def update(self, metrics: StepMetrics) -> Change | None:
        """Add a step; return the change that a look is due for."""
        self._steps += 1
        self._elapsed_s += median(metrics.seconds)
        if metrics.strategy.digest != self._digest:
            self.follow(metrics.strategy)  # its first step, in which links are opened, does not count
            return None
        found = self._test.update(1 / metrics.throughput)
        if found is not None:
            # What was taken back before it could be looked at is not a change.
            self.pending = found if self.pending in (None, found) else None
        return self.pending if self._may_look else None

    @property
    def _may_look(self) -> bool:
        return self._steps >= self.rest and self._took_s <= PROBE_SHARE * self._elapsed_s

    def looked(self, took_s: float = 0.0) -> None:
        """Note that the links were measured, or that nothing is to be done."""
        self.pending = None
        self._steps = 0
        if took_s:
            self._elapsed_s, self._took_s = 0.0, took_s
