"""Worlds that a test directs: the same program on tasks, threads and processes, and faults by plan."""

from __future__ import annotations

import os
from typing import Any

import pytest

import kfcomm
from kfcomm.testing import Fault, FaultPlan, Killed
from kfcomm.testing.directed import awaited_world, blocking_world

SIZE = 2
IN_PROCESSES = pytest.mark.parametrize("processes", [False, True], ids=["memory", "processes"])


async def scaled(comm: kfcomm.Communicator, factor: int) -> tuple[int, int]:
    return int(await comm.all_reduce(factor * comm.rank, name="x")), os.getpid()


def scaled_blocking(comm: kfcomm.sync.Communicator, factor: int) -> tuple[int, int]:
    return int(comm.all_reduce(factor * comm.rank, name="x")), os.getpid()


async def rounds(comm: kfcomm.Communicator, count: int) -> int:
    for number in range(count):
        await comm.barrier(f"round {number}")
    return count


def rounds_blocking(comm: kfcomm.sync.Communicator, count: int) -> int:
    for number in range(count):
        comm.barrier(f"round {number}")
    return count


async def wrong_on_one(comm: kfcomm.Communicator) -> None:
    if comm.rank == 1:
        raise LookupError("no such weights")


async def not_to_be_sent(comm: kfcomm.Communicator) -> Any:
    return lambda: comm


def refused(comm: kfcomm.sync.Communicator) -> None:
    comm.all_reduce(1, op="median")


def pids(results: list[tuple[int, int]], processes: bool) -> None:
    assert [total for total, _ in results] == [2] * SIZE
    assert len({os.getpid(), *(pid for _, pid in results)}) == (1 + SIZE if processes else 1)


@pytest.mark.asyncio
@IN_PROCESSES
async def test_a_coroutine_runs_on_every_rank(processes: bool) -> None:
    async with awaited_world(SIZE, processes=processes) as world:
        assert len(world) == SIZE
        for _ in range(2):
            pids(await world.run(scaled, 2), processes)


@IN_PROCESSES
def test_a_function_runs_on_every_rank(processes: bool) -> None:
    with blocking_world(SIZE, processes=processes) as world:
        for _ in range(2):
            pids(world.run(scaled_blocking, 2), processes)


@pytest.mark.asyncio
@IN_PROCESSES
async def test_a_rank_dies_before_the_call_that_the_plan_names(processes: bool) -> None:
    plan = FaultPlan(Fault(1, 2 if processes else "round 2"))
    async with awaited_world(SIZE, processes=processes, faults=plan) as world:
        first, second = await world.outcomes(rounds, 4)
        assert isinstance(second, Killed)
        assert isinstance(first, kfcomm.PeerLost)
        assert (first.rank, first.key) == (1, "round 2")


@IN_PROCESSES
def test_the_blocking_interface_has_faults_too(processes: bool) -> None:
    with blocking_world(2, processes=processes, faults=FaultPlan(Fault(1, 1))) as world:
        first, second = world.outcomes(rounds_blocking, 3)
        assert isinstance(first, kfcomm.PeerLost)
        assert isinstance(second, Killed)


@pytest.mark.asyncio
async def test_call_outside_a_fault_plan_succeeds() -> None:
    plan = FaultPlan(Fault(0, "never"), Fault(1, 77))
    async with awaited_world(2, faults=plan) as world:
        assert await world.run(rounds, 3) == [3, 3]


@pytest.mark.asyncio
async def test_links_that_are_unplugged_are_opened_again() -> None:
    async with awaited_world(2, faults=FaultPlan(Fault(0, 3, "unplug"))) as world:
        await world.outcomes(rounds, 5)
        assert await world.run(rounds, 1) == [1, 1]


@pytest.mark.asyncio
async def test_a_process_that_is_halted_by_plan_is_missed_and_ended() -> None:
    async with awaited_world(2, processes=True, faults=FaultPlan(Fault(1, 0, "stop")), lost_after=2.0) as world:
        world._processes.begin(rounds, (1,))
        error = await world._processes.soon(0)
        assert isinstance(error, kfcomm.CollectiveError)


@pytest.mark.asyncio
async def test_a_test_may_kill_by_itself() -> None:
    async with awaited_world(2, processes=True) as world:
        await world.run(rounds, 1)
        world.kill(1)
        first, second = await world.outcomes(rounds, 1)
        assert isinstance(first, kfcomm.PeerLost)
        assert isinstance(second, Killed)


@pytest.mark.asyncio
@IN_PROCESSES
async def test_the_error_of_a_rank_is_raised_as_it_is(processes: bool) -> None:
    async with awaited_world(2, processes=processes) as world:
        outcomes = await world.outcomes(wrong_on_one)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], LookupError)
        if processes:
            assert "no such weights" in outcomes[1].__notes__[0]
            assert outcomes[1].__notes__[-1] == "on rank 1"


def test_the_error_of_all_ranks_is_one() -> None:
    with blocking_world(2, processes=True) as world, pytest.raises(kfcomm.ConfigError, match="median"):
        world.run(refused)


@pytest.mark.asyncio
async def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    async with awaited_world(1, processes=True) as world:
        with pytest.raises(TypeError, match="cannot be sent to the test"):
            await world.run(not_to_be_sent)


@pytest.mark.parametrize(
    ("fault", "processes", "said"),
    [
        (Fault(2, 0), False, "the world has 2 ranks"),
        (Fault(-1, 0), True, "the world has 2 ranks"),
        (Fault(0, 0, "stop"), False, "can kill or unplug a rank, not stop it"),
        (Fault(0, 0, "unplug"), True, "can kill or stop a rank, not unplug it"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(fault: Fault, processes: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said), blocking_world(2, processes=processes, faults=FaultPlan(fault)):
        pass


@IN_PROCESSES
def test_options_that_cannot_work_are_refused_with_their_own_error(processes: bool) -> None:
    with pytest.raises(kfcomm.ConfigError, match="rign"), blocking_world(2, processes=processes, strategy="rign"):
        pass
