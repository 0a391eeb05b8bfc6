"""PowerSGD gives what torch's own hook gives on the same gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kfcomm.sync
from kfcomm.compression import PowerSGD
from tests.launch.launched import environ

torch = pytest.importorskip("torch")

STEPS, BEGIN_AFTER = 5, 2

THEIRS = f"""
import os, sys, numpy as np, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{{folder}}/meeting", rank=0, world_size=1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Linear(40, 8)).double()
parallel = torch.nn.parallel.DistributedDataParallel(model)
state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter={BEGIN_AFTER}, min_compression_rate=1.5)
parallel.register_comm_hook(state, powerSGD_hook)
record = {{}}
for step in range({STEPS}):
    x = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    loss = lambda net: net(x).sin().square().sum()
    plain = torch.autograd.grad(loss(model), list(model.parameters()))
    parallel.zero_grad()
    loss(parallel).backward()
    for number, (parameter, gradient) in enumerate(zip(model.parameters(), plain)):
        record[f"given/{{step}}/{{number}}"] = gradient.numpy()
        record[f"found/{{step}}/{{number}}"] = parameter.grad.numpy().copy()
np.savez(f"{{folder}}/record.npz", **record)
os._exit(0)  # Gloo may call std::terminate when it ends on a busy machine
"""


def first_qs(rank: int, columns: dict[str, int]) -> dict[str, np.ndarray]:
    """Draw the hook's first matrices, in the order of its bucket."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        return {name: torch.randn(1, m, rank, dtype=torch.float64)[0].numpy() for name, m in columns.items()}


@pytest.mark.parametrize("rank", [1, 3])
def test_as_the_hook_of_torch(rank: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", THEIRS, str(tmp_path), str(rank)]
    env = environ(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    record = np.load(tmp_path / "record.npz")
    first = first_qs(rank, {"2": 40, "0": 24})  # gradients of the last layer come first
    compressed = PowerSGD(rank, min_rate=1.5, begin_after=BEGIN_AFTER, first=first)
    with kfcomm.sync.init() as alone:
        for step in range(STEPS):
            given = {str(number): record[f"given/{step}/{number}"] for number in range(4)}
            found = compressed.average(alone, given)
            for name, one in found.items():
                wanted = record[f"found/{step}/{name}"]
                np.testing.assert_allclose(one, wanted, rtol=1e-9, atol=1e-12, err_msg=f"step {step}, {name}")
            is_whole = all(np.array_equal(found[name], given[name]) for name in ("0", "2"))
            assert is_whole == (step < BEGIN_AFTER)
