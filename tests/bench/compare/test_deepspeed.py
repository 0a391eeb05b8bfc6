"""DeepSpeed where it is not installed, was not built or cannot be used: skipped, with the reason in the table."""

import json
import sys
from pathlib import Path

import pytest

from bench.compare.__main__ import main
from bench.compare.contenders.base import UnavailableError
from bench.compare.contenders.deepspeed import check_memory, check_processor, reason
from bench.compare.launch import LAUNCHES, Launch, Pythons
from bench.compare.rounds import Figures
from bench.compare.rows import Row, rival
from bench.compare.table import render
from bench.compare.works import WORKS, Entry
from bench.compare.world import World

MISSING = "No module named 'deepspeed'"
BUILD = """\
  error: subprocess-exited-with-error
  x Building wheel for deepspeed (pyproject.toml) did not run successfully.
      building 'deepspeed.ops.comm.deepspeed_shm_comm_op' extension
      {}
      [end of output]
  ERROR: Failed building wheel for deepspeed
ERROR: Failed to build one or more wheels
"""
ROW = Row("some work", WORKS["1MiB"], 4, Entry("kfcomm"), (rival("Gloo", "gloo"), rival("DeepSpeed", "deepspeed")))


def figures(median_s: float) -> Figures:
    return Figures(median_s, median_s, median_s, median_s, median_s, calls=1, rounds=7, parked=0.001)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("error: [Errno 2] No such file or directory: 'g++'", "[Errno 2] No such file or directory: 'g++'"),
        ("csrc/cpu/comm/shm.cpp:6:10: fatal error: torch/extension.h: No such file", "torch/extension.h: No such file"),
        ("ModuleNotFoundError: No module named 'torch'", "No module named 'torch'"),
    ],
)
def test_reason_is_the_first_error_of_the_build(line: str, cause: str, tmp_path: Path) -> None:
    log = tmp_path / "deepspeed.log"
    log.write_text(BUILD.format(line))
    assert reason(MISSING, log) == f"not built: {cause}"


def test_reason_is_one_line_of_bounded_length(tmp_path: Path) -> None:
    log = tmp_path / "deepspeed.log"
    log.write_text(
        f"ERROR: Could not find a version that satisfies the requirement (from versions: {'0.1.0, ' * 500})\n"
    )
    assert len(reason(MISSING, log)) < 200
    assert "\n" not in reason("undefined symbol\nand more", tmp_path / "absent.log")


def test_reason_without_an_error_in_the_log_is_that_of_the_import(tmp_path: Path) -> None:
    log = tmp_path / "deepspeed.log"
    assert reason(MISSING, log) == f"not installed: {MISSING}"
    log.write_text("WARNING: a newer pip is available\n")
    assert reason(MISSING, log) == f"not installed: {MISSING}"


def test_unfit_processor_and_small_shared_memory_are_reasons() -> None:
    check_processor(1)
    with pytest.raises(UnavailableError, match="AVX2"):
        check_processor(0)
    check_memory(0)
    with pytest.raises(UnavailableError, match="1000000 ranks need 67000000 MiB in /dev/shm, "):
        check_memory(1_000_000)


def test_world_without_deepspeed_is_unavailable(tmp_path: Path) -> None:
    launch: Launch = LAUNCHES["deepspeed"]
    with pytest.raises(UnavailableError, match=r"^not (installed|built): "):
        World(launch, 2, Pythons(torch=sys.executable), tmp_path / "world")


def test_skipped_contender_has_its_reason_and_no_line() -> None:
    results = {(4, "1MiB"): {Entry("kfcomm"): figures(0.002), Entry("gloo"): figures(0.01)}}
    text = render(results, (ROW,), versions={"gloo": {"torch": "2.15.0"}}, skipped={"deepspeed": "not built: no g++"})
    assert "| DeepSpeed " not in text
    assert text.splitlines()[-2:] == [
        "DeepSpeed shared memory: skipped: not built: no g++",
        "Versions: Gloo: torch 2.15.0.",
    ]


def test_contenders_of_one_library_share_a_version() -> None:
    both = {name: {"mpi4py": "4.1", "mpi": "Open MPI v5"} for name in ("openmpi-tcp", "openmpi")}
    assert render({}, (), versions=both).endswith("Versions: Open MPI shared memory: mpi4py 4.1, mpi Open MPI v5.")


@pytest.mark.slow
def test_run_without_deepspeed_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    left_out = ["--without", "gloo", "openmpi", "mpich"]
    monkeypatch.setattr(sys, "argv", ["compare", "--quick", "--works", "1KiB", *left_out, "--output", str(path)])
    assert main() == 0
    record = json.loads(path.read_text())
    assert record["failures"] == []
    assert record["skipped"].keys() == {"deepspeed"}
    monkeypatch.setattr(sys, "argv", ["compare", "--show", str(path)])
    table = capsys.readouterr().out
    assert "DeepSpeed shared memory: skipped: not " in table
    assert main() == 0
    assert capsys.readouterr().out == table
