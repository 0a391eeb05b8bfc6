"""`kfcomm bench` as its users have it: ranks that it starts, and those of a job; wrong results; wrong input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kfcomm.cli import main
from kfcomm.transports.registry import LINKS
from tests.launch.launched import ROOT, environ, finished
from tests.support import free_port

pytestmark = pytest.mark.slow

TINY = ("--sizes", "64B,4KiB", "--iterations", "2", "--warmup", "1")
INSIDE = (sys.executable, "-m", "kfcomm", "bench")


def test_ranks_are_started_and_everything_is_written(tmp_path: Path) -> None:
    data, page = tmp_path / "x.json", tmp_path / "x.html"
    transports = [word for name in LINKS for word in ("--transport", name)]
    done = finished(
        "bench", "all-reduce", "all_gather", "-n", "2", *TINY, "--strategy", "ring", "--strategy", "star",
        *transports, "--json", str(data), "--html", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(data.read_text())
    assert len(found["results"]) == 2 * 2 * 2 * len(LINKS)
    assert {one["transport"] for one in found["results"]} == set(LINKS)
    assert found["hosts"][0]["ranks"] == [0, 1]
    assert page.read_text("utf-8").count("<svg") == 2
    assert done.stdout.startswith("2 ranks on 1 host")
    assert len(done.stdout.splitlines()) == 1 + 1 + 2 + len(found["results"])
    assert len(done.stderr.splitlines()) == len(found["results"])


@pytest.mark.parametrize("more", [(), ("--blocking", "--dtype", "float64", "--op", "MAX", "--transport", "tcp")])
def test_the_ranks_of_a_job_are_used(more: tuple[str, ...], tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    done = finished("run", "-n", "2", *INSIDE, *TINY, *more, "--json", str(data))
    assert done.returncode == 0, done.stderr
    assert {line[:4] for line in done.stdout.splitlines()} == {"[0] "}
    assert "[0] 2 ranks on 1 host" in done.stdout
    assert [one["nbytes"] for one in json.loads(data.read_text())["results"]] == [64, 4096]


def test_a_job_whose_first_rank_serves_the_store_joins_anew_for_each_transport() -> None:
    # as torchrun has it: no launcher's store, and a port that is used again
    program = f"unset KFCOMM_SERVE; exec {' '.join(INSIDE)} --sizes 64B --iterations 1 --transport tcp --transport unix"
    done = finished("run", "-n", "2", "bash", "-c", f"export KFCOMM_STORE=http://127.0.0.1:{free_port(2)}; {program}")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[-2:]] == ["tcp", "unix"]


WRONG = """\
import kfcomm

right = kfcomm.Communicator.all_reduce

def wrong(self, x, name=None, **options):
    return right(self, x + 1 if name == "bench/0" and self.rank == 1 else x, name, **options)

kfcomm.Communicator.all_reduce = wrong
"""


@pytest.mark.parametrize("start", [("bench", "-n", "2"), ("run", "-n", "2", *INSIDE)], ids=["started", "in a job"])
def test_a_wrong_result_is_told_and_gives_exit_code_1(start: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    data = tmp_path / "x.json"
    env = environ(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    done = finished(*start, *TINY, "--json", str(data), env=env)
    assert done.returncode == 1
    assert "kfcomm: error: wrong result of all_reduce of 64 B (sum)" in done.stderr
    assert "rank 0: element 0 is" in done.stderr
    assert "Traceback" not in done.stderr
    assert not data.exists()


def test_output_of_a_rank_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text('import os\nif "KFCOMM_RANK" in os.environ: print("hello")\n')
    env = environ(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    done = finished("bench", "-n", "2", *TINY, env=env)
    assert done.returncode == 0
    assert "hello" not in done.stdout
    assert {"[0] hello", "[1] hello"} <= set(done.stderr.splitlines())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "rong"], "'rong'"),
        (["--sizes", "0"], "'0'"),
        (["--sizes", "1XB"], "'1XB'"),
        (["-n", "0"], "0 is not in the range"),
        (["-n", "1"], "1 is not in the range"),
        (["--json", "no/such/folder"], "no/such/folder"),
        (["--html", "."], "'.' cannot be written"),
        (["--html", "page.pdf"], ".pdf cannot be written: the file is one of .html or .htm"),
        (["--json", "data.csv"], ".csv cannot be written: the file is one of .json"),
        (["--dtype", "float7"], "float7"),
        (["--op", "avg", "--dtype", "int8"], "avg"),
        (["--mode", "fused"], "--workload"),
        (["--workload", "alexnet"], "alexnet"),
        (["--transport", "pigeon"], "pigeon"),
        (["all-reduced"], "all-reduced"),
        (["all-gather", "-n", "4", "--sizes", "4B"], "each of 4 ranks"),
        (["-n", "64", "--sizes", "1024GiB"], "memory"),
        (["--iterations", "0"], "--iterations"),
    ],
)
def test_wrong_input_is_one_clear_line(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments], env=dict.fromkeys(os.environ.keys() - environ().keys()))
    assert done.exit_code == 2
    assert words in done.stderr.splitlines()[-1]
    assert done.stdout == ""


def test_ranks_are_not_started_by_ranks() -> None:
    done = finished("run", "-n", "2", *INSIDE, "-n", "3")
    assert done.returncode == 2
    assert "-n 3 starts ranks, but this process is rank" in done.stderr


def test_settings_of_the_environment_are_the_defaults(tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    env = environ(KFCOMM_STRATEGY="tree", KFCOMM_TRANSPORT="tcp")
    assert finished("bench", "-n", "2", *TINY, "--json", str(data), env=env).returncode == 0
    assert {(one["strategy"], one["transport"]) for one in json.loads(data.read_text())["results"]} == {("tree", "tcp")}
