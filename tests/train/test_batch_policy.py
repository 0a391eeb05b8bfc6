"""The batch by the noise scale: stale norms, intervals, learning rates, other policies beside it. Seeds, no clock."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Decision, Hyperparameters, Policy, StepMetrics
from kfcomm.adapt.host import PolicyHost
from kfcomm.adapt.recording import StaticWorld
from kfcomm.errors import ConfigError
from kfcomm.strategies import build
from kfcomm.train import GradientMonitor
from kfcomm.train.gradient_statistics import gain
from kfcomm.train.policies import AdaScaleRate, GradientNoise, NoiseScaleBatch
from kfcomm.types import Layout
from tests.train.noises import Gradients
from tests.train.simulated import decide
from tests.train.test_monitor_state import comm_of


@dataclass
class Job:
    """Ranks with monitors, whose measurements policies get through the metrics of each step.

    Attributes:
        truth: of the gradients at a step.
        observe: what a rank observes of its monitor.
        history: batch and learning rate of each step.
    """

    policies: Sequence[Policy]
    given: Hyperparameters
    truth: Callable[[int], Gradients] = lambda _: Gradients(10.0, 1000.0)
    ranks: int = 4
    every: int = 1
    seed: int = 0
    observe: Callable[[GradientMonitor], dict[str, float]] = GradientMonitor.observed
    history: list[tuple[int, float | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = Layout.even(self.ranks)
        self.host = PolicyHost(StaticWorld(layout, build("star", layout)), self.given, self.policies)
        self.monitors = [GradientMonitor(comm_of(one, self.ranks), 1, every=self.every) for one in range(self.ranks)]
        self.random = np.random.default_rng(self.seed)

    def run(self, steps: int) -> list[Decision]:
        asyncio.run(self._run(steps))
        return self.host.decisions

    async def _run(self, steps: int) -> None:
        host = self.host
        if not host.num_steps:
            for runner in host.runners:
                await runner.call("on_start")
        for _ in range(steps):
            given = host.hyperparameters
            self.history.append((given.batch_size or 0, given.learning_rate))
            host.metrics = self._metrics(given)
            await decide(host)

    def _metrics(self, given: Hyperparameters) -> StepMetrics:
        size, truth = self.ranks, self.truth(self.host.num_steps)
        local, both = (float(one) for one in truth.draw(self.random, given.batch_size or 0, size, ()))
        for monitor in self.monitors:
            monitor.batch = (given.batch_size or 0) / size
        rows = [monitor.tell(local) for monitor in self.monitors]
        for monitor in self.monitors:
            if monitor.learn(rows):
                monitor.keep_share(both / size)
        seen = [self.observe(monitor) for monitor in self.monitors]
        names = {name for one in seen for name in one}
        each = (1.0,) * size
        return StepMetrics(
            self.host.num_steps, self.host.comm.strategy, each, each, (1,) * size, (1,) * size, each, given,
            {name: tuple(one.get(name) for one in seen) for name in names},
        )  # fmt: skip

    @property
    def batches(self) -> list[int]:
        return [batch for batch, _ in self.history]


def values_of(monitor: GradientMonitor) -> dict[str, float]:
    return monitor.values


class Grows(Policy):
    """Sets another batch after a step."""

    def __init__(self, step: int, batch: int) -> None:
        self._step, self._batch = step, batch

    def after_step(self, ctx: Any) -> None:
        if ctx.step == self._step:
            ctx.set_batch_size(self._batch)


class Looks(Policy):
    """Estimates the noise scale as policies do."""

    def on_start(self, ctx: Any) -> None:
        self.noise = GradientNoise()

    def after_step(self, ctx: Any) -> None:
        self.noise.update(ctx.metrics)


# ---------------------------------------------------------------- measurements


@pytest.mark.parametrize("observe", [GradientMonitor.observed, values_of])
@pytest.mark.parametrize("every", [1, 10])
def test_the_truth_is_reported_after_the_batch_grew_eightfold(
    every: int, observe: Callable[[GradientMonitor], dict[str, float]]
) -> None:
    """Also where a program observes the latest values in each step: a measurement counts once."""
    looks = Looks()
    job = Job([Grows(60 * every, 128), looks], Hyperparameters(batch_size=16), every=every, observe=observe)
    job.run(200 * every)
    assert looks.noise.num_updates == pytest.approx(200, abs=1)
    assert looks.noise.scale == pytest.approx(100, rel=0.1)
    assert looks.noise.scale == pytest.approx(job.monitors[0].noise_scale.value, rel=1e-9)


@pytest.mark.parametrize("every", [1, 25])
@pytest.mark.parametrize("seed", range(3))
def test_the_batch_becomes_64_where_64_is_right(every: int, seed: int) -> None:
    job = Job([NoiseScaleBatch(4096)], Hyperparameters(batch_size=8, learning_rate=0.1), every=every, seed=seed)
    job.run(150 * every)
    assert set(job.batches) <= {8, 16, 32, 64}
    assert job.batches[-1] == 64


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_within_the_factor_is_left_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = 8 * int(random.integers(9, 20))  # 72 to 152: the noise scale is 100
    job = Job([NoiseScaleBatch(4096, least=4)], Hyperparameters(batch_size=batch), ranks=8, seed=seed)
    assert job.run(500) == []


@pytest.mark.parametrize("seed", range(4))
def test_the_batch_is_within_the_factor_of_random_truths(seed: int) -> None:
    """Other noise scales, ranks, first batches and cadences; the truth grows and falls on the way."""
    random = np.random.default_rng(100 + seed)
    first = float(random.uniform(30, 3000))
    then = float(random.uniform(30, 3000))
    ranks = int(random.integers(2, 9))
    policy = NoiseScaleBatch(1 << 14, least=ranks, stride=float(random.choice([2, 4, 16])))
    job = Job(
        [policy], Hyperparameters(batch_size=ranks * int(random.integers(1, 200))), ranks=ranks, seed=seed,
        truth=lambda step: Gradients(1.0, first if step < 800 else then, dimension=400),
        every=int(random.integers(1, 4)),
    )  # fmt: skip
    for truth in (first, then):
        decisions = job.run(800 if truth is first else 1600)
        assert truth / 2.4 <= job.batches[-1] <= truth * 2.4
    assert all(one.evidence["interval"][0] <= one.evidence["noise_scale"] for one in decisions)


def test_a_nan_that_a_rank_observes_spoils_one_measurement_only() -> None:
    looks = Looks()

    def observe(monitor: GradientMonitor) -> dict[str, float]:
        found = monitor.observed()
        if found.get("measurement") == 10 and monitor.comm.rank == 1:
            found["local_norm"] = math.nan
        return found

    job = Job([looks], Hyperparameters(batch_size=16), observe=observe)
    job.run(100)
    assert looks.noise.num_updates == 98
    assert looks.noise.scale == pytest.approx(100, rel=0.2)


# ---------------------------------------------------------------- the learning rate


@pytest.mark.parametrize("rate", ["auto", "adascale", "sqrt", "linear"])
def test_the_learning_rate_moves_with_the_batch(rate: str) -> None:
    policy = NoiseScaleBatch(4096, rate=rate)
    job = Job([policy], Hyperparameters(batch_size=8, learning_rate=0.1))
    decisions = job.run(250)
    wanted = {"sqrt": 8**0.5, "linear": 8.0}.get(rate, gain(1000 / 8, 10.0, 8.0))
    assert job.history[-1] == (64, pytest.approx(0.1 * wanted, rel=0.2))
    assert {one.policy for one in decisions} == {"NoiseScaleBatch"}
    rates = dict(job.history)
    assert list(rates) == sorted(rates)
    assert list(rates.values()) == sorted(rates.values())
    if rate in ("sqrt", "linear"):
        assert len(set(job.history)) == len(rates), "batch and rate change in the same step"


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [("Adam", 8**0.5), ("AdamW", 8**0.5), ("RMSprop", 8**0.5), ("SGD", None), (None, None), ("Momentum", None)],
)
def test_the_optimizer_chooses_the_rule(optimizer: str | None, wanted: float | None) -> None:
    policy = NoiseScaleBatch(4096)
    policy.optimizer = optimizer
    job = Job([policy], Hyperparameters(batch_size=8, learning_rate=0.1))
    job.run(200)
    assert job.history[-1][1] == pytest.approx(0.1 * (wanted or gain(1000 / 8, 10.0, 8.0)), rel=0.2)


def test_a_rate_that_stays_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(UserWarning, match="learn more slowly"):
        policy = NoiseScaleBatch(4096, rate=None)
    job = Job([policy], Hyperparameters(batch_size=8, learning_rate=0.1))
    job.run(200)
    assert job.history[-1] == (64, 0.1)
    with caplog.at_level(logging.WARNING, "kfcomm.adapt"):
        Job([NoiseScaleBatch(4096)], Hyperparameters(batch_size=8)).run(1)
    assert "follows no learning rate" in caplog.text
    with pytest.raises(ConfigError, match="rate is one of auto, adascale, sqrt, linear"):
        NoiseScaleBatch(8, rate="cubic")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("seed", range(2))
def test_adascale_beside_it_asks_for_the_same(order: int, seed: int) -> None:
    policies = [NoiseScaleBatch(4096), AdaScaleRate()][::order]
    job = Job(policies, Hyperparameters(batch_size=8, learning_rate=0.1), seed=seed)
    decisions = job.run(400)
    assert job.history[-1] == (64, pytest.approx(0.1 * gain(1000 / 8, 10.0, 8.0), rel=0.2))
    late = [one for one in decisions if one.step > 200]
    assert len(late) <= 4, "they do not undo each other's rates"


def test_a_schedule_beside_it_keeps_its_factor() -> None:
    """A policy halves the rate on the way: batches that change later multiply the halved one."""

    class Halves(Policy):
        def after_step(self, ctx: Any) -> None:
            if ctx.step == 110:
                ctx.set_learning_rate(ctx.hyperparameters.learning_rate / 2)

    job = Job(
        [NoiseScaleBatch(4096, rate="linear", rest=80, stride=2.0), Halves()],
        Hyperparameters(batch_size=8, learning_rate=0.1),
    )
    job.run(105)
    before = job.history[-1]
    job.run(400)
    assert before[0] < 64
    assert job.history[-1] == (64, pytest.approx(0.05 * 8))


def test_state_is_handed_over_amid_changes() -> None:
    given = Hyperparameters(batch_size=8, learning_rate=0.1)
    job = Job([NoiseScaleBatch(4096, stride=2.0, rest=30)], given)
    job.run(60)
    known = json.loads(json.dumps(job.host.runners[0].policy.state_dict()))
    fresh = Job([NoiseScaleBatch(4096, stride=2.0, rest=30)], given)
    fresh.host.hyperparameters = job.host.hyperparameters
    asyncio.run(fresh.host.runners[0].begin_anew([False, known, ""]))
    fresh.host.num_steps, fresh.monitors, fresh.random = job.host.num_steps, job.monitors, job.random
    assert json.loads(json.dumps(fresh.policies[0].state_dict())) == known
    fresh.run(150)
    assert fresh.history[-1] == (64, pytest.approx(0.1 * gain(1000 / 8, 10.0, 8.0), rel=0.2))


def test_bounds_are_reached() -> None:
    job = Job([NoiseScaleBatch(48)], Hyperparameters(batch_size=32), truth=lambda _: Gradients(1.0, 1000.0))
    job.run(100)
    assert job.batches[-1] == 48, "less than the factor away, and the most"


@pytest.mark.parametrize(
    ("bad", "says"),
    [({"stride": 1.5}, "stride is at least the factor"), ({"z": 0.0}, "z is above 0"), ({"factor": 1.0}, "above 1")],
)
def test_arguments_out_of_range(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        NoiseScaleBatch(8, **bad)
