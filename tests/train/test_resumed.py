"""Algorithms in checkpoints: another number of ranks continues as if the ranks had changed between two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.testing import run_ranks, world
from kfcomm.train import Algorithm, GradientMonitor, SynchronousSGD
from tests.train.reference import KINDS, RATE, Members, gradient, new_state

FIRST, ALL = 7, 15


async def train(comm: Any, state: State, path: Path, end: int) -> State:
    """Train up to a step; the log tells which run has made each step."""
    async with Elastic(comm, state, checkpoint=path, checkpoint_every=1) as elastic:
        async for _ in elastic.steps(ElasticSampler(1 << 12, 1), passes=1):
            number = len(state.log)
            if number == end:
                break
            pending = state.way.parameters(state.model)
            along = await state.way.gradients(gradient(state.model, number, comm.rank))
            state.model = await pending - RATE * along
            state.log = [*state.log, end]
    return state


@pytest.mark.parametrize("sizes", [(3, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_other_ranks_resume_from_a_checkpoint(kind: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    algorithm, reference = KINDS[kind]
    run = reference(range(sizes[0]))
    for size, end in zip(sizes, (FIRST, ALL), strict=True):
        async with world(size, elastic=True, timeout=60) as comms:
            states = await run_ranks(
                comms,
                lambda comm: train(comm, new_state(comm, algorithm), tmp_path / "run.npz", end),  # noqa: B023
            )
    num_first = states[0].log.count(FIRST)
    assert 0 < num_first < len(states[0].log) == ALL
    for number in range(ALL):
        ranks = tuple(range(sizes[number >= num_first]))
        if number == num_first:
            run.change(ranks)
        run.step(Members(ranks, ranks), number)
    for rank, state in enumerate(states):
        np.testing.assert_allclose(state.model, run.models[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.asyncio
async def test_monitor_of_an_algorithm_is_resumed(tmp_path: Path) -> None:
    async def main(comm: Any, end: int) -> Any:
        monitor = GradientMonitor(comm, 8)
        state = new_state(comm, Algorithm("ssgd"))
        state.way = SynchronousSGD(comm, monitor=monitor)
        await train(comm, state, tmp_path / "run.npz", end)
        return monitor.noise_scale.num_updates, monitor.noise_scale.value, state.model

    async def run(size: int, end: int) -> list[Any]:
        async with world(size, elastic=True, timeout=60) as comms:
            return await run_ranks(comms, lambda comm: main(comm, end))

    first = await run(3, FIRST)
    for found in (first, await run(3, ALL)):
        assert found[0][1] is None or found[0][1] > 0
        assert all((one[0], one[1]) == (found[0][0], found[0][1]) for one in found)
    assert found[0][0] > first[0][0] > 2


@pytest.mark.asyncio
async def test_scalars_and_halves_are_resumed(tmp_path: Path) -> None:
    async def main(comm: Any, end: int) -> Any:
        model = {"scale": np.array(1.0), "w": (np.ones(3, np.float16), [np.ones((0, 2), np.float32)])}
        way = Algorithm("diloco", every=2).made(comm, model)
        state = State(way=way, log=[])
        async with Elastic(comm, state, checkpoint=tmp_path / "run.npz", checkpoint_every=1) as elastic:
            async for _ in elastic.steps(ElasticSampler(1 << 12, 1), passes=1):
                if len(state.log) == end:
                    break
                await state.way.parameters({"scale": np.array(0.5), "w": (np.zeros(3, np.float16), model["w"][1])})
                state.log = [*state.log, 0]
        return way.state_dict()

    for end in (5, 8):
        async with world(2, elastic=True, timeout=60) as comms:
            found, other = await run_ranks(comms, lambda comm: main(comm, end))  # noqa: B023
        assert found["num_steps"] == other["num_steps"] == end
        assert float(found["model"]["scale"]) == float(other["model"]["scale"]) != 1.0
        assert found["model"]["w"][0].dtype == np.float16
        assert found["model"]["w"][1][0].shape == (0, 2)
