"""The benchmarks of device memory run to their end on a real GPU; what they find is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launched import ROOT, environ

pytestmark = pytest.mark.gpu


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A module of this checkout, run as a program."""
    # not with warnings as errors: those of CuPy's import are no defect of kfcomm
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environ(), capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("more", [(), ("--blocking", "--transport", "tcp")], ids=str)
def test_kfcomm_bench(more: tuple[str, ...], tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    done = ended(
        "kfcomm", "bench", "all-reduce", "all-gather", "reduce-scatter", "-n", "2", "--device", "gpu", *more,
        "--sizes", "64B,1MiB", "--workload", "resnet50", "--dtype", "float32", "--dtype", "float16",
        "--iterations", "2", "--json", str(data),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(data.read_text())
    assert len(found["results"]) == 2 * (3 * 2 + 3)
    assert all(min(one["times_s"]) > 0 for one in found["results"])
    assert {rank for one in found["devices"] for rank in one["ranks"]} == {0, 1}
    (route,) = found["routes"].values()
    assert route["route"] in ("backend", "staged", "device slots")
    assert f"route {route['route']} (" in done.stdout


@pytest.mark.parametrize(("part", "num_rows"), [("a world of one", 8), ("2 ranks on one GPU, transport auto", 4)])
def test_the_figures_in_short(part: str, num_rows: int, tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    done = ended("bench.gpu", "--quick", "--only", part, "--output", str(data))
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(data.read_text())
    assert not found["failures"]
    assert len(found["rows"]) == num_rows
    assert found["gpu"]["model"]
    assert found["gpu"]["nccl"]
