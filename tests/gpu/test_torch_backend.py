"""The backend for torch.distributed with tensors on a GPU that two ranks share."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.arrays import library

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SIZE = 2


def lack() -> str:
    """The missing requirement; empty if all are met."""
    if find_spec("torch") is None:
        return "torch is not installed here"
    torch = library("torch")
    if not torch.cuda.is_available():
        return "torch cannot use the GPU"
    return "" if hasattr(torch._C._distributed_c10d.Backend, "all_gather_single") else "this torch is older than 2.14"


def test_collectives_of_tensors_on_a_gpu(tmp_path: Path) -> None:
    if why := lack():
        pytest.skip(why)
    env = os.environ | {"PYTHONPATH": str(ROOT), "KFCOMM_DEVICE": "cuda:0"}
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "torch_ranks.py"), str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE)], env=env, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(SIZE)
    ]  # fmt: skip
    said = [rank.communicate() for rank in ranks]
    assert [(rank.returncode, out) for rank, (out, _) in zip(ranks, said, strict=True)] == [(0, "right\n")] * SIZE, said
