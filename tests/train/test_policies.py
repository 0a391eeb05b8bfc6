"""Policies on simulated trainings whose noise and times are known: no clock, seeds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Adaptation, Hyperparameters, MarginalUtility, Policy, replay
from kfcomm.errors import ConfigError
from kfcomm.train.policies import AdaScaleRate, NoiseScaleBatch, PolluxGoodput, SwitchAgreement, WireByNoise
from kfcomm.train.pollux import Throughput
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import world
from tests.train.simulated import Cluster, Simulation

pytestmark = pytest.mark.slow

TIMES = Throughput(0.121, 0.00568, 0.236, 0.0118, 0.117, 0.0195, 1.78)
"""Those of adaptdl's tests."""
SIGNAL, VARIANCE, INITIAL = 0.00136, 0.000502, 128
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
LOCAL = (8, 16, 20, 24, 32, 48, 64, 96, 128, 256)


def cluster(growth: float = 0.0, **options: Any) -> Cluster:
    """A noise scale of 47 samples, which grows with what was trained."""

    def signal(progress: float) -> float:
        return SIGNAL / (1 + growth * progress / 1e5)

    return Cluster(TIMES, signal, lambda progress: VARIANCE * INITIAL, INITIAL, **options)


# ---------------------------------------------------------------- Pollux


@pytest.mark.parametrize(("growth", "seed"), [(1.0, 1), (20.0, 2)])
def test_pollux_comes_within_5_percent_of_the_best_static_choice_in_hindsight(growth: float, seed: int) -> None:
    """From the first step on, with all its attempts, and 5 s for each change of the ranks."""
    given, seconds = cluster(growth), 1000.0
    best = max(given.static(ranks, ranks * local, seconds) for ranks in SIZES for local in LOCAL)
    worst = given.static(1, 256, seconds)
    policy = PolluxGoodput(256, least_local=8, sizes=(1, 16))
    run = Simulation(given, [policy], ranks=4, given=Hyperparameters(batch_size=INITIAL), seed=seed)
    decisions = run.run(seconds=seconds)
    assert run.progress >= 0.95 * best
    assert best > 2 * worst  # there is something to choose
    assert all(
        {"goodput", "predicted", "noise_scale"} <= one.evidence.keys() for one in decisions if "asks" in one.what
    )
    assert all(1 <= ranks <= 16 and batch / ranks <= 256 for ranks, batch, _ in run.history)


def test_pollux_takes_fewer_ranks_where_each_has_to_be_worth_it() -> None:
    def ranks(least_utility: float) -> int:
        policy = PolluxGoodput(256, least_local=8, sizes=(1, 16), least_utility=least_utility)
        run = Simulation(cluster(1.0), [policy], ranks=4, given=Hyperparameters(batch_size=INITIAL))
        run.run(seconds=600)
        return run.history[-1][0]

    assert ranks(0.9) < ranks(0.0)


def test_pollux_makes_a_batch_smaller_before_ranks_go_that_hold_it() -> None:
    """If the network takes a hundred times as long as computing, one rank is best."""
    slow = Throughput(0.01, 0.001, 50.0, 0.0, 5.0, 0.0, 1.0)
    given = Cluster(slow, lambda progress: SIGNAL, lambda progress: VARIANCE * INITIAL, INITIAL)
    policy = PolluxGoodput(32, sizes=(1, 4))
    run = Simulation(given, [policy], ranks=4, given=Hyperparameters(batch_size=INITIAL))
    run.run(steps=100)
    assert run.history[-1][0] == 1
    assert all(batch / ranks <= 32 for ranks, batch, _ in run.history)


def test_pollux_leaves_the_ranks_alone_if_it_may_not_choose() -> None:
    run = Simulation(cluster(), [PolluxGoodput(256)], ranks=4, given=Hyperparameters(batch_size=INITIAL))
    run.run(seconds=200)
    assert {ranks for ranks, _, _ in run.history} == {4}
    assert run.history[-1][1] in range(64, 120)  # 80 to 96 are best


# ---------------------------------------------------------------- the noise scale


def test_the_batch_follows_the_noise_scale() -> None:
    policy = NoiseScaleBatch(4096, multiple=4, warmup=50, rest=50)
    run = Simulation(cluster(20.0), [policy], ranks=4, given=Hyperparameters(batch_size=64))
    decisions = run.run(steps=1500)
    batches = [batch for _, batch, _ in run.history]
    assert batches[:51] == [64] * 51
    assert batches == sorted(batches)
    changes = sorted({*batches})
    assert len(changes) > 3
    assert all(after <= 2 * before for before, after in zip(changes, changes[1:], strict=False))
    assert all(batch % 16 == 0 and batch <= 4096 for batch in batches)
    steps = [one.step for one in decisions]
    assert all(after - before >= 50 for before, after in zip(steps, steps[1:], strict=False))
    assert all(one.evidence["noise_scale"] > 1.8 * 64 for one in decisions)


