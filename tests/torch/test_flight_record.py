"""The record of calls, as torch's own ``torchfrtrace`` reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfcomm.torch
from kfcomm.torch.flight_record import SIZES
from tests.torch.fleet import Fleet

EVERYTHING = """
import sys, torch
import torch.distributed as dist
import kfcomm.torch

dist.init_process_group("kfcomm")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.ones(2 * size)
dist.all_reduce(x)
dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.MAX, async_op=True).wait()
dist.broadcast(x, 1)
dist.reduce(x, 0)
dist.all_gather([torch.empty(2 * size) for _ in range(size)], x)
dist.all_gather_into_tensor(torch.empty(2 * size * size), x)
dist.reduce_scatter_tensor(torch.empty(2), x)
dist.reduce_scatter(torch.empty(2), list(x.reshape(size, 2)))
dist.gather(x, [torch.empty(2 * size) for _ in range(size)] if rank == 0 else None)
dist.scatter(x, [x.clone() for _ in range(size)] if rank == 0 else None)
dist.all_to_all_single(torch.empty_like(x), x)
dist.barrier()
pair = dist.new_group([0, 2], group_desc="pair")
if rank != 1:
    dist.all_reduce(x, group=pair)
if rank == 0:
    dist.send(x, 1)
elif rank == 1:
    dist.recv(x, 0)  # left out
assert kfcomm.torch.dump_flight_record().name == f"rank_{rank}"
dist.destroy_process_group()
"""

FAILING = """
import sys, time, torch
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("kfcomm", timeout=timedelta(seconds=60))
rank = dist.get_rank()
dist.all_reduce(torch.ones(3))
try:
    if rank == 2:
        {other}
    else:
        dist.all_reduce(torch.ones(4, 2))
except RuntimeError as error:
    print(type(error).__name__ + "\\n", end="")  # one write: ranks share the pipe
dist.destroy_process_group()
"""


@pytest.fixture
def analysed() -> Callable[[Path], tuple[Any, str]]:
    """Function that reads the records in a folder by torch's tool: its tables, and what it prints."""

    def read(folder: Path) -> tuple[Any, str]:
        pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
        out = folder / "tables"
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
        done = subprocess.run(
            [*command, str(folder), "--prefix", "rank_", "-o", str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        _, tables = pickle.loads(out.read_bytes())
        return tables, done.stdout + done.stderr

    return read


def run(program: str, folder: Path, **env: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--no-python"]
    variables = {SIZES[0]: "100", "TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_"), "OMP_NUM_THREADS": "1"}
    variables["TMPDIR"] = str(folder.parent)  # of torchrun, which leaves a folder there
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True, text=True, check=False, env=os.environ | variables | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_finds_every_call_of_a_right_program_complete(tmp_path: Path, analysed: Any) -> None:
    run(EVERYTHING, tmp_path)
    tables, told = analysed(tmp_path)
    assert all(one.pass_check and not one.missing_ranks for one in tables.collectives), told
    kinds = [one.collective_name.removeprefix("gloo:") for one in tables.collectives]
    assert {"all_reduce", "broadcast", "_all_gather_base", "reduce_scatter", "barrier"} <= {*kinds}
    assert {one.collective_state for one in tables.collectives} == {"completed"}
    assert {(one.desc, one.size) for one in tables.groups} == {("default_pg", 3), ("pair", 2)}
    assert tables.collectives[0].input_sizes == [[6]]
    assert tables.collectives[0].collective_frames[-1]["name"] == "<module>"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("dist.all_reduce(torch.ones(5))", "SIZE_OR_SYNTAX_MISMATCH"),
        ("dist.broadcast(torch.ones(4, 2), 0)", "COLLECTIVE_TYPE_MISMATCH"),
    ],
)
def test_torch_finds_the_rank_that_calls_something_else(tmp_path: Path, analysed: Any, other: str, said: str) -> None:
    assert run(FAILING.format(other=other), tmp_path).split() == ["CollectiveMismatch"] * 3
    tables, told = analysed(tmp_path)
    (wrong,) = [one for one in tables.collectives if not one.pass_check]
    others = wrong.mismatch_collectives
    assert {*others} in ({2}, {0, 1}), told  # those that differ from the first one that it has read
    assert {one.type_of_mismatch.state.name for one in others.values()} == {said}, told


def test_a_rank_that_is_stuck_writes_its_record_too(tmp_path: Path, analysed: Any) -> None:
    stuck = f"while not __import__('os').path.exists({str(tmp_path / 'rank_2')!r}): time.sleep(0.01)"
    program = FAILING.format(other=stuck).replace("seconds=60", "seconds=3")
    assert run(program, tmp_path).split() == ["CollectiveTimeout"] * 2
    tables, told = analysed(tmp_path)
    (wrong,) = [one for one in tables.collectives if one.missing_ranks]
    assert (wrong.missing_ranks, wrong.collective_state) == ({2}, "started"), told


def nothing_recorded(folder: str) -> None:
    dist.all_reduce(torch.ones(1))
    with pytest.raises(kfcomm.ConfigError, match="set TORCH_FR_BUFFER_SIZE"):
        kfcomm.torch.dump_flight_record(f"{folder}/rank_")


def test_without_the_variable_nothing_is_recorded(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(nothing_recorded, str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kfcomm.torch.flight_record import kept_calls

    monkeypatch.setenv(SIZES[0], "many")
    with pytest.raises(kfcomm.ConfigError, match="TORCH_FR_BUFFER_SIZE is a number of calls, not 'many'"):
        kept_calls()
