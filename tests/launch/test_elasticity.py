"""Decisions of elastic jobs: who is replaced, where, who leaves, and when a job has failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

import pytest

from kfcomm.errors import ConfigError
from kfcomm.launch.elastic import Elasticity, Stage, parse
from kfcomm.launch.exit_reports import Blame
from kfcomm.launch.launcher import Launcher, LauncherPhase
from kfcomm.launch.local_ranks import LocalRanks
from kfcomm.launch.primary import PrimaryRole, Sizing
from kfcomm.rendezvous.keyvalue import START, Exit, Why

if TYPE_CHECKING:
    from kfcomm.launch.process import Child
    from kfcomm.rendezvous.keyvalue import KeyValue


def of(least: int = 2, most: int = 4, size: int = 3, restarts: int = 10, spares: int = 0, hosts: int = 1) -> Elasticity:
    ranks = [size // hosts + (host < size % hosts) for host in range(hosts)]
    return parse(f"{least}:{most}", ranks, restarts, spares)


def started(job: Elasticity, now_s: float = 0.0) -> list[tuple[int, int]]:
    found = []
    while (one := job.start(now_s)) is not None:
        found.append(one)
    return found


def test_dead_ranks_are_replaced_until_the_program_completes() -> None:
    job = of()
    job.ended(1, -9)
    assert (started(job), job.has_failed, job.next_uid, job.restarts) == ([(3, 0)], False, 4, 9)
    job.ended(0, 0)
    assert job.is_ending
    job.ended(2, 1)
    assert (started(job), job.has_failed) == ([], False)
    job.ended(3, 1)
    assert job.has_failed


def test_restarts_come_to_an_end_and_too_few_is_a_failure() -> None:
    job = of(restarts=1)
    job.ended(0, 1)
    assert started(job) == [(3, 0)]
    job.ended(1, 1)
    assert (started(job), job.has_failed) == ([], False)
    job.ended(2, 1)
    assert job.has_failed


def test_sizes_are_within_bounds_and_who_is_released_is_not_missed() -> None:
    job = of(least=1)
    assert job.resize(9) == []
    assert started(job) == [(3, 0)]
    assert job.size == 4
    assert job.resize(0) == []
    assert (job.size, started(job)) == (1, [])
    for uid in (1, 2, 3):
        assert job.released(uid)
        job.ended(uid, 0)
    assert not job.is_ending
    job.ended(0, 0)
    assert job.is_ending


def test_given_up_rank_counts_as_released() -> None:
    job = of()
    assert job.resize(2) == []
    job.given_up(1)  # halted, and killed when the others have come to the end
    job.ended(0, 0)
    assert job.is_ending
    job.ended(2, 0)
    job.ended(1, -9)
    assert not job.has_failed


def test_waiting_processes_are_dismissed_before_ranks_are_released() -> None:
    job = of(least=1)
    assert job.resize(2, waiting=[2]) == [2]
    assert job.resize(1, waiting=[2]) == []  # it is going already
    assert job.resize(3, waiting=[2]) == []
    assert started(job) == [(3, 0)]  # in the place of the one that goes


def test_released_rank_that_still_runs_does_not_count() -> None:
    job = of(least=1, restarts=1)
    job.resize(2)
    assert job.released(2)
    assert not job.released(2)
    job.resize(3)
    assert started(job) == [(3, 0)]
    job.ended(2, 7)  # its end is none of the job's, whatever the code
    assert (started(job), job.restarts, job.is_ending, job.has_failed) == ([], 1, False, False)
    job.ended(1, -9)
    assert (started(job), job.restarts) == ([(4, 0)], 0)


def test_rank_released_during_growth_is_replaced() -> None:
    job = of(restarts=0)
    job.resize(2)
    job.resize(3)
    assert started(job) == []  # nobody has gone yet
    assert job.released(2)  # the ranks had agreed on it before they heard of the other size
    assert (started(job), job.restarts) == ([(3, 0)], 0)


@pytest.mark.parametrize("is_told_before", [True, False])
def test_a_job_whose_ranks_fail_has_not_come_to_the_end_by_those_that_were_released(is_told_before: bool) -> None:
    job = of(size=4, restarts=0)
    job.resize(2)
    for uid in (2, 3):
        if is_told_before:
            job.released(uid)
        job.ended(uid, 0)
        if not is_told_before:  # where a rank cannot reach its launcher
            job.released(uid)
    job.resize(4)
    assert len(started(job)) == 2
    for uid in (0, 1, 4):
        job.ended(uid, 9)
    assert (job.is_ending, job.has_failed) == (False, True)


def test_rank_that_ends_before_its_replacement_counts_as_ended() -> None:
    job = of(least=1, size=2)
    for uid in (0, 1):
        assert job.replace(uid)
        assert not job.replace(uid)
    job.ended(0, 0)
    assert job.is_ending


def test_restarts_that_are_used_up_leave_a_lack_until_another_size_is_asked_for() -> None:
    job = of(least=1, size=4, restarts=1)
    for uid in (0, 1, 2):
        job.ended(uid, 1)
    assert (started(job), job.owed, job.unreplaced) == ([(4, 0)], 0, 2)
    job.resize(4)
    assert started(job) == [(5, 0), (6, 0)]


def test_proposed_replacement_starts_before_the_rank_leaves() -> None:
    job = of(restarts=1)
    assert job.replace(1)
    assert (started(job), job.going, job.restarts) == ([(3, 0)], {1}, 0)
    assert job.resize(3, waiting=[3]) == []
    job.released(1)
    job.ended(1, 0)
    assert (job.is_ending, job.has_failed, job.owed) == (False, False, 0)
    job.ended(0, 0)
    assert job.is_ending


def test_spares_run_beside_those_that_are_wanted() -> None:
    job = of(least=1, spares=2)
    assert started(job) == [(3, 0), (4, 0)]
    job.ended(0, -9)
    assert (started(job), job.restarts) == ([(5, 0)], 9)
    assert job.resize(2, waiting=[4, 5]) == [5]  # 3 is in the place of 0
    job.ended(5, -15)
    assert job.resize(4, waiting=[4]) == []
    assert started(job) == [(6, 0), (7, 0)]


def test_others_are_started_where_the_fewest_are_and_not_where_they_keep_failing() -> None:
    job = of(most=8, size=4, hosts=2)
    job.ended(0, -9, 100.0)
    assert started(job, 100.0) == [(4, 0)]
    found = []
    for now_s in (101.0, 102.0):  # the host of 4 has few, but they end as soon as they have begun
        job.ended(job.next_uid - 1, 1, now_s)
        found += started(job, now_s)
    assert found == [(5, 0), (6, 1)]
    assert job.next_place_s() == 0.0  # the other is free
    job.places[1].is_gone = True
    job.ended(6, 1, 102.0)
    assert started(job, 102.5) == []
    assert job.next_place_s() == 103.0
    assert started(job, 103.0) == [(7, 0)]
    job.ended(7, 1, 109.0)  # it has lived for long: the host is as good as any
    assert started(job, 109.0) == [(8, 0)]
    job.places[0].is_gone = True
    assert job.next_place_s() is None


def test_a_launcher_that_is_started_again_goes_on_where_the_job_stands() -> None:
    job = of(size=4, most=6, hosts=2)  # 0 and 1, 2 and 3
    starts = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1}
    ended = {one.rank: one for one in (Exit(0, -9), Exit(1, -9), Exit(3, 0), Exit(4, -9))}
    job.goes_on(starts, ended, 5)
    assert (job.running, job.next_uid, job.size, job.owed, job.is_ending) == ({2, 5}, 6, 5, 3, False)
    assert sorted(started(job)) == [(6, 0), (7, 0), (8, 0)]
    job.ended(2, 0)
    assert job.is_ending


@pytest.mark.parametrize("text", ["", "x", "3", "0", "1:", ":4", "2:1", "1:1", "-1:3", "1:999999", "1:2:3"])
def test_bounds_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--elastic"):
        parse(text, [2], 10)


def test_bounds() -> None:
    alone, several = parse("2", [4], 10), parse("2:8", [2, 2], 10, 1)
    assert (alone.least, alone.most, alone.size, alone.restarts, alone.running) == (2, 4, 4, 0, {0, 1, 2, 3})
    assert (several.least, several.most, several.size, several.restarts) == (2, 8, 4, 10)
    assert several.uids_at(1) == [2, 3]
    one = parse("1:4", [1], 10)
    assert (one.least, one.most, one.size, one.running) == (1, 4, 1, {0})


def with_slots(slots: dict[str, int], ranks: list[int]) -> Elasticity:
    made = parse("2:8", ranks, 10, addresses=["a", "b", "c"][: len(ranks)])
    made.slots, made.asked = slots, 8
    return made


def test_as_many_are_wanted_as_there_are_slots_where_launchers_are() -> None:
    made = with_slots({"a": 3, "b": 2, "c": 9}, [1, 1])
    assert made.fit() == []
    assert (made.size, started(made)) == (5, [(2, 0), (3, 1), (4, 0)])
    assert made.resize(3, waiting=[2, 3, 4]) == [4, 3]
    made.slots = {"a": 1, "b": 1, "c": 9}
    assert made.fit() == []
    assert made.size == 2
    made.expect(3, "c")
    assert (made.capacity, [one.address for one in made.places]) == (2, ["a", "b", "", "c"])
    made.places[3].is_gone = False
    made.fit()
    assert (made.capacity, made.size) == (11, 3)


def test_ranks_without_slots_leave_while_enough_stay() -> None:
    made = with_slots({"a": 2, "b": 2}, [2, 2])
    assert (made.vacate(), made.fit(), made.in_stage(Stage.LEAVING)) == ([], [], set())
    made.slots = {"a": 1}
    assert (made.vacate(), made.in_stage(Stage.LEAVING)) == ([], {3, 2})
    made.fit()
    assert (made.size, made.owed) == (2, 0)
    assert (made.vacate(), made.in_stage(Stage.LEAVING)) == ([], {3, 2})  # the other one of "a" is needed
    made.slots = {"a": 1, "c": 2}
    made.expect(2, "c")
    made.places[2].is_gone = False
    made.vacate()
    made.fit()
    assert started(made) == [(4, 2)]
    assert (made.vacate([4]), made.in_stage(Stage.LEAVING)) == ([], {3, 2})  # who waits is not there yet
    assert (made.vacate(), made.in_stage(Stage.LEAVING)) == ([], {3, 2, 1})
    for uid in (1, 2, 3):
        made.released(uid)
        made.ended(uid, 0)
    assert not made.is_ending
    assert not made.has_failed
    made.fit()
    assert started(made) == [(5, 2)]
    made.slots = {"a": 1, "b": 1}
    assert made.vacate([5]) == [5]  # who has not been let in goes first, and at once


def test_a_host_that_comes_back_keeps_what_is_known_of_it() -> None:
    made = parse("1:8", [1, 1], 10, 0, ["a", "b"])
    made.places[0].is_gone = True
    for now_s in (1.0, 2.0):
        made.resize(3)
        ((uid, _),) = [one] if (one := made.start(now_s)) else []
        made.ended(uid, 1, now_s)
    made.places[1].is_gone = True
    made.expect(2, "b")
    assert made.next_place_s() is None
    made.places[2].is_gone = False
    made.resize(3)
    assert (made.start(2.5), made.next_place_s()) == (None, 3.0)
    assert made.start(3.0) == (4, 2)


class SlowStore:
    """A store that takes its time to keep who is to be started."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.reported: list[Exit] = []

    async def claim(self, key: str, value: bytes) -> bytes:
        if key.startswith(START):
            await self.is_open.wait()
        return value

    async def report_exit(self, end: Exit) -> None:
        self.reported.append(end)

    async def collect(self, folder: str, count: int, *, timeout_s: float) -> dict[str, bytes]:
        del folder, count, timeout_s
        return {}


