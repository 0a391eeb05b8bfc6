"""Mismatched and missing calls raise on every rank, with both calls and their lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import kfcomm
import kfcomm.torch
from tests.torch.fleet import Fleet

ROOT = Path(__file__).parents[2]


def unlike() -> str:
    x = torch.ones(3)
    if dist.get_rank() == 2:
        with pytest.raises(kfcomm.CollectiveMismatch) as caught:
            dist.broadcast(x, 0)
    else:
        with pytest.raises(kfcomm.CollectiveMismatch) as caught:
            dist.all_reduce(x)
    assert isinstance(caught.value, dist.DistBackendError)
    return str(caught.value)


def test_mismatched_calls_raise_with_both_lines(fleet: Fleet) -> None:
    for told in fleet.run(unlike):
        sides = set(re.findall(r"rank (\d): (\w+) of float32\[3\].*?at \S*test_errors.py:\d+ in unlike", told))
        assert {verb for _, verb in sides} == {"all_reduce", "broadcast"}
        assert {("2", "broadcast")} <= sides


def unlike_later() -> list[str]:
    """Asynchronous calls, whose errors come from wait and from the future; the group goes on after that."""
    x = torch.ones(4 if dist.get_rank() else 5)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match="not the same on all ranks"):
        future.wait()
    with pytest.raises(RuntimeError) as caught:
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    y = torch.ones(2)
    dist.all_reduce(y)
    return [str(caught.value), str(y.tolist())]


def test_errors_of_asynchronous_calls(fleet: Fleet) -> None:
    for told, after in fleet.run(unlike_later):
        assert "all_reduce of float32[4], sum" in told
        assert "all_reduce of float32[5], sum" in told
        assert after == "[3.0, 3.0]"


def unlike_below() -> str:
    """Of a work that C++ alone has."""
    x = torch.ones(4 if dist.get_rank() else 5)
    with pytest.raises(kfcomm.CollectiveMismatch) as caught:
        functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    return str(caught.value)


def test_errors_of_functional_collectives(fleet: Fleet) -> None:
    for told in fleet.run(unlike_below):
        assert "all_reduce of float32[4], sum" in told
        assert "all_reduce of float32[5], sum" in told


def refused() -> str:
    """One rank's call is refused: the others, which wait for it, raise with the reason."""
    x = torch.ones(3) if dist.get_rank() else torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(x)
    dist.barrier()
    return str(caught.value)


def test_refused_call_fails_the_other_ranks(fleet: Fleet) -> None:
    first, *others = fleet.run(refused)
    assert "float8_e4m3fn" in first
    for told in others:
        assert "a call that was refused" in told
        assert "all_reduce of float32[3], sum" in told


def late() -> str:
    """A barrier that names who is missing, on all who came."""
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    dist.barrier()
    return str(caught.value)


def test_monitored_barrier_names_missing_ranks(fleet: Fleet) -> None:
    first, _, last = fleet.run(late)
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms" in first
    assert "[Rank 2]: Rank 2 successfully reached monitoredBarrier" in last
    assert "Rank 1 failed to pass it in 1000 ms" in last


def test_wait_timeout_leaves_the_call_running(fleet: Fleet) -> None:
    assert fleet.run(slow) == ["[3.0, 3.0]"] * 3


def slow() -> str:
    """A wait of its own ends, and the collective goes on."""
    x = torch.ones(2)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(kfcomm.CollectiveTimeout, match="the call continues"):
            work.wait(timedelta(milliseconds=20))
        for other in (1, 2):
            dist.send(torch.zeros(1), other)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(x)
    return str(x.tolist())


def timed() -> None:
    """A timeout of the group's own, and one of a call's."""
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    if dist.get_rank() == 0:
        with pytest.raises(kfcomm.CollectiveTimeout, match="timeout of the call, or of its process group"):
            dist.barrier(group)
    dist.barrier()


def test_timeouts(fleet: Fleet) -> None:
    fleet.run(timed)


MISSING = """
import time, torch, torch.distributed as dist
dist.init_process_group("kfcomm")
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(4)
else:
    dist.all_reduce(torch.ones(3))
"""


def test_a_rank_that_is_missing_is_named_with_its_line(tmp_path: Path) -> None:
    """By the stall report: after 10 s, here after 1."""
    script = tmp_path / "missing.py"
    script.write_text(MISSING)
    env = os.environ | {"KFCOMM_STALL_AFTER": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env["TMPDIR"] = str(tmp_path)  # torchrun leaves a folder
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    told = re.search(r"rank 0 has waited .* missing ranks \[1\]; rank 1 last .*", done.stderr)
    assert told is not None, done.stderr
    assert f"at {script}:6 in <module>" in told[0]
    assert "all_reduce of float32[3]" in told[0]