@pytest.mark.parametrize(
    ("batch", "size", "fits"), [(100.0, 4, 96), (1.0, 4, 32), (1e9, 4, 992), (47.9, 3, 48), (1.0, 3, 48)]
)
def test_a_batch_that_fits(batch: float, size: int, fits: int) -> None:
    policy = NoiseScaleBatch(1000, least=32, multiple=8)
    policy._least = 32
    assert policy.fitting(batch, size) == fits


def test_adascale_multiplies_the_rate_by_the_gain() -> None:
    """Noise scale 47: a batch of 512 where 128 is the schedule's has the gain (σ² + μ²) / (σ²/4 + μ²)."""

    class Grows(Policy):
        def after_step(self, ctx: Any) -> None:
            if ctx.step == 100:
                ctx.set_batch_size(512)

    rate = AdaScaleRate()
    given = Hyperparameters(batch_size=128, learning_rate=0.1)
    run = Simulation(cluster(), [Grows(), rate], ranks=4, given=given)
    decisions = run.run(steps=400)
    gain = (VARIANCE + SIGNAL) / (VARIANCE / 4 + SIGNAL)
    assert run.history[50][2] == 0.1
    assert run.history[-1][2] == pytest.approx(0.1 * gain, rel=0.06)
    assert rate.progress == pytest.approx(100 + 300 * gain, rel=0.05)
    assert [one.policy for one in decisions] == ["Grows", "AdaScaleRate"]
    assert decisions[1].evidence["gain"] == pytest.approx(gain, rel=0.06)


def test_adascale_asks_the_schedule_at_the_progress() -> None:
    rate = AdaScaleRate(lambda progress: 0.1 if progress >= 200 else 1.0)
    given = Hyperparameters(batch_size=128, learning_rate=0.1)
    run = Simulation(cluster(), [rate], ranks=4, given=given)
    run.run(steps=300)
    assert [rate for _, _, rate in run.history] == [0.1] * 201 + [0.01] * 99


def test_the_agreement_changes_once_when_the_noise_says_so() -> None:
    given = Hyperparameters(batch_size=256, agreements=("ssgd", "sma"))
    run = Simulation(cluster(20.0), [SwitchAgreement()], ranks=4, given=given)
    decisions = run.run(steps=1500)
    assert [one.what for one in decisions] == ["agreement ssgd -> sma", "agreement sma -> ssgd"]
    assert 256 < decisions[1].evidence["noise_scale"] < 400
    late = Simulation(cluster(), [SwitchAgreement(at_step=30)], ranks=4, given=given)
    assert [one.step for one in late.run(steps=100)] == [0, 31]


def test_the_wire_dtype_by_noise() -> None:
    """n u² (μ² + σ²) is far below a hundredth of σ² unless the batch, or the number of ranks, is huge."""
    given = Hyperparameters(batch_size=256, wire_dtypes=("bfloat16", "float16"))
    run = Simulation(cluster(), [WireByNoise(("bfloat16", "float16"))], ranks=4, given=given)
    decisions = run.run(steps=200)
    assert [one.what for one in decisions] == ["wire dtype None -> bfloat16"]
    large = Hyperparameters(batch_size=1 << 20, wire_dtypes=("bfloat16", "float16"))
    run = Simulation(cluster(spread=1e-6), [WireByNoise(("bfloat16", "float16"))], ranks=4, given=large)
    assert [one.what for one in run.run(steps=200)] == ["wire dtype None -> float16"]
    exact = Hyperparameters(batch_size=1 << 28, wire_dtypes=("bfloat16", "float16"))
    run = Simulation(cluster(spread=1e-9), [WireByNoise(("bfloat16", "float16"))], ranks=4, given=exact)
    assert run.run(steps=200) == []


# ---------------------------------------------------------------- the number of workers


def test_workers_are_added_while_each_brings_enough() -> None:
    """Between hosts a worker costs more than it brings: 4 of one host are kept, and tried again after a rest."""
    slow = Throughput(0.05, 0.005, 2.0, 0.1, 0.01, 0.001, 1.0)
    given = Cluster(slow, lambda progress: SIGNAL, lambda progress: VARIANCE, INITIAL, jitter=0.01)
    run = Simulation(given, [MarginalUtility(8, rest=100)], ranks=1, given=Hyperparameters(batch_size=480))
    decisions = run.run(steps=200)
    asked = [one.what for one in decisions]
    assert asked[:5] == [
        "asks for 2 ranks instead of 1",
        "asks for 3 ranks instead of 2",
        "asks for 4 ranks instead of 3",
        "asks for 5 ranks instead of 4",
        "asks for 4 ranks instead of 5",
    ]
    assert asked[5:] == asked[3:5]
    assert decisions[4].evidence["each_new_one_brings"] < 0.1
    assert decisions[1].evidence["each_new_one_brings"] > 0.5


