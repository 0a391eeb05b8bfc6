"""Announced boundaries: a rank begins the next step without waiting, and nothing wrong reaches a caller meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world

STEPS = 8


@pytest.mark.asyncio
async def test_rank_begins_the_next_step_while_another_has_not_ended_the_last_one() -> None:
    async with world(3, elastic=True, timeout=3600) as comms:
        is_ahead = asyncio.Event()

        async def main(comm: Any) -> list[float]:
            sums = []
            async with Elastic(comm, State(x=np.zeros(1))) as elastic:
                async for step in elastic.steps(ElasticSampler(3 * STEPS, 3)):
                    if step.number == 5 and comm.rank == 0:
                        is_ahead.set()
                    sums.append(float((await comm.all_reduce(np.full(1, step.number), "x"))[0]))
                    if step.number == 4 and comm.rank == 2:
                        await is_ahead.wait()
            return sums

        assert await run_ranks(comms, main) == [[3.0 * number for number in range(STEPS)]] * 3


@pytest.mark.parametrize("kind", ["batch", "position"])
@pytest.mark.asyncio
async def test_ranks_at_unequal_positions_get_no_sum(kind: str) -> None:
    async with world(3, elastic=True, timeout=3600) as comms:
        sums: list[tuple[int, int]] = []

        async def main(comm: Any) -> str:
            sampler = ElasticSampler(60, 3)
            try:
                async with Elastic(comm, State(x=np.zeros(1))) as elastic:
                    async for step in elastic.steps(sampler):
                        await comm.all_reduce(np.ones(1), "x")
                        await comm.all_gather(np.ones(2), "y")
                        sums.append((step.number, comm.rank))
                        if step.number == 4 and comm.rank == 1:
                            if kind == "batch":
                                sampler.batch = 5
                            else:
                                sampler.give_back([7])
            except CollectiveMismatch as error:
                return str(error)
            return "no error"

        texts = await run_ranks(comms, main)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        "the ranks are at different positions: rank 0 begins step 5 with <ElasticSampler: pass 0"
    )
    assert "; rank 1 begins step 5" in texts[0]
    assert {number for number, _ in sums} == set(range(5))


def test_blocking_ranks_at_unequal_positions_get_no_sum() -> None:
    with sync_world(3, elastic=True, timeout=3600) as comms:
        sums: list[int] = []

        def main(comm: Any) -> str:
            sampler = ElasticSampler(60, 3)
            try:
                with Elastic(comm, State(x=np.zeros(1))) as elastic:
                    for step in elastic.steps(sampler):
                        for name in ("x", "y"):
                            comm.all_reduce(np.ones(1), name=name)
                            sums.append(step.number)
                        if step.number == 4 and comm.rank == 1:
                            sampler.batch = 5
            except CollectiveMismatch as error:
                return str(error)
            return "no error"

        texts = run_threads(comms, main)
    assert len(set(texts)) == 1
    assert "rank 1 begins step 5" in texts[0]
    assert set(sums) == set(range(5))


@pytest.mark.asyncio
async def test_fault_of_one_state_ends_the_calls_of_the_next_step() -> None:
    async with world(3, elastic=True, timeout=3600) as comms:
        ended: set[int] = set()

        async def main(comm: Any) -> str:
            state = State(best={})
            try:
                async with Elastic(comm, state) as elastic:
                    async for step in elastic.steps(ElasticSampler(60, 3)):
                        if step.number == 4 and comm.rank == 1:
                            state.best["it"] = object()
                        await comm.barrier("b")
                        ended.add(step.number)
            except ConfigError as error:
                return str(error)
            return "no error"

        texts = await run_ranks(comms, main)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: best['it']")
    assert ended == set(range(5))


@pytest.mark.asyncio
async def test_steps_without_calls_come_to_an_end() -> None:
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> list[int]:
            found: list[int] = []
            async with Elastic(comm, State(x=np.zeros(1))) as elastic:
                async for step in elastic.steps(ElasticSampler(3 * STEPS, 3), passes=2):
                    found += step.indices.tolist()
            return found

        found = await run_ranks(comms, main)
    assert sorted(index for some in found for index in some) == sorted([*range(3 * STEPS)] * 2)


@pytest.mark.asyncio
async def test_samples_of_a_failed_call_are_given_again_a_step_later_on_all_ranks() -> None:
    async with world(3, elastic=True, timeout=3600) as comms:

        async def main(comm: Any) -> list[list[int]]:
            batches = []
            async with Elastic(comm, State(x=np.zeros(1))) as elastic:
                async for step in elastic.steps(ElasticSampler(3 * STEPS, 3, seed=None), used_in="x"):
                    batches.append(step.batch.tolist())
                    handle = comm.all_reduce(np.ones(1), "x")
                    if step.number == 4 and comm.rank == 1:
                        handle.cancel()
                    await asyncio.gather(handle, return_exceptions=True)
            return batches

        found = await run_ranks(comms, main)
    assert found[0] == found[1] == found[2]
    again = [*range(STEPS), 4] if len(found[0]) > STEPS else [*range(STEPS)]  # it may have been over everywhere
    assert found[0] == [[3 * number, 3 * number + 1, 3 * number + 2] for number in again]
