"""Elastic jobs that begin with one rank: they grow, lose that rank, shrink to one, and grow again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launched import environ

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, PerRank, State

LENGTH = 100_000
GOALS = [3, "kill", 1, 2, "end"]
how = sys.argv[1]
state = State(
    used=np.zeros(LENGTH, np.int8), goal=0, since=0, own=PerRank(np.zeros(2), "sum"), total=0.0, sizes=[],
    has_first=True,
)
comm = kfcomm.sync.init(elastic=True)
uid = comm.births[comm.rank]
if how == "alone":
    assert comm.size == 1
with Elastic(comm, state) as elastic:
    for step in elastic.steps(ElasticSampler(LENGTH, batch=10, seed=None), used_in="used"):
        mask = np.zeros(LENGTH, np.int8)
        mask[step.indices] = 1
        state.used += comm.all_reduce(mask, name="used")
        # what a rank had that died is lost
        handle = comm.all_reduce_async(state.own, name="own")
        own = handle.result()
        assert own[0] <= state.total * (1 + 1e-12), (own, state.total)
        if (0 in handle.contributors) == state.has_first:
            assert abs(own[0] - state.total) <= 1e-9 * state.total, (own, state.total)
        state.total, state.has_first = float(own[0]) + len(handle.contributors), 0 in handle.contributors
        state.own += 1
        if not state.sizes or comm.size != state.sizes[-1]:
            state.sizes = [*state.sizes, comm.size]
        if how == "alone" and step.number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        goal = GOALS[state.goal]
        if goal == "end":
            if step.number > state.since + 5:
                break
        elif goal == "kill":
            if step.number > state.since + 5:
                if 0 in comm.births and uid == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if 0 not in comm.births and comm.size == 3:
                    state.goal, state.since = state.goal + 1, step.number
        else:
            if step.number == state.since + 3 and comm.rank == 0:
                comm.propose_size(goal)
            if comm.size == goal:
                state.goal, state.since = state.goal + 1, step.number
        time.sleep(0.01)
if not elastic.is_released and comm.rank == 0:
    print(json.dumps([state.sizes, sorted(set(state.used.tolist()))]), flush=True)
comm.close()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "kfcomm", "run", "-n", "1", *arguments]
    return subprocess.run(command, cwd=folder, env=environ(), capture_output=True, text=True, timeout=240)


def test_job_of_one_rank_grows_loses_it_and_shrinks_to_one(tmp_path: Path) -> None:
    done = run(tmp_path, "--elastic", "1:4", sys.executable, "train.py", "grow")
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.sub(r"^\[\d+\] ", "", done.stdout.strip().splitlines()[-1])
    sizes, used = json.loads(said)
    assert sizes[0] == 1
    assert sizes[-2:] == [1, 2]
    assert 3 in sizes
    assert used == [0, 1]


def test_job_whose_only_rank_dies_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "--elastic", "1:4", sys.executable, "train.py", "alone")
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    assert "failed first: SIGKILL" in done.stderr


def test_job_of_one_rank_that_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        "import kfcomm, numpy as np\n"
        "from kfcomm.elastic import Elastic, ElasticSampler, State\n"
        "with kfcomm.sync.init(elastic=True) as comm, Elastic(comm, State()) as elastic:\n"
        "    for step in elastic.steps(ElasticSampler(20, 4)):\n"
        "        comm.all_reduce(np.ones(1), name='x')\n"
        "print('steps', step.number + 1)\n"
    )
    for bounds in ("1", "1:4"):
        done = run(tmp_path, "--elastic", bounds, sys.executable, "short.py")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "steps 5" in done.stdout
