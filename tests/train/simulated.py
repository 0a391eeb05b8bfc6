"""A training that is simulated: steps take what a model says, gradients have the norms of a known noise. No clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kfcomm.adapt import Decision, Hyperparameters, Policy, StepMetrics
from kfcomm.adapt.host import PolicyHost
from kfcomm.adapt.meeting import overrule
from kfcomm.adapt.recording import StaticWorld
from kfcomm.strategies import build
from kfcomm.train.gradient_statistics import GradientStatistics, efficiency
from kfcomm.train.pollux import Shape, Throughput
from kfcomm.types import Layout


@dataclass(frozen=True)
class Cluster:
    """Model of a training.

    Attributes:
        throughput: seconds of a step.
        signal: |G|² after so many samples' worth of training.
        noise: tr(Σ) then.
        initial_batch: beside which the worth of samples is counted.
        ranks_of_host: so many ranks share a host.
        jitter: of a step's seconds, as a part.
        spread: of a measured squared norm, as a part.
        pause_s: for which training stands still when the ranks change.
    """

    throughput: Throughput
    signal: Callable[[float], float]
    noise: Callable[[float], float]
    initial_batch: int
    ranks_of_host: int = 4
    jitter: float = 0.05
    spread: float = 0.1
    pause_s: float = 5.0

    def hosts(self, ranks: int) -> int:
        return math.ceil(ranks / self.ranks_of_host)

    def step_s(self, ranks: int, batch: int) -> float:
        return self.throughput.step_s(self.hosts(ranks), ranks, batch / ranks)

    def worth(self, batch: int, progress: float) -> float:
        """Of one sample."""
        statistics = GradientStatistics(self.signal(progress), self.noise(progress) / self.initial_batch)
        return efficiency(statistics, self.initial_batch, batch)

    def static(self, ranks: int, batch: int, seconds: float) -> float:
        """Progress of a training without policies: samples, by their worth."""
        progress, now_s, step_s = 0.0, 0.0, self.step_s(ranks, batch)
        while now_s < seconds:
            progress += batch * self.worth(batch, progress)
            now_s += step_s
        return progress

    def shape(self, ranks: int, batch: int) -> Shape:
        return Shape(self.hosts(ranks), ranks, batch / ranks)


class SimulatedWorld(StaticWorld):
    """Ranks that change to the proposed size from the next step on."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.cluster = cluster
        self.wanted = ranks
        self.become(ranks)
        super().__init__(self.layout, self.strategy)

    def become(self, ranks: int) -> None:
        self.layout = Layout.even(ranks, self.cluster.hosts(ranks))
        self.strategy = build("ring", self.layout)

    async def propose_size(self, size: int) -> None:
        self.wanted = size


async def decide(host: PolicyHost) -> None:
    """Let the policies decide at the end of a step."""
    asking = [runner for runner in host.runners if runner.requests]
    lost = overrule(host, asking)
    for runner in asking:
        await runner.carry_out(lost)
    for runner in host.runners:
        await runner.call("after_step")
        assert not runner.failure, runner.failure
    host.num_steps += 1


class Simulation:
    """A training with policies.

    Attributes:
        progress: samples, by their worth.
        now_s: simulated.
        history: of each step: ranks, batch, learning rate.
    """

    def __init__(
        self, cluster: Cluster, policies: list[Policy], *, ranks: int, given: Hyperparameters, seed: int = 0
    ) -> None:
        self.cluster = cluster
        self.world = SimulatedWorld(cluster, ranks)
        self.host = PolicyHost(self.world, given, policies)
        self.runners = self.host.runners
        self.progress = 0.0
        self.now_s = 0.0
        self.history: list[tuple[int, int, float | None]] = []
        self._chance = Random(seed)

    def run(self, *, seconds: float = math.inf, steps: float = math.inf) -> list[Decision]:
        """Until the time is over, or so many steps are done."""
        asyncio.run(self._run(seconds, steps))
        return self.host.decisions

    async def _run(self, seconds: float, steps: float) -> None:
        host = self.host
        for runner in self.runners:
            await runner.call("on_start")
        while self.now_s < seconds and host.num_steps < steps:
            if self.world.wanted != self.world.size:
                await self._change_ranks()
            host.metrics = self._step()
            await decide(host)
        for runner in self.runners:
            await runner.end()

    async def _change_ranks(self) -> None:
        self.now_s += self.cluster.pause_s
        self.world.become(self.world.wanted)
        for runner in self.runners:
            await runner.begin_anew(runner.state())

    def _step(self) -> StepMetrics:
        host, cluster, chance = self.host, self.cluster, self._chance
        given = host.hyperparameters
        assert given.batch_size is not None
        ranks, batch = self.world.size, given.batch_size
        self.history.append((ranks, batch, given.learning_rate))
        seconds = cluster.step_s(ranks, batch) * math.exp(cluster.jitter * chance.gauss(0, 1))
        signal, noise = cluster.signal(self.progress), cluster.noise(self.progress)
        local = [
            math.sqrt((signal + noise * ranks / batch) * abs(1 + cluster.spread * chance.gauss(0, 1)))
            for _ in range(ranks)
        ]
        norm = math.sqrt((signal + noise / batch) * abs(1 + cluster.spread * chance.gauss(0, 1)))
        self.progress += batch * cluster.worth(batch, self.progress)
        self.now_s += seconds
        each = (seconds,) * ranks
        return StepMetrics(
            step=host.num_steps,
            strategy=self.world.strategy,
            seconds=each,
            busy_s=tuple(0.5 * one for one in each),
            nbytes=(1000,) * ranks,
            counts=(1,) * ranks,
            waited_s=(0.0,) * ranks,
            hyperparameters=given,
            observed={"local_norm": tuple(local), "gradient_norm": (norm,) * ranks},
        )
