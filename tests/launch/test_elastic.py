"""Elastic jobs on one host: replacement, failure, and requests from outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from kfcomm.cli import main
from kfcomm.launch import requests
from tests.launch.jobs import SLOW, TRAIN
from tests.launch.launched import environ

pytestmark = pytest.mark.slow

resizing: Any = import_module("kfcomm.cli.commands.resize")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "kfcomm", "run", *arguments]
    return subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("spares", [0, 1])
def test_a_rank_is_replaced_by_one_that_is_started_or_waits(tmp_path: Path, spares: int) -> None:
    more = ("--spares", "1") if spares else ()
    program = (sys.executable, "train.py", "9000", "[[1, 800, 3]]", "0.03", "5")
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


@pytest.mark.parametrize(
    ("size", "bounds", "victims"), [(3, "2", [[0, 3], [1, 6]]), (2, "1:2", [[0, 3], [1, 3]])],
    ids=["too few are left", "none is left"],
)  # fmt: skip
def test_a_job_whose_ranks_die_fails_by_the_first(tmp_path: Path, size: int, bounds: str, victims: Any) -> None:
    program = (sys.executable, "train.py", "900", json.dumps(victims), "0.02")
    done = run(tmp_path, "-n", str(size), "--elastic", bounds, *program)
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    assert "failed first: SIGKILL" in done.stderr


BACK = """
import os, signal, sys, time
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
        time.sleep(0.02)
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


FORGOTTEN = """
import asyncio, os, signal
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.keyvalue import GIVEN_UP


async def late(self, key, value, *more, claim=StoreClient.claim, **options):
    if key.startswith(GIVEN_UP):
        await asyncio.sleep(5)
    return await claim(self, key, value, *more, **options)


StoreClient.claim = late
with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, State()) as elastic:
    for step in elastic.steps(ElasticSampler(60, 10)):
        if comm.births[comm.rank] == 2 and step.number == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.all_reduce(np.ones(2), name="x")
"""


def test_job_ends_though_its_store_is_slow_to_hear_of_a_stopped_rank(tmp_path: Path) -> None:
    (tmp_path / "forgotten.py").write_text(FORGOTTEN)
    options = ("-n", "3", "--elastic", "2:3", "--lost-after", "2", "--grace", "1")
    done = run(tmp_path, *options, sys.executable, "forgotten.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2 is lost: silent" in done.stderr


def test_few_go_on_when_some_have_ended_and_the_others_are_stopped(tmp_path: Path) -> None:
    (tmp_path / "rivals.py").write_text(RIVALS)
    options = ("-n", "4", "--elastic", "2:4", "--lost-after", "5", "--grace", "1")
    done = run(tmp_path, *options, sys.executable, "rivals.py", "3", "SIGKILL")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1.0] 3" in done.stdout


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
        sys.executable, "train.py", *map(str, SLOW),
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
        (tmp_path / "hurry").touch()
        out, err = job.communicate(timeout=600)
    assert job.returncode == 0, out + err
    assert "[[1.0], [0, 1], 2]" in out


def test_a_job_from_elsewhere_is_named_and_not_changed_unless_it_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "other").mkdir()
    monkeypatch.delenv("KFCOMM_JOB", raising=False)
    command = ["-n", "2", "--elastic", "1:4", sys.executable, "train.py", *map(str, SLOW)]
    with subprocess.Popen(
        [sys.executable, "-m", "kfcomm", "run", *command], cwd=tmp_path, env=environ(), text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        name = job.stdout.readline().split()[-1]
        monkeypatch.setattr(requests, "jobs", lambda: [name])  # whatever others run on this host
        where = f"job {name} ({sys.executable} train.py {SLOW[0]}"[:70]

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
        return subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=600)

    command = ["-n", "2", "--elastic", "2:3", sys.executable, "train.py", *map(str, SLOW)]
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
        while job.stdout.readline() != "[0] now 0 1 2\n":  # what runs need not have joined
            assert job.poll() is None
        (tmp_path / "hurry").touch()
        out, _ = job.communicate(timeout=600)
    assert job.returncode == 0
    assert "[[1.0], [0, 1, 2], 3]" in out