def test_workers_up_to_the_most() -> None:
    fast = Throughput(0.0, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0)
    given = Cluster(fast, lambda progress: SIGNAL, lambda progress: VARIANCE, INITIAL)
    run = Simulation(given, [MarginalUtility(4, rest=None)], ranks=1, given=Hyperparameters(batch_size=480))
    run.run(steps=200)
    assert run.history[-1][0] == 4


# ---------------------------------------------------------------- all of them


MAKES: list[tuple[Callable[[], Policy], Hyperparameters]] = [
    (lambda: NoiseScaleBatch(256, warmup=5, rest=5), Hyperparameters(batch_size=8)),
    (lambda: AdaScaleRate(warmup=5), Hyperparameters(batch_size=8, learning_rate=0.1)),
    (lambda: SwitchAgreement(warmup=5, patience=2), Hyperparameters(batch_size=8, agreements=("sma", "ssgd"))),
    (lambda: WireByNoise(warmup=5), Hyperparameters(batch_size=8, wire_dtypes=("bfloat16",))),
    (lambda: PolluxGoodput(64, rest=5), Hyperparameters(batch_size=8)),
    (lambda: MarginalUtility(2, steps=3), Hyperparameters(batch_size=8)),
]


@pytest.mark.parametrize(("make", "given"), MAKES)
@pytest.mark.asyncio
async def test_in_a_world_and_replayed(make: Callable[[], Policy], given: Hyperparameters, tmp_path: Path) -> None:
    """Gradients of a quadratic, with real norms: the ranks decide alike, and a replay decides the same."""
    path = tmp_path / "run.jsonl"
    async with world(2) as comms:

        async def main(comm: Communicator) -> Any:
            chance = np.random.default_rng(comm.rank)
            async with Adaptation(comm, [make()], hyperparameters=given, record=path) as adaptation:
                for step in range(60):
                    async with adaptation.step():
                        local = chance.normal(0.1, 1.0, (adaptation.local_batch_size or 1, 50)).mean(axis=0)
                        mean = await comm.all_reduce(local / (1 + step / 10), "g", op="avg")
                        norms = {"local_norm": np.linalg.norm(local), "gradient_norm": np.linalg.norm(mean)}
                        adaptation.observe(**norms)
            return adaptation.decisions, adaptation.policies

        (decisions, policies), other = await asyncio.gather(*map(main, comms))
    assert other[0] == decisions
    assert len(policies) == 1 or "cannot change" in decisions[-1].what
    assert await asyncio.to_thread(replay, make(), path) == decisions


@pytest.mark.parametrize("number", range(len(MAKES)))
def test_policy_state_is_handed_over(number: int) -> None:
    """Two that go different ways after the same steps, one of them with what the other knew, decide the same."""
    make, given = MAKES[number]
    started = Simulation(cluster(5.0), [make()], ranks=2, given=given)
    if isinstance(started.runners[0].policy, (PolluxGoodput, MarginalUtility)):
        given = Hyperparameters(batch_size=8)
    started.run(steps=40)
    policy, known = make(), json.loads(json.dumps(started.runners[0].policy.state_dict()))
    fresh = Simulation(cluster(5.0), [policy], ranks=2, given=given)
    asyncio.run(fresh.runners[0].begin_anew([False, known, ""]))
    assert fresh.runners[0].failure == ""
    assert json.loads(json.dumps(policy.state_dict())) == known


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NoiseScaleBatch(0), "batches are from 1 on"),
        (lambda: NoiseScaleBatch(8, least=9), "not 9 to 8"),
        (lambda: NoiseScaleBatch(8, multiple=0), "at least 1, not 0, 10 and 10"),
        (lambda: NoiseScaleBatch(8, factor=1.0), "factor is above 1"),
        (lambda: AdaScaleRate(tolerance=1.0), "tolerance is between 0 and 1"),
        (lambda: SwitchAgreement(ratio=0.0), "ratio is above 0"),
        (lambda: SwitchAgreement(at_step=-1), "at_step is at least 0"),
        (lambda: WireByNoise(("int8",)), "wire dtypes are some of bfloat16, float16, not"),
        (lambda: WireByNoise("bfloat16"), "wire dtypes are some of"),
        (lambda: WireByNoise(part=1.0), "part is between 0 and 1"),
        (lambda: PolluxGoodput(0), "not 1 to 0"),
        (lambda: PolluxGoodput(8, sizes=(3, 2)), "sizes are a least and a most"),
        (lambda: PolluxGoodput(8, rest=1), "rest is at least 2"),
        (lambda: MarginalUtility(0), "sizes are from 1 on"),
        (lambda: MarginalUtility(4, threshold=1.0), "threshold between 0 and 1"),
    ],
)
def test_arguments_that_cannot_work(make: Callable[[], Policy], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
