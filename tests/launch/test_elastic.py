"""Elastic jobs: who is replaced, when a job has failed, and what is asked from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
from click.testing import CliRunner

from kfcomm.cli import main
from kfcomm.errors import ConfigError
from kfcomm.launch import requests
from kfcomm.launch.elastic import Elasticity, parse
from kfcomm.launch.exit_reports import Blame
from kfcomm.launch.launcher import Launcher, Phase
from kfcomm.launch.local_ranks import LocalRanks
from kfcomm.launch.primary import PrimaryRole, Sizing
from kfcomm.rendezvous.keyvalue import START, Exit
from tests.launch.jobs import TRAIN
from tests.launch.launched import environ

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kfcomm.launch.process import Child
    from kfcomm.rendezvous.keyvalue import KeyValue

pytestmark = pytest.mark.slow

resizing: Any = import_module("kfcomm.cli.commands.resize")


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
    assert (started(job), job.has_failed, job.next_birth, job.restarts) == ([(3, 0)], False, 4, 9)
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
    for birth in (1, 2, 3):
        assert job.released(birth)
        job.ended(birth, 0)
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
    for birth in (2, 3):
        if is_told_before:
            job.released(birth)
        job.ended(birth, 0)
        if not is_told_before:  # where a rank cannot reach its launcher
            job.released(birth)
    job.resize(4)
    assert len(started(job)) == 2
    for birth in (0, 1, 4):
        job.ended(birth, 9)
    assert (job.is_ending, job.has_failed) == (False, True)


def test_rank_that_ends_before_its_replacement_counts_as_ended() -> None:
    job = of(least=1, size=2)
    for birth in (0, 1):
        assert job.replace(birth)
        assert not job.replace(birth)
    job.ended(0, 0)
    assert job.is_ending


def test_restarts_that_are_used_up_leave_a_lack_until_another_size_is_asked_for() -> None:
    job = of(least=1, size=4, restarts=1)
    for birth in (0, 1, 2):
        job.ended(birth, 1)
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
        job.ended(job.next_birth - 1, 1, now_s)
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
    assert (job.running, job.next_birth, job.size, job.owed, job.is_ending) == ({2, 5}, 6, 5, 3, False)
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
    assert several.births_at(1) == [2, 3]
    with pytest.raises(ConfigError, match="two ranks or more"):
        parse("1:4", [1], 10)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "kfcomm", "run", *arguments]
    return subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("spares", [0, 1])
def test_a_rank_is_replaced_by_one_that_is_started_or_waits(tmp_path: Path, spares: int) -> None:
    more = ("--spares", "1") if spares else ()
    program = (sys.executable, "train.py", "900", "[[1, 80]]", "0.03", "5")
    done = run(tmp_path, "-n", "3", "--elastic", "2:3", *more, *program)
    assert done.returncode == 0, done.stdout + done.stderr
    used, births, most = json.loads(re.sub(r"^\[\d+\] ", "", done.stdout.strip().splitlines()[-1]))
    assert used == [1.0]
    assert (births, most) == ([0, 2, 3], 3)
    assert "rank 1 is to be replaced; 1 started in its place" in done.stderr


def test_a_job_outlives_those_that_began(tmp_path: Path) -> None:
    victims = json.dumps([[0, 5, 3], [1, 15, 3], [2, 30, 3]])
    options = ("-n", "3", "--elastic", "2:3", "--log-dir", str(tmp_path / "logs"))
    done = run(tmp_path, *options, sys.executable, "train.py", "9000", victims, "0.03")
    assert done.returncode == 0, done.stdout + done.stderr
    result = re.sub(r"^\[\d+\] ", "", done.stdout.strip().splitlines()[-1])
    used, births, _ = json.loads(result)
    assert used == [1.0]
    assert not set(births) & {0, 1, 2}
    assert done.stderr.count("started in its place") == 3
    assert (tmp_path / "logs" / f"rank-{births[0]}.log").read_text().splitlines()[-1] == result


def test_a_job_fails_when_too_few_are_left(tmp_path: Path) -> None:
    victims = json.dumps([[0, 3], [1, 6]])
    done = run(tmp_path, "-n", "3", "--elastic", "2", sys.executable, "train.py", "900", victims, "0.02")
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    assert "failed first: SIGKILL" in done.stderr


def test_a_job_ends_when_nobody_is_left_to_let_others_in(tmp_path: Path) -> None:
    victims = json.dumps([[0, 3], [1, 3]])
    done = run(tmp_path, "-n", "2", "--elastic", "1:2", sys.executable, "train.py", "900", victims, "0.02")
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    assert "failed first: SIGKILL" in done.stderr


BACK = """
import os, signal, sys
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

