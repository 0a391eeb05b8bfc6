"""Both policies on networks whose times the model of costs gives, with noise, without a clock.

What is asked: a host that falls to an eighth is answered within 10 steps; a noisy network that stays as it is, never.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kfcomm.adapt import Adaptation, AutoStrategy, AvoidSlowLinks, Decision, Policy, Reading
from kfcomm.probe import Probe
from kfcomm.strategies import AnyStrategy, names
from kfcomm.strategies.cost import predict_seconds
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import works, world

SIZE = 5
NBYTES = 8 << 20
LAYOUT = Layout.even(SIZE, SIZE)
MBIT = 1e6 / 8
DROPS_AT = 60


@dataclass(frozen=True)
class Network:
    """Rates of the hosts' ports by step, and noise: of a step's time, and of a probe, which never finds more."""

    rates: Callable[[int], list[float]]
    noise: float = 0.05
    seed: int = 0

    def probe(self, step: int, rng: random.Random | None = None) -> Probe:
        ports = self.rates(step)
        # noise slows a link by up to so much
        bandwidth = [[min(a, b) * (1 - (rng.uniform(0, 2 * self.noise) if rng else 0.0)) for b in ports] for a in ports]
        return Probe(LAYOUT, np.full((SIZE, SIZE), 1e-4), np.array(bandwidth))

    def seconds(self, strategy: AnyStrategy, step: int) -> float:
        return predict_seconds(strategy, LAYOUT, NBYTES, self.probe(step).network())

    def best_s(self, step: int) -> float:
        probe = self.probe(step)
        made = [build(name, LAYOUT) for name in names()]
        return min(self.seconds(one, step) for one in [*made, probe.packed_trees()])


class ModelledMeter:
    """Times of the network's model; a step is what lies between two readings."""

    def __init__(self, comm: Communicator, network: Network) -> None:
        self.comm, self.network = comm, network
        self.rng = random.Random(network.seed)  # the same on all ranks
        self.num_reads = 0
        self.took_s: list[float] = []  # without noise
        self.total = Reading.nothing(SIZE)

    @property
    def step(self) -> int:
        return self.num_reads // 2

    def read(self) -> Reading:
        step, is_end = divmod(self.num_reads, 2)
        self.num_reads += 1
        if is_end:
            took_s = self.network.seconds(self.comm.strategy, step)
            self.took_s.append(took_s)
            busy_s = took_s * math.exp(self.rng.gauss(0, self.network.noise))
            self.total = self.total.plus(Reading(0.1 + busy_s, busy_s, NBYTES, 1, (0.0,) * SIZE))
        return self.total


async def adapted(
    make: Callable[..., Policy], network: Network, steps: int, strategy: str = "ring"
) -> tuple[list[Decision], list[float], list[str]]:
    """Decisions, seconds of each step without noise, and the strategy after each."""
    async with world(SIZE, hosts=SIZE, strategy=strategy) as comms:

        async def main(comm: Communicator) -> tuple[list[Decision], list[float], list[str]]:
            meter = ModelledMeter(comm, network)
            probes = random.Random(network.seed + 1)

            async def measure(comm: Communicator) -> Probe:
                return network.probe(meter.step, probes)

            in_force = []
            async with Adaptation(comm, [make(measure)], meter=meter) as adaptation:
                for _ in range(steps):
                    async with adaptation.step():
                        await comm.barrier()
                    in_force.append(comm.strategy.name)
            return adaptation.decisions, meter.took_s, in_force

        outcomes = await asyncio.gather(*map(main, comms))
        await works(comms)
    assert all(one == outcomes[0] for one in outcomes)
    return outcomes[0]


def falls(step: int) -> list[float]:
    """One of five hosts has an eighth of its rate from this step on."""
    return [400 * MBIT] * 3 + [(50 if step >= DROPS_AT else 400) * MBIT] + [400 * MBIT]


def stays(step: int) -> list[float]:
    return [400 * MBIT] * SIZE


POLICIES = [
    pytest.param(lambda measure: AvoidSlowLinks(measure=measure), id="AvoidSlowLinks"),
    pytest.param(lambda measure: AutoStrategy(measure=measure), id="AutoStrategy"),
]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.asyncio
async def test_a_host_that_falls_to_an_eighth_is_answered_within_10_steps(
    make: Callable[..., Policy], seed: int
) -> None:
    network = Network(falls, 0.05, seed)
    _, took_s, _ = await adapted(make, network, 110)
    assert network.seconds(build("ring", LAYOUT), DROPS_AT) > 1.2 * network.best_s(DROPS_AT)
    within = [seconds <= 1.1 * network.best_s(DROPS_AT) for seconds in took_s[DROPS_AT:]]
    assert within.index(True) <= 10
    # Trials of near equals may follow; in the end it is among the best.
    assert all(within[-15:])


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("noise", [0.05, 0.3])
@pytest.mark.asyncio
async def test_noise_changes_nothing(make: Callable[..., Policy], noise: float) -> None:
    _, _, in_force = await adapted(make, Network(stays, noise, 5), 400, "clique")
    settled = in_force[60:]  # after the first trials of AutoStrategy
    assert len(set(settled)) == 1


@pytest.mark.parametrize("at", [3, 6, 8, 10, 13, 17, 22])
@pytest.mark.asyncio
async def test_trials_survive_a_change_in_their_middle(at: int) -> None:
    candidates = ("clique", "ring", "binary_tree", "star")

    def falls_then(step: int) -> list[float]:
        return falls(DROPS_AT if step >= at else 0)

    network = Network(falls_then, 0.03, at)
    _, took_s, _ = await adapted(lambda measure: AutoStrategy(candidates), network, at + 70)
    best_s = min(network.seconds(build(name, LAYOUT), at) for name in candidates)
    assert all(seconds <= 1.1 * best_s for seconds in took_s[-15:])
