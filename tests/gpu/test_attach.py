"""``kfcomm.torch.attach`` for models on a GPU that two ranks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kfcomm.arrays.devices.cuda import SHARING_VARIABLE
from tests.gpu.arrays import library

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


class Said(NamedTuple):
    """Results and output of a job."""

    found: list[Any]
    output: str


SIZE, WITHIN_S = 2, 50
EXACT = ("plain", "small buckets", "deferred", "accumulated", "same memory", "void step", "raising pass")
"""Cases with the same bits; two numbers have one sum in any order."""
TOLERANCES = {"amp": 2e-3, "powersgd": 1e-3, "monitor": 1e-3, "": 1e-4}
"""Of cases by the beginning of their names."""

ROUTES = ["", "nccl"]


def said_by(program: str, *arguments: str, options: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Said:
    """Run a job, at most so long; the results of its ranks, and all of its output."""
    if find_spec("torch") is None or not library("torch").cuda.is_available():
        pytest.skip("torch is not installed here, or cannot use the GPU")
    command = [sys.executable, "-m", "kfcomm", "run", "-n", str(SIZE), "--device", "cuda:0", *options]
    command += [sys.executable, str(ROOT / "tests" / "gpu" / program), *arguments]
    whole = os.environ | {"PYTHONPATH": str(ROOT)} | (env or {})
    with subprocess.Popen(command, env=whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            output, _ = launcher.communicate(timeout=WITHIN_S)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            output, _ = launcher.communicate()
    lines = [line.partition("found ")[2] for line in output.splitlines() if "found [" in line]
    return Said([json.loads(line) for line in lines], output)


@pytest.fixture(scope="module", params=ROUTES, ids=["default", "nccl"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank, by case."""
    options: list[str] = []
    env: dict[str, str] = {}
    if request.param == "nccl":
        if "SLIM_NCCL" not in os.environ:
            pytest.skip("SLIM_NCCL names no library of NCCL 2.30 or newer")
        options, env = ["--transport", "nccl"], {"LD_PRELOAD": os.environ["SLIM_NCCL"], SHARING_VARIABLE: "1"}
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    said = said_by("attach_ranks.py", str(meeting), options=options, env=env)
    results = [dict.fromkeys(CASES, said.output[-2000:]) for _ in range(SIZE)]
    for rank, case, result in said.found:
        results[rank][case] = result
    return results


CASES = [
    "plain", "small buckets", "deferred", "amp, clipped", "amp, deferred", "accumulated", "used sometimes",
    "re-entrant checkpoint", "checkpoint", "partly on the CPU", "partly on the CPU, re-entrant checkpoint", "adasum",
    "powersgd", "topk", "factors", "sma", "diloco", "adasgd", "local-adaalter",
    "sma, partly on the CPU", "pair-averaging", "monitor", "late gradients",
    "late gradients, deferred", "no wait", "no wait, deferred", "no wait, monitored", "same memory", "void step",
    "raising pass",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_training(case: str, found: list[dict[str, Any]]) -> None:
    tolerance = 0.0 if case in EXACT else next(value for name, value in TOLERANCES.items() if case.startswith(name))
    for of_rank in found:
        difference = of_rank[case]
        assert isinstance(difference, float), difference
        assert difference <= tolerance


def test_elastic_job_in_which_a_rank_joins_and_is_killed() -> None:
    """Gradients go through host memory, where a collective survives the loss; all ranks have one model in the end."""
    said = said_by("elastic_attach.py", "cuda", options=["--elastic", "2:3"])
    assert sorted(said.found) == [[0, [2, 3, 2], True], [1, [2, 3, 2], True]], said.output[-2000:]
