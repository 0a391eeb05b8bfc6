"""Equal results of training with losses and joins: up to rounding, and bit for bit with the same plan."""

from __future__ import annotations

import logging
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.errors import EpochChanged
from kfcomm.testing import Join, Kill, Resize, VirtualRun, run_in_virtual_time

LENGTH, BATCH, WIDTH, RATE = 240, 24, 5, 0.1
DATA = np.random.RandomState(7).standard_normal((LENGTH, WIDTH))
TARGETS = DATA @ np.arange(1.0, 1 + WIDTH) + 0.1 * np.random.RandomState(8).standard_normal(LENGTH)


class Trained(NamedTuple):
    """Result of training on a rank.

    Attributes:
        weights: at the end, as bytes.
        loss: over all samples, with these.
        births: uids of the ranks at the end.
        num_void: steps that were run again, since a rank was lost during them.
    """

    weights: bytes
    loss: float
    births: tuple[int, ...]
    num_void: int


async def train(comm: Any) -> Trained:
    """Least squares by gradient descent, in batches of one size whatever the number of ranks."""
    elastic_comm, num_void = ElasticCommunicator(comm), 0
    state = State(weights=np.zeros(WIDTH))
    async with Elastic(elastic_comm, state, on_loss="restart_step") as elastic:
        async for step in elastic.steps(ElasticSampler(LENGTH, BATCH, seed=3), passes=4):
            with step:
                num_void += 1
                mine = DATA[step.indices]
                gradient = mine.T @ (mine @ state.weights - TARGETS[step.indices])
                state.weights -= RATE / len(step.batch) * await elastic_comm.all_reduce(gradient, "gradient")
                num_void -= 1
    loss = float(np.mean((DATA @ state.weights - TARGETS) ** 2))
    return Trained(state.weights.tobytes(), loss, elastic_comm.births, num_void)


def trained(run: VirtualRun) -> Trained:
    """Results of all ranks that were there at the end."""
    births = next(iter(run.results.values())).births
    found = {run.results[birth][:3] for birth in births}
    assert len(found) == 1
    return run.results[births[0]]


def run(seed: int, *events: Any) -> VirtualRun:
    return run_in_virtual_time(train, 4, seed=seed, events=events, strategy="binary_tree", timeout=30.0)


def plan_of(seed: int) -> list[Any]:
    """Two of four die while they train, one or two come, and a size is asked for."""
    random = Random(seed)
    events: list[Any] = [Kill(rank, random.uniform(0.005, 0.06)) for rank in random.sample(range(4), 2)]
    events += [Join(rank, random.uniform(0, 0.05)) for rank in range(4, random.choice([5, 6]))]
    return [*events, Resize(random.choice([3, 4, 5]), random.uniform(0, 0.05))]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_with_the_same_plan_all_bits_are_the_same() -> None:
    for seed in range(4):
        first, second = run(seed, *plan_of(seed)), run(seed, *plan_of(seed))
        assert first == second


def test_with_kills_and_without_training_comes_to_the_same_to_rounding() -> None:
    plain = trained(run(0))
    assert plain.loss < 0.1
    num_void = num_changed = 0
    for seed in range(20):
        found = trained(run(seed, *plan_of(seed)))
        num_void += found.num_void
        num_changed += found.births != plain.births
        weights, expected = (np.frombuffer(one.weights) for one in (found, plain))
        np.testing.assert_allclose(weights, expected, rtol=1e-12)
        assert found.loss == pytest.approx(plain.loss, rel=1e-12)
    assert num_void > 3
    assert num_changed > 14


def test_a_loss_is_heard_in_the_midst_of_a_step() -> None:
    """Losses for which the steps above run again."""

    async def one(comm: Any) -> Any:
        elastic_comm = ElasticCommunicator(comm)
        async with Elastic(elastic_comm, State(), on_loss="raise") as elastic:
            async for _ in elastic.steps(ElasticSampler(8, 8)):
                if comm.rank:
                    await elastic_comm.all_reduce(np.ones(2), "x")
                else:
                    await elastic_comm.all_reduce(np.ones(2), "another")

    found = run_in_virtual_time(one, 2, events=[Kill(1, 0.1)])
    assert isinstance(found.failed[0], EpochChanged)
