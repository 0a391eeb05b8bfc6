"""``kfcomm.torch.attach`` for models on a GPU that two ranks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kfcomm.arrays.devices.cuda import SHARING_VARIABLE
from tests.gpu.arrays import library

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SIZE, WITHIN_S = 2, 50
EXACT = ("plain", "small buckets", "deferred", "accumulated", "same memory", "void step", "raising pass")
"""Cases with the same bits; two numbers have one sum in any order."""
TOLERANCES = {"amp": 2e-3, "powersgd": 1e-3, "monitor": 1e-3, "": 1e-4}
"""Of cases by the beginning of their names."""

ROUTES = ["", "nccl"]


@pytest.fixture(scope="module", params=ROUTES, ids=["default", "nccl"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank, by case."""
    if find_spec("torch") is None or not library("torch").cuda.is_available():
        pytest.skip("torch is not installed here, or cannot use the GPU")
    env, options = os.environ | {"PYTHONPATH": str(ROOT)}, ["-n", str(SIZE), "--device", "cuda:0"]
    if request.param == "nccl":
        if "SLIM_NCCL" not in os.environ:
            pytest.skip("SLIM_NCCL names no library of NCCL 2.30 or newer")
        env |= {"LD_PRELOAD": os.environ["SLIM_NCCL"], SHARING_VARIABLE: "1"}
        options += ["--transport", "nccl"]
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    program = [sys.executable, str(ROOT / "tests" / "gpu" / "attach_ranks.py"), str(meeting)]
    command = [sys.executable, "-m", "kfcomm", "run", *options, *program]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            said, _ = launcher.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            said, _ = launcher.communicate()
    results: list[dict[str, Any]] = [{} for _ in range(SIZE)]
    for line in said.splitlines():
        if "found [" in line:
            rank, case, result = json.loads(line.partition("found ")[2])
            results[rank][case] = result
    assert all(results), said
    return [dict.fromkeys(CASES, said[-2000:]) | of_rank for of_rank in results]


CASES = [
    "plain", "small buckets", "deferred", "amp, clipped", "amp, deferred", "accumulated", "used sometimes",
    "re-entrant checkpoint", "checkpoint", "partly on the CPU", "partly on the CPU, re-entrant checkpoint", "adasum",
    "powersgd", "topk", "factors", "sma", "diloco", "adasgd", "local-adaalter", "monitor", "late gradients",
    "late gradients, deferred", "no wait", "no wait, deferred", "no wait, monitored", "same memory", "void step", "raising pass",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training(case: str, found: list[dict[str, Any]]) -> None:
    tolerance = 0.0 if case in EXACT else next(value for name, value in TOLERANCES.items() if case.startswith(name))
    for of_rank in found:
        difference = of_rank[case]
        assert isinstance(difference, float), difference
        assert difference <= tolerance
