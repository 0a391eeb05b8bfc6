"""Signals at a launcher, and at ranks: what each reaches, on one host and on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs import LOOK_S
from tests.launch.launched import Launcher, command, environ, launched
from tests.support import free_port

pytestmark = pytest.mark.slow

TWO_HOSTS = ("127.0.0.1", "127.0.0.2")

HEARS = """
import os, signal, sys
held = open(os.environ["HELD"], "w", buffering=1)
heard = []
if sys.argv[1] == "handler":
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        assert signal.getsignal(number) is signal.SIG_IGN
        signal.signal(number, lambda number, _: heard.append(number))
come, told = os.pipe()
os.set_blocking(told, False)
signal.set_wakeup_fd(told)
held.write("ready\\n")
while len(heard) < int(sys.argv[2]):
    os.read(come, 1)
held.write(f"heard {sorted(heard)}\\n")
"""

ENDS = """
import os, runpy, signal, time
if os.environ["KFCOMM_RANK"] == "0":
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # as Python itself does when it ends
        signal.signal(number, signal.SIG_DFL)
    with open(os.environ["HELD"], "w") as held:
        held.write("ready\\n")
    while not os.path.exists("go"):
        time.sleep(0.02)
else:
    runpy.run_path("hears.py")
"""

DUMPS = """
import os, signal, subprocess, sys, time
held = open(os.environ["HELD"], "w", buffering=1)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
import kfcomm
with kfcomm.sync.init() as comm:
    child = subprocess.Popen(["sleep", "1000"])
    held.write(f"ready {comm.rank}\\n")
    while not os.path.exists(f"kfcomm-rank{comm.rank}-pid{os.getpid()}.json"):
        time.sleep(0.02)
    assert child.poll() is None
    child.kill()
    child.wait()
    comm.barrier()
    held.write(f"dumped {comm.rank}\\n")
"""


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(LOOK_S)


def test_user_signals_reach_the_handlers_of_all_ranks_and_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "hears.py").write_text(HEARS)
    with launched(tmp_path, "-n", "3", sys.executable, str(tmp_path / "hears.py"), "handler", "2") as launcher:
        assert launcher.lines(3) == ["ready"] * 3
        launcher.process.send_signal(signal.SIGUSR1)
        launcher.process.send_signal(signal.SIGUSR2)
        assert launcher.lines(3) == [f"heard {[int(signal.SIGUSR1), int(signal.SIGUSR2)]}"] * 3
        assert launcher.process.wait() == 0


def test_a_rank_lives_through_user_signals_before_it_has_a_handler_and_dumps_on_one_after(tmp_path: Path) -> None:
    (tmp_path / "dumps.py").write_text(DUMPS)
    # the shell around it gets no signal that it does not know
    run = ("-n", "2", "sh", "-c", f"cd {tmp_path} && {sys.executable} dumps.py && true")
    with launched(tmp_path, *run) as launcher:
        assert launcher.lines(2) == ["ready 0", "ready 1"]
        launcher.process.send_signal(signal.SIGUSR2)
        launcher.process.send_signal(signal.SIGUSR1)
        assert launcher.lines(2) == ["dumped 0", "dumped 1"]
        out, err = launcher.process.communicate()
        assert launcher.process.returncode == 0, out + err
    dumps = sorted(tmp_path.glob("kfcomm-rank*.json"))
    assert [json.loads(one.read_text())[0]["rank"] for one in dumps] == [0, 1]


def test_user_signals_do_not_end_a_rank_that_has_no_handlers_any_more(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    (tmp_path / "hears.py").write_text(HEARS)
    run = ("-n", "2", "sh", "-c", f"cd {tmp_path} && exec {sys.executable} ends.py handler 2")
    with launched(tmp_path, *run) as launcher:
        assert launcher.lines(2) == ["ready"] * 2
        launcher.process.send_signal(signal.SIGUSR1)
        launcher.process.send_signal(signal.SIGUSR2)
        assert launcher.lines(1) == [f"heard {[int(signal.SIGUSR1), int(signal.SIGUSR2)]}"]  # rank 1, after rank 0
        (tmp_path / "go").touch()
        out, err = launcher.process.communicate()
        assert launcher.process.returncode == 0, out + err


@pytest.mark.parametrize("elastic", [(), ("--elastic", "2")])
@pytest.mark.parametrize("host", [0, 1])
def test_user_signals_at_one_launcher_reach_the_ranks_of_all_hosts(
    tmp_path: Path, host: int, elastic: tuple[str, ...]
) -> None:
    (tmp_path / "hears.py").write_text(HEARS)
    name = tmp_path / "held"
    os.mkfifo(name)
    reader = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    bridge = os.open(name, os.O_WRONLY)
    os.set_blocking(reader, True)
    where = ["-H", ",".join(f"{one}:1" for one in TWO_HOSTS), "--port", str(free_port())]
    program = [sys.executable, str(tmp_path / "hears.py"), "handler", "1"]
    env = environ(KFCOMM_TOKEN="the token of the job", HELD=str(name))
    launchers = [
        subprocess.Popen(
            command("run", *where, "--self", own, *elastic, *program), env=env, stdin=subprocess.DEVNULL
        )
        for own in TWO_HOSTS
    ]  # fmt: skip
    try:
        told = b""
        while told.count(b"ready\n") < 2:
            told += os.read(reader, 4096)
        while told.count(b"heard") < 2:  # the other launcher may not listen yet: what came before is not for it
            have_ended = launchers[host].poll() is not None
            launchers[host].send_signal(signal.SIGUSR1)
            told += _read_within(reader, 1000)
            assert not have_ended or told.count(b"heard") == 2
        assert [one.wait() for one in launchers] == [0, 0]
    finally:
        for one in launchers:
            one.kill()
            one.wait()
        os.close(bridge)
        os.close(reader)


def _read_within(descriptor: int, milliseconds: int) -> bytes:
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return os.read(descriptor, 4096) if poll.poll(milliseconds) else b""


def statuses(launcher: Launcher) -> set[str]:
    """Of the launcher and its ranks."""
    ranks = [one for one in psutil.Process(launcher.process.pid).children() if "hears.py" in " ".join(one.cmdline())]
    return {one.status() for one in [psutil.Process(launcher.process.pid), *ranks]}


def test_sigtstp_stops_and_sigcont_resumes_the_whole_job(tmp_path: Path) -> None:
    (tmp_path / "hears.py").write_text(HEARS)
    with launched(tmp_path, "-n", "2", sys.executable, str(tmp_path / "hears.py"), "handler", "1") as launcher:
        assert launcher.lines(2) == ["ready"] * 2
        launcher.process.send_signal(signal.SIGTSTP)
        until(lambda: statuses(launcher) == {psutil.STATUS_STOPPED})
        launcher.process.send_signal(signal.SIGCONT)
        until(lambda: psutil.STATUS_STOPPED not in statuses(launcher))
        launcher.process.send_signal(signal.SIGUSR1)
        assert launcher.lines(2) == [f"heard [{int(signal.SIGUSR1)}]"] * 2
        assert launcher.process.wait() == 0
