"""Jobs of an older and of a newer version: commands tell both versions and what to do; a rank that joins is refused.

The older version is a commit of this repository where git has it; and a copy of this package with the version, protocol
and answers of a release that did not tell its version. The newer one is a copy whose answers have other fields.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from kfcomm.common.version import PROTOCOL_VERSION, __version__, difference, versions
from tests.launch.launched import ROOT, Launcher, environ, finished, launched

OLD_COMMIT = "0f480d11"
UNTOLD = f"the job runs kfcomm 0.2.0 or earlier, this is {__version__}: use the job's kfcomm"
HERE = f"this is {__version__}: use the job's kfcomm"
NEWER = f"the job runs kfcomm 99.0, {HERE}"
PROGRAM = """
import os, sys, time
if "KFCOMM_JOIN" in os.environ and "OTHER" in os.environ:
    sys.path.insert(0, os.environ["OTHER"])
import numpy, kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State
held = open(os.environ["HELD"], "w")
try:
    with kfcomm.sync.init(elastic=True) as comm:
        with Elastic(comm, State(total=numpy.zeros(3))) as elastic:
            for number, _ in enumerate(elastic.steps(ElasticSampler(400, batch=4), passes=10 ** 6)):
                comm.all_reduce(numpy.ones(3), name="loss")
                time.sleep(0.005)
                if number == 3:
                    kfcomm.dump(f"{os.environ['HELD']}.{comm.rank}.json")
                    print(os.environ["KFCOMM_JOB"], file=held, flush=True)
except kfcomm.KfcommError as error:
    print("refused:", error, file=held, flush=True)
"""
Changes = Mapping[str, tuple[tuple[str, str], ...]]
OLDER: Changes = {
    "common/version.py": ((f'"{__version__}"', '"0.1.0"'), (f"= {PROTOCOL_VERSION}\n", "= 11\n")),
    "launch/requests.py": (('                told["versions"] = versions()\n', ""),),
    "launch/run.py": (('"was": was, ', ""),),
    "monitor/answers.py": (('            return {"versions": versions()}\n', "            pass\n"),),
    "monitor/dumps.py": (('        "versions": list(versions()),\n', ""),),
    "rendezvous/identity.py": (
        ("(*_values(self)[:-1], _values(self.device))", "(*_values(self)[:-2], _values(self.device))"),
        ("        found = dict(zip", "        values = (*values[:-1], False, values[-1])\n        found = dict(zip"),
        ("len(values) != len(cls.__slots__)", "len(values) != len(cls.__slots__) - 1"),
    ),
}
NEW: Changes = {
    "common/version.py": ((f'"{__version__}"', '"99.0"'), (f"= {PROTOCOL_VERSION}\n", "= 99\n")),
    "launch/run.py": (('"spares": elastic.spares,', '"waiting": elastic.spares,'),),
    "monitor/dumps.py": (("FORMAT = 1\n", "FORMAT = 2\n"),),
    "monitor/statistics.py": (("        return asdict(self)\n", '        return asdict(self) | {"more": [1]}\n'),),
    "rendezvous/identity.py": (
        ("_values(self.device)))", "_values(self.device), 1))"),
        ("        found = dict(zip", "        values = values[:-1]\n        found = dict(zip"),
        ("len(values) != len(cls.__slots__)", "len(values) != len(cls.__slots__) + 1"),
    ),
}


def changed(folder: Path, changes: Changes) -> Path:
    """A copy of the package with changes."""
    shutil.copytree(ROOT / "kfcomm", folder / "kfcomm", ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in changes.items():
        path = folder / "kfcomm" / name
        text = path.read_text("utf-8")
        for old, new in pairs:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
    return folder


def from_git() -> bytes | None:
    """The package of an older commit as a tar archive; None where git does not have it."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "archive", OLD_COMMIT, "kfcomm"], cwd=ROOT, capture_output=True)
    return done.stdout if done.returncode == 0 else None


