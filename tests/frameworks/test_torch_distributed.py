"""A program of `torch.distributed` under `kfcomm run`, as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launched import TOKEN, environ
from tests.launch.test_torch_variables import TWO_HOSTS
from tests.support import free_port

pytest.importorskip("torch")

DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
import kfcomm
with kfcomm.sync.init() as comm:
    assert (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
    print("total", total.item(), comm.all_reduce(comm.rank), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_program_of_torch_distributed_starts_as_it_is(tmp_path: Path, hosts: int) -> None:
    (tmp_path / "ddp.py").write_text(DDP)
    where = ["-n", "2"]
    if hosts > 1:
        where = ["-H", ",".join(f"{one}:1" for one in TWO_HOSTS), "--port", str(free_port())]
    cache = str(tmp_path / "cache")
    env = environ(KFCOMM_TOKEN=TOKEN, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCHINDUCTOR_CACHE_DIR=cache)
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "kfcomm", "run", *where, *(["--self", own] if hosts > 1 else []), sys.executable,
             "ddp.py"],
            cwd=tmp_path, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for own in TWO_HOSTS[:hosts]
    ]  # fmt: skip
    said = [one.communicate() for one in launchers]
    assert [one.returncode for one in launchers] == [0] * hosts, said
    assert "".join(out for out, _ in said).count("total 3.0 1") == 2