FULL, HOW, FAILS = int(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["fails"]
state = State(sizes=[])
with kfcomm.sync.init(elastic=True, timeout=30) as comm, Elastic(comm, state) as elastic:
    for step in elastic.steps(ElasticSampler(10**6, batch=4)):
        comm.all_reduce(np.ones(2), name="x")
        if state.sizes[-1:] != [comm.size]:
            state.sizes = [*state.sizes, comm.size]
            if comm.rank == 0 and comm.size == FULL and len(state.sizes) == 1:
                comm.propose_size(2)
            if comm.rank == 0 and comm.size == 2 and len(state.sizes) == 2:
                comm.propose_size(FULL)
        elif comm.size == FULL and len(state.sizes) > 1:
            break
    is_released = elastic.is_released
    if comm.rank == 0 and not is_released:
        print("sizes", state.sizes, flush=True)
if is_released:
    if HOW == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while not os.path.exists("back"):
        pass
    sys.exit(int(HOW))
open("back", "w").close()
os._exit(9 if FAILS else 0)
"""


@pytest.mark.parametrize("how", ["0", "7", "stops"])
def test_slow_end_of_a_released_rank_blocks_no_joining_rank(tmp_path: Path, how: str) -> None:
    (tmp_path / "back.py").write_text(BACK)
    options = ("-n", "3", "--elastic", "2:3", "--lost-after", "2")
    done = run(tmp_path, *options, sys.executable, "back.py", "3", how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sizes [3, 2, 3]" in done.stdout
    assert ("rank 2, which was released, ended (exit code 7)" in done.stderr) == (how == "7")


def test_a_job_whose_ranks_fail_after_others_were_released_has_failed(tmp_path: Path) -> None:
    (tmp_path / "back.py").write_text(BACK)
    options = ("-n", "4", "--elastic", "2:4", "--restart-limit", "0")
    done = run(tmp_path, *options, sys.executable, "back.py", "4", "0", "fails")
    assert done.returncode == 9, done.stdout + done.stderr


RIVALS = """
import os, signal, sys
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

state = State(used=np.zeros(200))
with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, state) as elastic:
    for step in elastic.steps(ElasticSampler(200, 10), used_in="used"):
        if (step.number, comm.epoch) == (5, 0) and comm.rank < int(sys.argv[1]):
            os.kill(os.getpid(), signal.Signals[sys.argv[2]] if comm.rank == 0 else signal.SIGSTOP)
        mask = np.zeros(200)
        mask[step.indices] = 1
        state.used += comm.all_reduce(mask, name="used")
    print(sorted(set(state.used.tolist())), comm.births[0])
"""


EARLY = """
import os, signal, sys
import kfcomm

rank = -1 if "KFCOMM_JOIN" in os.environ else int(os.environ["KFCOMM_RANK"])
if rank == 0:
    sys.exit(3)