ARCHIVE = from_git()
OLD = ("copy", "commit") if ARCHIVE is not None else ("copy",)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds the package of its working directory first."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", params=OLD)
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    if request.param == "copy":
        return changed(folder, OLDER)
    assert ARCHIVE is not None
    with tarfile.open(fileobj=BytesIO(ARCHIVE)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(tmp_path_factory.mktemp("newer"), NEW)


@contextmanager
def job(folder: Path, package: Path, **more: str) -> Iterator[tuple[Launcher, str, Path]]:
    """An elastic job of two ranks with a package; its name, and a dump of its first rank."""
    env = environ(**more) | {"PYTHONPATH": str(package)}
    with launched(folder, "-n", "2", "--elastic", "2:3", sys.executable, "-c", PROGRAM, env=env) as launcher:
        name, _ = launcher.lines(2)
        yield launcher, name, folder / "held.0.json"


def test_commands_tell_that_a_job_is_of_an_older_version(tmp_path: Path, older: Path) -> None:
    with job(tmp_path, older) as (launcher, name, dump):
        top = finished("top", name, "--once", "--interval", "0.1")
        status = finished("status", name)
        doctor = finished("doctor", str(dump))
        resize = finished("resize", name, "3")
        launcher.lines(1)  # of the new rank
    assert f"\n{UNTOLD}\n" in top.stdout
    assert "2 of 2 ranks here" in top.stdout
    assert any(line.startswith("loss ") for line in top.stdout.splitlines())
    assert status.stderr == resize.stderr == f"kfcomm: warning: {UNTOLD}\n"
    assert "2 of 2 ranks run, 2 to 3 may" in status.stdout
    assert re.search(r": 3 ranks are wanted, [23] run$", resize.stdout.strip())
    assert "->" not in resize.stdout  # an older launcher does not say how many were wanted before
    assert doctor.stdout.startswith("A world of 2: ")
    assert [one.returncode for one in (top, status, resize)] == [0, 0, 0]
    assert doctor.stderr == ""  # a dump of the same format has all that is read


def test_commands_tell_that_a_job_is_of_a_newer_version(tmp_path: Path, newer: Path) -> None:
    with job(tmp_path, newer) as (launcher, name, dump):
        top = finished("top", name, "--once", "--interval", "0.1")
        status = finished("status", name)
        jobs = finished("jobs")
        doctor = finished("doctor", str(dump))
        resize = finished("resize", name, "3")
        launcher.lines(1)
        refused = finished("resize", name, "7")
    assert f"\n{NEWER}\n" in top.stdout
    assert any(line.startswith("loss ") for line in top.stdout.splitlines())
    assert (status.returncode, status.stdout) == (2, "")
    assert status.stderr == f"kfcomm: error: job {name} does not tell spares: {NEWER}\n"
    assert name in jobs.stdout
    wrong = "expected a dump of kfcomm: its format is 2, this version of kfcomm reads 1"
    told = f"it is of kfcomm 99.0, {HERE}"
    assert doctor.stderr == f"kfcomm: error: {dump}: {wrong}; {told}\n"
    assert resize.stderr == f"kfcomm: warning: {NEWER}\n"
    assert ": 2 -> 3 ranks are wanted, " in resize.stdout
    assert refused.stderr == f"kfcomm: error: size 7 is outside the job's range 2..3; {NEWER}\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_old", [True, False])
def test_a_rank_of_this_version_that_joins_is_told_why_it_cannot(tmp_path: Path, older: Path, *, is_old: bool) -> None:
    packages = (older, ROOT) if is_old else (ROOT, older)
    with job(tmp_path, packages[0], OTHER=str(packages[1])) as (launcher, name, _):
        assert finished("resize", name, "3").returncode == 0
        (line,) = launcher.lines(1)
    assert line.startswith("refused: ")
    assert "kfcomm 0.1.0 (protocol 1" in line
    assert f"kfcomm {__version__} (protocol {PROTOCOL_VERSION})" in line
    assert "Install the same version on all hosts" in line


def test_a_dump_of_another_version_with_the_same_format_is_read(tmp_path: Path) -> None:
    with job(tmp_path, ROOT) as (_, name, path):
        assert finished("status", name).stderr == ""
    (record,) = json.loads(path.read_text())
    assert record["versions"] == list(versions())
    assert finished("doctor", str(path)).stderr == ""
    path.write_text(json.dumps([record | {"versions": ["0.5.0", 20]}]))
    done = finished("doctor", str(path))
    assert done.stderr == f"kfcomm: warning: a dump is of kfcomm 0.5.0, {HERE}\n"


@pytest.mark.parametrize("told", [None, [], ["1"], ["1", "2"], 7, "0.2", ["\x1b[2J", 1], {"versions": 1}])
def test_versions_that_are_none_count_as_not_told(told: object) -> None:
    assert difference(told) == UNTOLD
    assert difference(json.loads(json.dumps(versions()))) == ""


def test_equal_versions_with_other_protocols_show_these() -> None:
    assert difference((__version__, 1)) == (
        f"the job runs kfcomm {__version__} (protocol 1), this is {__version__} (protocol {PROTOCOL_VERSION}): "
        "use the job's kfcomm"
    )
