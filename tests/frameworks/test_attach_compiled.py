"""`attach` beneath ``torch.compile``: the same numbers, and no frame of kfcomm is compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from tests.launch.launched import environ

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def check(compiler: str, folder: Path) -> None:
    """Run the programs on two ranks, which are processes: the compiler is not made for threads that compile at once."""
    done = subprocess.run(
        [sys.executable, "-m", "kfcomm", "run", "-n", "2", sys.executable, "-m", "tests.frameworks.compiled_programs",
         compiler],
        cwd=ROOT, env=environ(OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(folder), TMPDIR=str(folder)), text=True,
        stdin=subprocess.DEVNULL, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same on rank") == 2


def test_compiled_programs_learn_the_same_with_all_options(tmp_path: Path) -> None:
    check("dynamo", tmp_path)


@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
def test_two_models_of_a_process_are_compiled_by_inductor(tmp_path: Path) -> None:
    check("inductor", tmp_path)
