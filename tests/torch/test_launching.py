"""However a program for torch is started, it finds its ranks: torchrun, spawn, files and addresses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kfcomm.torch
from kfcomm.rendezvous.host import interfaces, is_loopback
from tests.support import free_port

ROOT = Path(__file__).parents[2]
SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, how):
    dist.init_process_group("kfcomm", init_method=how, rank=rank, world_size=2)
    x = torch.ones(2)
    dist.all_reduce(x)
    sys.stdout.write(f"rank {rank} {x.tolist()}\\n")  # in one piece, whatever the other process writes
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def environment(folder: Path) -> dict[str, str]:
    # torchrun leaves a folder, and optimizers make one for compiled code
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}


def finished(*command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment(folder) | variables, cwd=folder, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_the_example_under_torchrun(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "torch_ddp.py")
    done = finished("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", example, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"accuracy (\d\.\d{3}) on 3 ranks\n", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 0.9


def test_torchruns_of_several_hosts_share_a_token(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import kfcomm\nwith kfcomm.sync.init() as comm: print(comm.all_gather_object(comm.rank))\n")
    found = [one.address for one in interfaces() if not is_loopback(one.address) and ":" not in one.address]
    if not found:
        pytest.skip("needs an address that is not a loopback one")
    place = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", found[0], "--master-port", str(free_port()))
    commands = [("-m", "torch.distributed.run", *place, "--node-rank", rank, str(program)) for rank in "01"]
    with ThreadPoolExecutor(2) as hosts:
        both = [hosts.submit(finished, *command, folder=tmp_path) for command in commands]
    for one in both:
        assert one.result().stdout == "[0, 1]\n", one.result().stderr
    assert sum("the token is kept in torchrun's store" in one.result().stderr for one in both) == 1


@pytest.mark.parametrize("how", ["file", "tcp", "env"])
def test_spawned_processes(how: str, tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    port = str(free_port())
    method = {"file": f"file://{tmp_path / 'meeting'}", "tcp": f"tcp://127.0.0.1:{port}", "env": "env://"}[how]
    done = finished(str(script), method, folder=tmp_path, MASTER_ADDR="localhost", MASTER_PORT=port)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 [2.0, 2.0]", "rank 1 [2.0, 2.0]"]


def test_torch_is_not_imported_before_it_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, kfcomm.torch; print('torch' in sys.modules, len(dir(kfcomm.torch)))"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == f"False {len(kfcomm.torch.__all__)}\n", done.stderr
