"""Worlds in virtual time: one seed is one run, faults happen as planned, and stuck ranks are reported."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.errors import CollectiveTimeout, Partitioned, PeerLost
from kfcomm.testing import (
    Delay,
    Join,
    Kill,
    LostStore,
    Partition,
    Release,
    Resize,
    SlowLink,
    Stop,
    Stuck,
    VirtualRun,
    random_events,
    run_in_virtual_time,
    search_in_virtual_time,
)  # fmt: skip
from kfcomm.testing.virtual.network import VirtualLoop
from tests.search import virtual

LENGTH = 240


async def sums(comm: Any) -> list[float]:
    """Ten sums, a tenth of a second apart."""
    found = []
    for step in range(10):
        found.append(float((await comm.all_reduce(np.ones(3), f"sum/{step}"))[0]))
        await asyncio.sleep(0.1)
    return found


async def training(comm: Any, pause_s: float = 0.01) -> tuple[list[float], tuple[int, ...]]:
    """Counts how often each sample is used, on whatever ranks there are."""
    elastic_comm = ElasticCommunicator(comm)
    state = State(used=np.zeros(LENGTH))
    async with Elastic(elastic_comm, state) as elastic:
        async for step in elastic.steps(ElasticSampler(LENGTH, 12, seed=1), used_in="used"):
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            state.used += await elastic_comm.all_reduce(mask, "used")
            await asyncio.sleep(pause_s)
    return state.used.tolist(), elastic_comm.births


async def slow_training(comm: Any) -> tuple[list[float], tuple[int, ...]]:
    """The same, for seconds."""
    return await training(comm, 0.2)


async def ones(comm: Any) -> float:
    """One sum."""
    return float((await comm.all_reduce(np.ones(3), "sum"))[0])


def test_minutes_take_no_time() -> None:
    async def main(comm: Any) -> None:
        await asyncio.sleep(300 * (1 + comm.rank))
        await comm.barrier("end")

    assert run_in_virtual_time(main, 2, timeout=1e5).time_s == pytest.approx(600, abs=1)


def test_without_events_all_is_as_in_a_world_in_memory() -> None:
    run = run_in_virtual_time(sums, 3)
    assert run.results == dict.fromkeys(range(3), [3.0] * 10)
    assert (run.killed, run.failed, run.events, run.unheard) == (frozenset(), {}, (), ())


def test_a_seed_is_one_run() -> None:
    events = [Kill(2, 0.25), Delay(1, 0.1, 0.5, 0.01)]
    runs = [run_in_virtual_time(sums, 3, seed=seed, events=events) for seed in (1, 1, 2)]
    assert runs[0].digest == runs[1].digest != runs[2].digest
    assert runs[0].time_s == runs[1].time_s


def test_a_seed_is_the_same_run_in_every_process() -> None:
    program = "import sys; from tests.search import virtual;print([virtual.run(seed).digest for seed in range(6)])"
    found = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": "."},
            capture_output=True, text=True, check=True,
        ).stdout
        for hash_seed in (1, 2)
    }  # fmt: skip
    assert len(found) == 1


def test_killed_rank_is_lost_to_the_others() -> None:
    run = run_in_virtual_time(sums, 3, events=[Kill(1, 0.25)])
    assert run.killed == {1}
    assert run.results.keys() == {0, 2}
    assert all(isinstance(error, PeerLost) and error.rank == 1 for error in run.failed.values())
    assert run.time_s < 1


def test_ended_rank_cannot_be_killed() -> None:
    run = run_in_virtual_time(ones, 2, events=[Kill(1, 5.0), Kill(7, 0.0)])
    assert (run.results, run.killed) == ({0: 2.0, 1: 2.0}, frozenset())


@pytest.mark.parametrize(
    "event", [Stop(1, 0.25, 0.7), Partition(((1,),), 0.25, 0.7), Delay(1, 0.2, 0.1, 0.7), SlowLink(0, 1, 0.2, 0.1, 0.7)]
)
def test_stop_shorter_than_lost_after_delays_all_ranks(event: Any) -> None:
    run = run_in_virtual_time(sums, 3, events=[event], lost_after_s=1.0)
    assert run.failed == {}
    assert run.time_s > 1.6


def test_a_slow_link_slows_no_other_link() -> None:
    run = run_in_virtual_time(ones, 2, events=[SlowLink(1, 2, 0.0, 9.0, 5.0)])
    assert run.time_s < 0.1


def test_a_long_stop_ends_it_for_both_sides() -> None:
    run = run_in_virtual_time(sums, 3, events=[Stop(1, 0.25, 5.0)], lost_after_s=1.0)
    assert run.failed.keys() == {0, 1, 2}
    assert all(isinstance(error, PeerLost) and error.rank == 1 for error in run.failed.values())
    assert run.time_s > 5


def test_each_side_of_a_long_partition_loses_the_others() -> None:
    run = run_in_virtual_time(sums, 5, events=[Partition(((0, 1), (3,)), 0.25, 5.0)], lost_after_s=1.0)
    sides = {0: 0, 1: 0, 3: 1, 2: 2, 4: 2}
    assert run.failed.keys() == sides.keys()
    for rank, error in run.failed.items():
        assert isinstance(error, PeerLost)
        assert sides[error.rank] != sides[rank]


def test_training_goes_on_without_the_dead_and_with_the_new() -> None:
    run = run_in_virtual_time(training, 3, events=[Kill(1, 0.05), Join(3, 0.07), Join(4, 1e4)])
    assert run.results.keys() == {0, 2, 3}
    assert run.results[0] == run.results[2] == run.results[3] == ([1.0] * LENGTH, (0, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("second_s", [0.045, 0.06, 0.1, 0.2])
def test_whom_lost_ranks_were_to_let_in_comes_although_the_second_died_amid_a_change(
    second_s: float,
) -> None:
    events = [Join(3, 0.0), LostStore(0.02, 3.0), Kill(1, 0.04), Kill(0, second_s)]
    for seed in range(20):
        run = run_in_virtual_time(training, 3, seed=seed, events=events)
        assert not run.failed
        assert run.results[2][1] in ((2,), (2, 3))


def test_another_size_can_be_asked_for() -> None:
    run = run_in_virtual_time(training, 4, events=[Resize(2, 0.05)])
    assert run.results[0] == run.results[1] == ([1.0] * LENGTH, (0, 1))


def test_a_rank_can_be_asked_to_go_for_another() -> None:
    run = run_in_virtual_time(training, 3, events=[Release(0, 0.02), Join(3, 0.02)])
    assert run.results[1] == run.results[2] == run.results[3] == ([1.0] * LENGTH, (1, 2, 3))


def test_training_needs_no_store_and_hears_what_was_asked_for_when_it_is_back() -> None:
    events = [LostStore(0.0, 0.05), LostStore(0.02, 0.5), Resize(2, 0.1), Join(3, 0.1)]
    run = run_in_virtual_time(slow_training, 3, events=events)
    assert run.results[0] == run.results[1] == ([1.0] * LENGTH, (0, 1))
    assert run.failed == {}
    assert run.results.keys() == {0, 1, 2}


def test_of_two_halves_the_one_that_has_the_stores_word_goes_on() -> None:
    cut = Partition(((0, 1),), 0.05, 9.0)
    run = run_in_virtual_time(training, 4, events=[cut])
    going = [rank for rank in range(4) if rank not in run.failed]
    assert going in ([0, 1], [2, 3])
    assert all(run.results[rank] == ([1.0] * LENGTH, tuple(going)) for rank in going)
    assert all(isinstance(error, Partitioned) for error in run.failed.values())
    run = run_in_virtual_time(training, 4, events=[cut, LostStore(0.0, 9.0)])
    assert run.failed.keys() == {0, 1, 2, 3}


def test_endless_wait_raises_stuck() -> None:
    async def alone(comm: Any) -> None:
        if comm.rank == 0:
            await asyncio.get_running_loop().create_future()

    async def late(comm: Any) -> None:
        await asyncio.sleep(1e6 if comm.rank else 0)

    with pytest.raises(Stuck, match=r"ranks \[0\] have not come to their end"):
        run_in_virtual_time(alone, 2, within_s=60)
    with pytest.raises(Stuck, match=r"ranks \[1\] have not come to their end"):
        run_in_virtual_time(late, 2, within_s=60)


def test_idle_world_raises_stuck() -> None:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck, match="all ranks wait"), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(never())


@pytest.mark.asyncio
async def test_it_has_a_loop_of_its_own() -> None:
    with pytest.raises(RuntimeError, match="an event loop of its own"):
        run_in_virtual_time(ones, 2)


def test_errors_never_retrieved_are_reported() -> None:
    async def main(comm: Any) -> None:
        asyncio.get_running_loop().call_soon(lambda: comm.rank // 0)
        await asyncio.sleep(1)

    (said,) = run_in_virtual_time(main, 1).unheard
    assert "ZeroDivisionError" in said


def test_thread_work_is_executed_at_once() -> None:
    def fails() -> None:
        raise OSError("disk full")

    async def main(comm: Any) -> int:
        with pytest.raises(OSError, match="disk full"):
            await asyncio.to_thread(fails)
        return await asyncio.to_thread(lambda: comm.rank)

    assert run_in_virtual_time(main, 2).results == {0: 0, 1: 1}


def test_a_search_leaves_out_what_does_not_matter_and_says_how_to_run_it_again() -> None:
    def plan(_: Random, __: int) -> list[Any]:
        return [Delay(0, 0.0, 1.0, 0.01), Kill(2, 0.351234), Stop(0, 0.1, 0.1)]

    def check(run: VirtualRun) -> None:
        assert run.killed != {2} or run.time_s < 0.3, "it was late"

    with pytest.raises(AssertionError, match="it was late") as raised:
        search_in_virtual_time(sums, 3, check, seeds=[7], plan=plan)
    again = str(raised.value).splitlines()[-1]
    assert again == "run_in_virtual_time(main, 3, seed=7, events=[Kill(rank=2, at_s=0.4)])"
    assert search_in_virtual_time(sums, 3, check, seeds=range(3), plan=lambda *_: []) == 3


def test_one_rank_is_left_alone() -> None:
    kinds = set()
    for seed in range(300):
        size = 1 + seed % 5
        events = random_events(Random(seed), size, elastic=seed % 2 == 0)
        kinds |= {type(one) for one in events}
        assert len({one.rank for one in events if isinstance(one, (Kill, Stop)) and one.rank < size}) < size
        assert all(len(set().union(*one.sides)) < size for one in events if isinstance(one, Partition))
    assert kinds == {Delay, Join, Kill, LostStore, Partition, Release, Resize, SlowLink, Stop}


def test_joined_rank_does_not_ask_again() -> None:
    """Joined ranks continue alone: the first of them sees no waiting process."""
    events = [Join(2, 0.0), Join(3, 0.0), Kill(0, 0.12), Kill(1, 0.12)]
    run = run_in_virtual_time(training, 2, events=events)
    assert run.results[2] == run.results[3]
    assert run.results[2][1] == (2, 3)


def test_death_while_leaving_delays_no_rank() -> None:
    """Its goodbye is heard, and it answers no question; or it is not, and it is lost."""

    async def main(comm: Any) -> None:
        if not comm.rank:
            await comm.barrier()

    texts = set()
    for seed in range(20):
        run = run_in_virtual_time(main, 2, seed=seed, events=[Kill(1, 1e-4)], latency_s=(0.01, 0.02))
        assert run.killed == {1}
        assert run.time_s < 0.1
        assert isinstance(run.failed[0], PeerLost)
        texts.add(str(run.failed[0]).partition(": ")[2])
    assert texts == {"rank 1 is lost: killed", "rank 1 has left (it closed its communicator)"}


def test_timeouts_are_virtual() -> None:
    async def main(comm: Any) -> None:
        if comm.rank:
            await asyncio.sleep(500)
        await comm.all_reduce(np.ones(3), "sum", timeout=100)

    run = run_in_virtual_time(main, 2)
    assert isinstance(run.failed[0], CollectiveTimeout)
    assert "within 100.0 s" in str(run.failed[0])
    assert run.time_s == pytest.approx(500, abs=1)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_programs_end_well_whatever_happens(first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(first, first + 20):
        virtual.search(seed)


def test_search_is_reproducible(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(5):
        assert virtual.run(seed).digest == virtual.run(seed).digest


def test_the_search_prints_the_seed_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def fails(seed: int, kind: str | None = None) -> None:
        if (seed, kind) == (9, None):
            raise AssertionError("a wrong sum")

    monkeypatch.setattr(virtual, "search", fails)
    assert virtual.main(["--worlds", "2", "--seed", "7"]) == 0
    with pytest.raises(AssertionError, match="a wrong sum"):
        virtual.main(["--worlds", "3", "--seed", "7"])
    assert capsys.readouterr().out == "2 worlds from seed 7 on\nseed 9 fails\n"
