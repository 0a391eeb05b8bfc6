"""Calls that do not survive a loss, first in a step that a rank has begun ahead of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.testing import run_ranks, run_threads, sync_world, world

STEPS = 6
CALLS: dict[str, Callable[[Any, int], Any]] = {
    "set_strategy": lambda comm, number: comm.set_strategy(("ring", "star")[number % 2]),
    "group": lambda comm, number: comm.group(range(comm.size), f"all {number}"),
    "send": lambda comm, number: comm.send(np.ones(3), 1 - comm.rank) if comm.rank else comm.recv(1),
    "request": lambda comm, number: comm.request("blob", 1 - comm.rank),
    "split": lambda comm, number: comm.split(0),
}


def kept(comm: Any, total: Any) -> Any:
    """Rank 0 keeps the very result in its state, so it waits for the boundary; the other one goes ahead."""
    return total if comm.rank == 0 else total.copy()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.asyncio
async def test_call_meets_a_rank_that_waits_for_the_boundary(call: str) -> None:
    async def main(comm: Any) -> float:
        comm.save("blob", np.ones(2))
        state = State(total=np.zeros(3))
        async with Elastic(comm, state) as elastic:
            async for step in elastic.steps(ElasticSampler(2 * STEPS, 2)):
                if step.number:
                    await CALLS[call](comm, step.number)
                state.total = kept(comm, await comm.all_reduce(state.total + 1, name="x", op="avg"))
        return float(state.total[0])

    async with world(2, elastic=True, timeout=20) as comms:
        assert await run_ranks(list(comms), main) == [STEPS, STEPS]


@pytest.mark.parametrize("call", CALLS)
def test_blocking_call_meets_it_too(call: str) -> None:
    def main(comm: Any) -> float:
        comm.save("blob", np.ones(2))
        state = State(total=np.zeros(3))
        with Elastic(comm, state) as elastic:
            for step in elastic.steps(ElasticSampler(2 * STEPS, 2)):
                if step.number:
                    CALLS[call](comm, step.number)
                state.total = kept(comm, comm.all_reduce(state.total + 1, name="x", op="avg"))
        return float(state.total[0])

    with sync_world(2, elastic=True, timeout=20) as comms:
        assert run_threads(list(comms), main) == [STEPS, STEPS]


@pytest.mark.asyncio
async def test_call_of_a_group_meets_a_rank_that_waits_for_the_boundary() -> None:
    async def main(comm: Any) -> float:
        group = await comm.group(range(2), "pair")
        state = State(total=np.zeros(3))
        async with Elastic(comm, state) as elastic:
            async for step in elastic.steps(ElasticSampler(2 * STEPS, 2)):
                if step.number:
                    await group.all_reduce(np.ones(1), "y")
                state.total = kept(comm, await comm.all_reduce(state.total + 1, name="x", op="avg"))
        await group.close()
        return float(state.total[0])

    async with world(2, elastic=True, timeout=20) as comms:
        assert await run_ranks(list(comms), main) == [STEPS, STEPS]


def test_blocking_call_of_a_group_meets_it_too() -> None:
    def main(comm: Any) -> float:
        group, persistent = comm.group(range(2), "pair"), comm.all_reduce_init(np.ones(1), "z")
        state = State(total=np.zeros(3))
        with Elastic(comm, state) as elastic:
            for step in elastic.steps(ElasticSampler(2 * STEPS, 2)):
                if step.number % 2:
                    group.all_reduce(np.ones(1), "y")
                elif step.number:
                    persistent.start()
                    persistent.wait()
                state.total = kept(comm, comm.all_reduce(state.total + 1, name="x", op="avg"))
        group.close()
        return float(state.total[0])

    with sync_world(2, elastic=True, timeout=20) as comms:
        assert run_threads(list(comms), main) == [STEPS, STEPS]