@contextlib.asynccontextmanager
async def primary(size: int, store: SlowStore, started: list[int]) -> AsyncIterator[PrimaryRole]:
    """Role of the launcher of the first host, without processes."""
    launcher = Launcher(LocalRanks(1.0), Blame(size))
    launcher.role = role = PrimaryRole(launcher, Sizing(launcher, of(size=size)), lost_after_s=30.0)
    launcher.start = lambda uid: cast("Child", started.append(uid))
    launcher.say = print
    role.store = role.sizing.store = cast("KeyValue", store)
    async with asyncio.TaskGroup() as launcher.tasks:
        yield role
    launcher.ranks.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [Exit(1, -9), Exit(1, 1, Why.ELSEWHERE)], ids=["killed", "it has heard of that"])
async def test_a_rank_that_was_given_up_may_end_after_the_others_have_come_to_the_end(end: Exit) -> None:
    async with primary(4, SlowStore(), []) as role:
        role.rank_given_up(1)
        for uid, code in ((3, -9), (2, -9), (0, 0)):
            role.launcher.note(Exit(uid, code))
        role.sizing.give_up_starting()
    role.launcher.note(end)
    assert role.elastic.has_failed
    assert role.launcher.outcome.is_open


@pytest.mark.asyncio
@pytest.mark.parametrize("has_failed", [False, True])
async def test_ranks_that_are_stopped_when_others_are_at_the_end_are_told_of(
    has_failed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with primary(4, SlowStore(), []) as role:
        role.launcher.ranks.silent = {1, 2}
        role.launcher.note(Exit(0, 0))
        role.launcher.note(Exit(3, 7 if has_failed else 0))
        await role.fail_if_nobody_goes_on()
    assert "ranks 1-2 are stopped or stuck" in capsys.readouterr().out
    assert role.launcher.outcome.exit_code == (7 if has_failed else 0)


@pytest.mark.asyncio
async def test_a_rank_that_failed_counts_although_the_others_have_come_to_the_end_before_its_process_has() -> None:
    for least, is_enough in ((1, True), (2, False)):
        async with primary(2, SlowStore(), []) as role:
            role.elastic.least = least
            role.rank_given_up(1)
            role.launcher.note(Exit(0, 0))
            role.launcher.note(Exit(1, 3))
        failed = role.launcher.outcome.failed
        assert failed is None if is_enough else failed is not None and failed.code == 3


@pytest.mark.asyncio
async def test_dismissed_process_is_not_started() -> None:
    store, started = SlowStore(), list[int]()
    async with primary(2, store, started) as role:
        assert role.elastic.resize(4) == []
        assert role.sizing.start_owed() == 2
        role.sizing.dismiss(role.elastic.resize(2, waiting=[2, 3]))
        store.is_open.set()
    assert started == []
    assert sorted(end.rank for end in store.reported) == [2, 3]
    assert role.elastic.running == {0, 1}
    assert role.elastic.resize(3) == []
    assert role.elastic.start() == (4, 0)  # the host has not failed


@pytest.mark.asyncio
async def test_stopped_launcher_starts_no_ranks_after_a_late_store_answer() -> None:
    store, started = SlowStore(), list[int]()
    async with primary(2, store, started) as role:
        role.elastic.resize(3)
        assert role.sizing.start_owed() == 1
        role.launcher.phase = LauncherPhase.STOPPED
        store.is_open.set()
    assert started == []
    assert [(end.rank, end.code) for end in store.reported] == [(2, 126)]
    role.elastic.resize(4)
    assert role.sizing.start_owed() == 0
