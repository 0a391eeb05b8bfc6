"""`kfcomm jobs`, and names of jobs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kfcomm.cli import main
from kfcomm.common import sockets
from kfcomm.common.sockets import matching
from kfcomm.launch.job import program_name
from tests.launch.launched import Launcher, launched

PROGRAM = """
import os, time, kfcomm
with kfcomm.sync.init(elastic="KFCOMM_ELASTIC" in os.environ) as comm:
    comm.barrier("begun")
    held = open(os.environ["HELD"], "w")
    print(os.environ["KFCOMM_JOB"], file=held, flush=True)
    time.sleep(1000)
"""


def kfcomm(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@contextmanager
def job(folder: Path, *options: str) -> Iterator[tuple[Launcher, str]]:
    """A job of two ranks, and its name."""
    folder.mkdir()
    script = folder / "learn.py"
    script.write_text(PROGRAM)
    with launched(folder, "-n", "2", *options, sys.executable, str(script)) as launcher:
        yield launcher, launcher.lines(2)[0].strip()


def test_jobs_are_listed_with_names_of_their_programs(tmp_path: Path) -> None:
    options = "--elastic", "1:4", "--name", "mine"
    with job(tmp_path / "plain") as (_, plain), job(tmp_path / "elastic", *options) as (_, mine):
        assert re.fullmatch(r"learn-[0-9a-f]{8}", plain)
        assert re.fullmatch(r"mine-[0-9a-f]{8}", mine)
        rows = {row["job"]: row for row in json.loads(kfcomm("jobs", "--json").stdout)}
        assert rows[plain]["ranks"] == rows[mine]["ranks"] == [0, 1]
        assert (rows[plain]["elastic"], rows[mine]["elastic"]) == (None, {"size": 2, "least": 1, "most": 4})
        for row in (rows[plain], rows[mine]):
            assert "python" in row["command"]
            assert 0 <= row["age_s"] < 1000
        shown = {line.split()[0]: line for line in kfcomm("jobs").stdout.splitlines()}
        assert shown["job"].split() == ["job", "age", "ranks", "here", "state", "command"]
        assert "  0-1 " in shown[plain]
        assert "  runs " in shown[plain]
        assert "elastic: 2 wanted, 1 to 4" in shown[mine]
        assert kfcomm("status", "mine").stdout.startswith(f"job {mine} ")
        assert kfcomm("top", "learn", "--once", "--interval", "0.05").stdout.startswith(f"kfcomm top  {plain}  ")


def test_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sockets, "SOCKETS", str(tmp_path / "none"))
    assert kfcomm("jobs").stdout == "no job of yours runs on this host\n"
    assert kfcomm("jobs", "--json").stdout == "[]\n"


@pytest.mark.parametrize("name", ["", "a b", "-x", "x" * 21, "é", "a/b"])
def test_invalid_name_is_refused(name: str) -> None:
    done = kfcomm("run", "-n", "1", "--name", name, "true")
    assert done.exit_code == 2
    assert "--name is up to 20 letters" in done.output


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --epochs 3", "train"),
        ("/usr/bin/python3.11 -u -m package.train", "train"),
        ("python -c print(1)", "python"),
        ("python", "python"),
        ("./learn/it", "it"),
        ("python a_very_long_name_of_a_script.py", "a_very_long_name_of"),
        ("+++", "job"),
    ],
)
def test_name_of_a_program(command: str, name: str) -> None:
    assert program_name(command.split()) == name


def test_whole_names_count_before_beginnings() -> None:
    there = ["train-11111111", "train-2-22222222", "train2-33333333"]
    assert matching(there, "train-11111111") == there[:1]
    assert matching(there, "train") == there[:1]
    assert matching(there, "tr") == there
    assert matching(there, "x") == []
    assert matching(there, "train-2") == there[1:2]
