"""`kfcomm top`, on jobs that run, in a terminal and without one."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kfcomm.cli import main
from kfcomm.cli.commands.top import chosen
from kfcomm.common import sockets
from kfcomm.errors import ConfigError
from kfcomm.monitor.live import Job
from tests.launch.launched import Launcher, command, environ, launched

PROGRAM = """
import os, kfcomm
with kfcomm.sync.init() as comm:
    for step in range(5):
        comm.all_reduce(1.0, name="loss")
    held = open(os.environ["HELD"], "w")
    print(os.environ["KFCOMM_JOB"], os.getpid(), comm.rank, file=held, flush=True)
    while True:
        comm.all_reduce(1.0, name="loss")
"""


@contextlib.contextmanager
def job(folder: Path, *options: str) -> Iterator[tuple[Launcher, str, list[int]]]:
    """A job of two ranks that works until it is ended; its name, and the ids of its processes by rank."""
    with launched(folder, "-n", "2", *options, sys.executable, "-c", PROGRAM) as launcher:
        said = sorted((line.split() for line in launcher.lines(2)), key=lambda words: words[2])
        yield launcher, said[0][0], [int(pid) for _, pid, _ in said]


def top(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["top", *arguments])


def test_one_view_is_printed_and_names_what_runs(tmp_path: Path) -> None:
    with job(tmp_path) as (_, name, _):
        done = top(name[:12], "--once", "--interval", "0.2")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"kfcomm top  {name}  2 of 2 ranks here  strategy auto"
    assert lines[1].startswith(str(Path(sys.executable).parent))
    assert re.match(r"[\d,]+ collectives/s ", lines[2])
    assert re.match(r"slowest: rank \d, with \d+% of all waiting", lines[3])
    assert [line.split()[0] for line in lines[6:8]] == ["0", "1"]
    assert any(line.startswith("loss ") for line in lines)
    assert "\x1b" not in done.output


def test_views_follow_one_another_until_the_job_ends(tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, name, _):
        watching = subprocess.Popen(command("top", name, "--interval", "0.05"), env=environ(), stdout=subprocess.PIPE)
        assert watching.stdout is not None
        while b"loss" not in watching.stdout.readline():
            pass
        launcher.process.kill()
        rest, _ = watching.communicate()
    assert watching.returncode == 0
    assert b"the job has ended: none of its ranks is left on this host" in rest


def test_a_rank_that_dies_is_told(tmp_path: Path) -> None:
    with job(tmp_path, "--keep-going") as (_, name, pids):
        watching = subprocess.Popen(command("top", name, "--interval", "0.05"), env=environ(), stdout=subprocess.PIPE)
        assert watching.stdout is not None
        while b"loss" not in watching.stdout.readline():
            pass
        os.kill(pids[1], signal.SIGKILL)
        while not (line := watching.stdout.readline()).startswith((b"gone:", b"the job has ended")):
            assert line  # or it has ended without a word
        watching.kill()
        watching.communicate()


class Terminal:
    """`kfcomm top` in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 30) -> None:
        self._keys, inside = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(inside)
        env = environ(TERM="xterm")
        self.process = subprocess.Popen(command("top", *arguments), env=env, stdin=inside, stdout=inside, stderr=inside)
        self._inside = inside
        self.shown = ""

    def resize(self, columns: int, rows: int) -> None:
        ioctl(self._keys, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str) -> None:
        """Returns when this has been shown since the last call."""
        self.shown = ""
        while text not in self.shown:
            self._hear()

    def press(self, key: str) -> None:
        os.write(self._keys, key.encode())

    def end(self) -> int:
        """Its exit code, after its end."""
        ended = os.pidfd_open(self.process.pid)
        while ended not in (ready := select.select([ended, self._keys], [], [])[0]) or self._keys in ready:
            self._hear()
        os.close(ended)
        return self.process.wait()

    def modes(self) -> list[object]:
        return list(termios.tcgetattr(self._inside))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._keys)
        os.close(self._inside)

    def _hear(self) -> None:
        self.shown += os.read(self._keys, 1 << 16).decode(errors="replace")


@contextlib.contextmanager
def terminal(*arguments: str, columns: int = 80) -> Iterator[Terminal]:
    made = Terminal(*arguments, columns=columns)
    try:
        yield made
    finally:
        made.close()


def test_a_terminal_is_drawn_on_resized_and_left_as_it_was(tmp_path: Path) -> None:
    with job(tmp_path) as (_, name, _), terminal(name, "--interval", "0.1") as watching:
        watching.until("loss")
        assert watching.shown.startswith("\x1b[?1049h")
        watching.resize(30, 12)
        watching.until(f"kfcomm top  {name}  2 of 2 ranks"[:29] + "…")
        watching.press("q")
        watching.until("\x1b[?1049l")
        assert watching.end() == 0
        assert watching.modes() == watching.before


def test_the_end_of_the_job_ends_it(tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, name, _), terminal(name, "--interval", "0.1") as watching:
        watching.until("loss")
        launcher.process.kill()
        watching.until(f"job {name} has ended")
        assert watching.end() == 0
        assert watching.modes() == watching.before


def test_without_a_job_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCKETS", "/proc/net/no-such-file")
    done = top("--once")
    assert done.exit_code == 2
    assert "no job of yours runs on this host" in done.output


def test_a_job_is_meant_by_its_name_or_how_that_begins() -> None:
    jobs = [Job("abc", ((0, "s"), (1, "s"))), Job("abd", ((0, "s"), (5, "s"))), Job("ab", ((3, "s"),))]
    assert chosen(jobs[:1], None) == "abc"
    assert chosen(jobs, "ab") == "ab"
    assert chosen(jobs, "abd") == "abd"
    for asked, message in ((None, "3 jobs run here, name"), ("a", "3 jobs run here"), ("x", "no job 'x' runs here")):
        with pytest.raises(ConfigError, match=message) as caught:
            chosen(jobs, asked)
        assert "abc (ranks 0-1)\n  abd (ranks 0, 5)\n  ab (ranks 3)" in str(caught.value)


def test_of_several_jobs_the_only_one_of_this_directory_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(name: str, pid: int) -> Job:
        return Job(name, ((0, f"kfcomm-live/0/{name}/0/{pid}.0"),))

    with subprocess.Popen(["sleep", "inf"], cwd=tmp_path) as other:
        jobs = [job("here", os.getpid()), job("there", other.pid)]
        assert chosen(jobs, None) == "here"
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match="2 jobs run here, name") as caught:
            chosen(jobs, None)  # both are of this one now
        assert f"there (ranks 0, sleep inf, in {tmp_path})" in str(caught.value)
        assert chosen([*jobs, job("there", other.pid)], "here") == "here"
        other.kill()


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan"])
def test_intervals_that_are_none_are_refused(interval: str) -> None:
    assert top("--interval", interval).exit_code == 2