if rank == 1 and sys.argv[1] == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
kfcomm.sync.init(elastic=True)
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [("raises", "no rank is left to let others in"), ("stops", "sign of life for 2 s: rank 1 is stopped or stuck")],
)
def test_failure_while_joining_is_the_cause(tmp_path: Path, how: str, told: str) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    options = ("-n", "2", "--elastic", "1:2", "--lost-after", "2", "--grace", "1")
    done = run(tmp_path, *options, sys.executable, "early.py", how)
    assert done.returncode == 3, done.stdout + done.stderr
    assert told in done.stderr
    assert re.search("rank 0 .*failed first: exit code 3", done.stderr), done.stderr


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
    launcher.start = lambda birth: cast("Child", started.append(birth))
    launcher.say = print
    role.store = role.sizing.store = cast("KeyValue", store)
    async with asyncio.TaskGroup() as launcher.tasks:
        yield role
    launcher.ranks.close()


@pytest.mark.asyncio
async def test_a_rank_that_was_given_up_may_end_after_the_others_have_come_to_the_end() -> None:
    async with primary(4, SlowStore(), []) as role:
        role.rank_given_up(1)
        for birth, code in ((3, -9), (2, -9), (0, 0)):
            role.launcher.note(Exit(birth, code))
        role.sizing.give_up_starting()
    role.launcher.note(Exit(1, -9))
    assert role.elastic.has_failed
    assert role.launcher.verdict.is_open


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
    assert role.launcher.verdict.exit_code == (7 if has_failed else 0)


@pytest.mark.asyncio
async def test_a_rank_that_failed_counts_although_the_others_have_come_to_the_end_before_its_process_has() -> None:
    for least, is_enough in ((1, True), (2, False)):
        async with primary(2, SlowStore(), []) as role:
            role.elastic.least = least
            role.rank_given_up(1)
            role.launcher.note(Exit(0, 0))
            role.launcher.note(Exit(1, 3))
        failed = role.launcher.verdict.failed
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
        role.launcher.phase = Phase.STOPPED
        store.is_open.set()
    assert started == []
    assert [(end.rank, end.code) for end in store.reported] == [(2, 126)]
    role.elastic.resize(4)
    assert role.sizing.start_owed() == 0


@pytest.mark.parametrize(("size", "num_gone"), [(3, 2), (4, 3)])
def test_few_go_on_when_some_have_ended_and_the_others_are_stopped(tmp_path: Path, size: int, num_gone: int) -> None:
    (tmp_path / "rivals.py").write_text(RIVALS)
    options = ("-n", str(size), "--elastic", f"2:{size}", "--lost-after", "5", "--grace", "1")
    done = run(tmp_path, *options, sys.executable, "rivals.py", str(num_gone), "SIGKILL")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"[1.0] {size - 1}" in done.stdout


@pytest.mark.parametrize("bounds", ["2", "2:4"])
def test_a_job_ends_when_those_that_are_left_are_stopped(tmp_path: Path, bounds: str) -> None:
    (tmp_path / "rivals.py").write_text(RIVALS)
    options = ("-n", "3", "--elastic", bounds, "--lost-after", "2", "--grace", "1")
    done = run(tmp_path, *options, sys.executable, "rivals.py", "2", "SIGSTOP")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "sign of life for 2 s: ranks 0-1 are stopped or stuck" in done.stderr
    assert "no rank is left to go on" in done.stderr
    assert "failed first: exit code 1 (kfcomm.errors.Partitioned" in done.stderr


