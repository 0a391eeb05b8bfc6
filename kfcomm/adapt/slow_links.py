"""A policy that leaves slow links alone: it measures the network when it has changed, and sets what fits it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from kfcomm.adapt.detectors import THRESHOLD, Interference, Verdict
from kfcomm.adapt.metrics import StepMetrics
from kfcomm.adapt.policy import Context, Policy
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, packed_trees

if TYPE_CHECKING:
    from kfcomm.communicator import Communicator

PROBE_NBYTES, PROBE_ROUNDS = 1 << 17, 2
"""Of the probes: 20 ms on 50 Mbit/s, where a look at 8 hosts takes a few seconds less than with a probe's own."""

LEAST_GAIN = 1.05
"""By less than this factor a topology is no better than the one before."""


class Measured(Protocol):
    """As much of a ``kfcomm.probe.Probe`` as matters here."""

    @property
    def bandwidth(self) -> Any:
        """Bytes per second from rank (row) to rank (column)."""


async def probe(comm: Communicator) -> Measured:
    """Measure all links, with little: what is wanted is which are slow; see ``Communicator.probe``."""
    return await comm.probe(nbytes=PROBE_NBYTES, rounds=PROBE_ROUNDS)


class AvoidSlowLinks(Policy):
    """When most ranks find the network slower than it was, measures all links and sets the trees that fit them.

    1. The throughput of each step is compared with a reference that follows slowly; see `Interference`.
    2. When more than half of the ranks find it too low in two steps running, all ranks probe their links together at
       the end of the next step, and change to ``packed_trees`` of what they measured.
    3. After ``check`` steps with the new trees their throughput is compared with that of the step in which the
       interference was found. If it is no better by 5 %, the strategy from before is set again.

    While trees of its own are in force it also looks again when most ranks find the network that much *faster* than the
    reference: the link may have recovered. After each look it rests, whatever happens.

    Cost: a probe, see ``Communicator.probe``, for each look; at most one look in ``rest`` steps.

    Steps in which a rank's collectives carry less than ``least_nbytes`` are left out: how long little messages take
    says more of the ranks' processors than of their links.

    Args:
        measure: ``measure(comm)`` gives the bandwidths, the same on every rank.
        check: steps, at least 1.
        rest: steps from one look to the next, at least ``check + 3``.
        least_nbytes: bytes.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        *,
        measure: Callable[[Communicator], Awaitable[Measured]] = probe,
        check: int = 3,
        rest: int = 25,
        least_nbytes: int = 1 << 18,
    ) -> None:
        if check < 1:
            raise ConfigError(f"check is at least 1 step, not {check!r}")
        if rest < check + 3:
            raise ConfigError(f"rest is at least check + 3 = {check + 3} steps, not {rest!r}")
        self._measure = measure
        self._check = check
        self._rest = rest
        self._least_nbytes = least_nbytes
        self._looked_at: int | None = None
        self._compared: bytes | None = None
        self._own: bytes | None = None
        self._before: tuple[AnyStrategy, float] | None = None
        self._after: list[float] = []

    def on_start(self, ctx: Context) -> None:
        """Make the detectors for this number of ranks."""
        self._slower = Interference(ctx.size)
        self._faster = Interference(ctx.size)

    def after_step(self, ctx: Context) -> Awaitable[None] | None:
        """Compare, see whether it has helped, and look where that is due."""
        metrics = ctx.metrics
        if metrics is None or math.isnan(metrics.throughput) or min(metrics.nbytes) < self._least_nbytes:
            return None
        if self._before is not None and metrics.strategy.digest != self._own:
            self._before = None  # another policy, or the program, has changed it
        if metrics.strategy.digest != self._compared:
            self._compared = metrics.strategy.digest
            self._slower.reset()
            self._faster.reset()
            return None  # its first step, in which links are opened
        if self._before is not None:
            self._see_if_it_helped(ctx, metrics, *self._before)
            return None
        slower = self._slower.update(metrics.throughputs)
        faster = self._faster.update([1 / one for one in metrics.throughputs])
        if self._looked_at is not None and ctx.step < self._looked_at + self._rest:
            return None
        if slower.is_interference:
            return self._look(ctx, metrics, slower, "slower")
        if faster.is_interference and self._own == metrics.strategy.digest:
            return self._look(ctx, metrics, faster, "faster")
        return None

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
        measured = await ctx.together("probe the links", self._measure)
        chosen = packed_trees(ctx.layout, measured.bandwidth)
        evidence = _links(measured.bandwidth)
        if chosen.digest == before.digest:
            ctx.decide(f"keeps {before.name}, which fits the links", **evidence)
            return
        await ctx.set_strategy(chosen, **evidence)
        self._own = chosen.digest
        self._before = (before, metrics.throughput)
        self._after.clear()

    def _see_if_it_helped(self, ctx: Context, metrics: StepMetrics, before: AnyStrategy, throughput: float) -> None:
        self._after.append(metrics.throughput)
        if len(self._after) < self._check:
            return
        self._before = None
        now = median(self._after)
        evidence = {"MB/s before": throughput / 1e6, "now": now / 1e6}
        if now >= LEAST_GAIN * throughput:
            ctx.decide(f"keeps {ctx.strategy.name}, which is {now / throughput:.2f} times as fast", **evidence)
        else:
            ctx.decide(f"goes back to {before.name}: {ctx.strategy.name} is no faster", **evidence)
            ctx.set_strategy(before, **evidence)


def _links(bandwidth: Any) -> dict[str, Any]:
    """The slowest link, and what the links do at the median."""
    rates = {(a, b): float(rate) for a, row in enumerate(bandwidth) for b, rate in enumerate(row) if a != b}
    if not rates:
        return {}
    slowest = min(rates, key=lambda link: (rates[link], link))
    return {
        "slowest link": f"{slowest[0]} -> {slowest[1]}",
        "its MB/s": rates[slowest] / 1e6,
        "median MB/s": median(rates.values()) / 1e6,
    }