def test_a_job_whose_ranks_are_all_stopped_is_told_of_and_goes_on_when_they_do(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [
        sys.executable, "-m", "kfcomm", "run", "-n", "2", "--elastic", "1:2", "--lost-after", "2",
        sys.executable, "train.py", "300", "[]", "0.05",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        assert "job" in job.stdout.readline()
        ranks = [one for one in psutil.Process(job.pid).children() if "train.py" in one.cmdline()]
        for one in ranks:
            one.suspend()
        assert "ranks 0-1 are stopped or stuck" in job.stderr.readline()
        for one in ranks:
            one.resume()
        out, err = job.communicate(timeout=120)
    assert job.returncode == 0, out + err
    assert "[[1.0], [0, 1], 2]" in out


def test_a_job_from_elsewhere_is_named_and_not_changed_unless_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "other").mkdir()
    monkeypatch.delenv("KFCOMM_JOB", raising=False)
    command = ["-n", "2", "--elastic", "1:4", sys.executable, "train.py", "1500", "[]", "0.05"]
    with subprocess.Popen(
        [sys.executable, "-m", "kfcomm", "run", *command], cwd=tmp_path, env=environ(), text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        name = job.stdout.readline().split()[-1]
        monkeypatch.setattr(requests, "jobs", lambda: [name])  # whatever others run on this host
        where = f"job {name} ({sys.executable} train.py 1500"[:70]

        def kfcomm(*arguments: str, cwd: Path = tmp_path / "other", typed: str | None = None) -> tuple[int, str]:
            monkeypatch.chdir(cwd)
            monkeypatch.setattr(resizing, "at_terminal", lambda: typed is not None)
            done = CliRunner().invoke(main, arguments, input=typed)
            return done.exit_code, done.output

        code, said = kfcomm("resize", "3")
        assert (code, "or say --yes" in said, where in said, f"in {tmp_path}," in said) == (2, True, True, True), said
        code, said = kfcomm("resize", "3", typed="n\n")
        assert (code, "from 2 to 3 ranks?" in said, "nothing was changed" in said) == (2, True, True), said
        code, said = kfcomm("resize", "3", typed="y\n")
        assert (code, where in said, "2 -> 3 ranks are wanted" in said) == (0, True, True), said
        code, said = kfcomm("resize", "4", "--yes")
        assert (code, "3 -> 4 ranks are wanted" in said) == (0, True), said
        code, said = kfcomm("resize", "3", cwd=tmp_path)
        assert (code, "4 -> 3 ranks are wanted" in said) == (0, True), said
        code, said = kfcomm("resize", "2", "--job", name[:12])
        assert (code, "3 -> 2 ranks are wanted" in said) == (0, True), said
        monkeypatch.setenv("KFCOMM_JOB", name)  # as in the job itself
        code, said = kfcomm("resize", "3")
        assert (code, "2 -> 3 ranks are wanted" in said) == (0, True), said
        code, said = kfcomm("resize", name[:12], "2", "--job", name)
        assert (code, "the job is given twice" in said) == (2, True), said
        code, said = kfcomm("status", "--job", "none of that name")
        assert (code, where in said) == (2, True), said
        code, said = kfcomm("status")
        assert (code, where in said) == (0, True), said
        job.send_signal(signal.SIGINT)
        job.communicate()


def test_size_and_status_from_outside(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)

    def kfcomm(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kfcomm", *arguments]
        return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=60)

    command = ["-n", "2", "--elastic", "2:3", sys.executable, "train.py", "1500", "[]", "0.05"]
    with subprocess.Popen(
        [sys.executable, "-m", "kfcomm", "run", *command], cwd=tmp_path, env=environ(), text=True,
        stdout=subprocess.PIPE,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        name = job.stdout.readline().split()[-1]  # other jobs may run beside it

        def status() -> dict[str, Any]:
            told: dict[str, Any] = json.loads(kfcomm("status", name, "--json").stdout)
            return told

        told = status()
        assert (told["size"], told["least"], told["most"], told["running"], told["ended"]) == (2, 2, 3, [0, 1], [])
        assert kfcomm("resize", "4", name).returncode == 2
        assert "3 ranks are wanted" in kfcomm("resize", "3", name[:12]).stdout
        assert kfcomm("resize", "3", "none of that name").returncode == 2
        assert "it is empty" in kfcomm("resize", "", "3").stderr
        assert "got '1000000000'" in kfcomm("resize", name, "1000000000").stderr
        assert "say --store, or the job" in kfcomm("resize", name, "3", "--store", "http://127.0.0.1:1").stderr
        while status()["running"] != [0, 1, 2]:
            pass
        assert "3 of 3 ranks run" in kfcomm("status", "--job", name).stdout
        out, _ = job.communicate(timeout=120)
    assert job.returncode == 0
    assert "[[1.0], [0, 1, 2], 3]" in out
