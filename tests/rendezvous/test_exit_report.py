"""Exit reports of a rank, and its end without a launcher."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import CollectiveAborted, CollectiveTimeout, PeerLost
from kfcomm.rendezvous.exit_report import MAX_NBYTES, MAX_TEXT_NBYTES, ExitReport, exit_code_of, is_elsewhere

ROOT = Path(__file__).parents[2]
LOST = PeerLost("rank 1 is gone", rank=1)


def raised(error: BaseException, *, cause: BaseException | None = None, context: bool = False) -> BaseException:
    """The error, raised while another is handled, or because of it."""
    try:
        try:
            raise cause if cause is not None else KeyError
        except (KeyError, PeerLost):
            raise error from (None if context else cause)
    except (ValueError, SystemExit) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "blames_another"),
    [
        (None, False),
        (ValueError(), False),
        (LOST, True),
        (CollectiveAborted("x"), True),
        (CollectiveTimeout("x"), False),
        (ExceptionGroup("", [LOST, CollectiveAborted("x")]), True),
        (ExceptionGroup("", [LOST, ValueError()]), False),
        (raised(ValueError(), cause=LOST), True),
        (raised(SystemExit(3), cause=LOST), True),
        (raised(ValueError(), cause=LOST, context=True), False),
    ],
)
def test_whether_an_error_blames_another(error: BaseException | None, blames_another: bool) -> None:
    assert is_elsewhere(error) == blames_another


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit(259), 3),
        (SystemExit("text"), 1),
        (KeyboardInterrupt(), -signal.SIGINT),
        (asyncio.CancelledError(), 1),
        (ValueError(), 1),
    ],
)
def test_the_code_that_an_error_leads_to(error: BaseException | None, code: int) -> None:
    assert exit_code_of(error) == code


@given(st.binary(max_size=200))
def test_malformed_report_is_none(data: bytes) -> None:
    found = ExitReport.from_wire(data)
    assert found is None or ExitReport.from_wire(found.to_wire()) == found


def test_the_longest_fits() -> None:
    longest = ExitReport(1 << 16, 1e300, -64, True, "\U0001f600" * 400, bytes(MAX_TEXT_NBYTES), True)
    assert len(longest.to_wire()) <= MAX_NBYTES
    assert ExitReport.from_wire(longest.to_wire()) == longest


class Launcher:
    """Listens as a launcher does, and starts a rank."""

    def __init__(self) -> None:
        self.name = f"kfcomm-test-{os.urandom(8).hex()}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("\0" + self.name)
        self.listener.listen()

    def run(self, code: str) -> tuple[list[ExitReport], subprocess.CompletedProcess[str]]:
        """Run a rank; return its reports and its end."""
        rank = self.start(code)
        line, _ = self.listener.accept()
        with line:
            said = list(iter(lambda: line.recv(MAX_NBYTES), b""))
            output = rank.communicate()
        heard = [report for data in said if (report := ExitReport.from_wire(data)) is not None]
        assert len(heard) == len(said)
        return heard, subprocess.CompletedProcess([], rank.returncode, *output)

    def start(self, code: str) -> subprocess.Popen[str]:
        program = f"import os, sys, kfcomm\nfrom kfcomm.rendezvous import exit_report\n{code}"
        environ = {**os.environ, "KFCOMM_LAUNCHER": self.name, "KFCOMM_RANK": "0", "KFCOMM_SIZE": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, env=environ, stdout=-1, stderr=-1, stdin=-1, text=True
        )


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.listener.close()


def test_an_error_is_told_when_the_rank_leaves_and_as_it_is_printed(launcher: Launcher) -> None:
    (joined, left, printed), done = launcher.run("with kfcomm.sync.init(): raise kfcomm.PeerLost('why', rank=1)")
    assert joined == ExitReport(0)
    assert (left.code, left.is_elsewhere, left.is_printed) == (1, True, False)
    assert left.summary == "kfcomm.errors.PeerLost: why"
    assert printed.is_printed
    assert printed.at_s == left.at_s
    assert done.stderr == printed.text.decode()
    assert done.returncode == 1


def test_an_exit_code_is_told(launcher: Launcher) -> None:
    (_, left), done = launcher.run("with kfcomm.sync.init(): sys.exit(7)")
    assert (left.code, left.summary, left.is_elsewhere) == (7, "", False)
    assert done.returncode == 7


def test_an_asynchronous_rank_tells_the_same(launcher: Launcher) -> None:
    code = (
        "import asyncio\n"
        "async def main():\n"
        "    comm = await kfcomm.init()\n"
        "    try: raise ValueError('why')\n"
        "    finally: await comm.close()\n"
        "asyncio.run(main())"
    )
    (_, left, printed), done = launcher.run(code)
    assert left.summary == "ValueError: why"
    assert printed.at_s == left.at_s
    assert done.stderr.count("Traceback") == 1


def test_an_end_without_an_error_is_told_once(launcher: Launcher) -> None:
    (_, left), done = launcher.run("comm = kfcomm.sync.init()\ncomm.close()\ncomm.close()")
    assert (left.code, left.summary) == (0, "")
    assert done.returncode == 0


def test_rejoining_withdraws_the_report(launcher: Launcher) -> None:
    said, _ = launcher.run("for _ in range(2):\n    with kfcomm.sync.init(): pass")
    assert [report.at_s is None for report in said] == [True, False, True, False]


def test_a_hook_of_the_programs_own_is_called(launcher: Launcher) -> None:
    (_, printed), done = launcher.run(
        "sys.excepthook = lambda *_: sys.stderr.write('mine')\n"
        "exit_report.connect(os.environ['KFCOMM_LAUNCHER'], 0)\n"
        "1 / 0"
    )
    assert printed.summary == "ZeroDivisionError: division by zero"
    assert done.stderr == "mine"


def test_forked_child_does_not_report(launcher: Launcher) -> None:
    said, done = launcher.run(
        "comm = kfcomm.sync.init()\n"
        "child = os.fork()\n"
        "if child == 0: raise ValueError('in the child')\n"
        "os.waitpid(child, 0)\n"
        "comm.close()"
    )
    assert [report.summary for report in said] == ["", ""]
    assert "in the child" in done.stderr


def test_the_end_of_the_launcher_is_the_end_of_the_rank(launcher: Launcher) -> None:
    rank = launcher.start("kfcomm.sync.init()\nwhile True: pass")
    line, _ = launcher.listener.accept()
    assert ExitReport.from_wire(line.recv(MAX_NBYTES)) == ExitReport(0)
    line.close()
    rank.communicate()
    assert rank.returncode == -signal.SIGKILL


def test_a_launcher_that_is_not_there_is_no_harm(launcher: Launcher) -> None:
    launcher.listener.close()
    rank = launcher.start("with kfcomm.sync.init(): raise ValueError('why')")
    _, errors = rank.communicate()
    assert "ValueError: why" in errors
    assert rank.returncode == 1


@pytest.mark.parametrize("mode", ["short", "full"])
def test_uncaught_errors_end_at_the_lines_of_the_program(launcher: Launcher, mode: str) -> None:
    (*_, printed), done = launcher.run(
        "import asyncio\n"
        "async def main():\n"
        f"    async with kfcomm.init(traceback='{mode}') as comm:\n"
        "        await comm.all_reduce([1.0], strategy='rign')\n"
        "asyncio.run(main())"
    )
    files = {line.split('"')[1] for line in done.stderr.splitlines() if line.startswith("  File ")}
    assert "did you mean ring?" in printed.summary
    assert printed.text.decode() == done.stderr
    assert (files == {"<string>"}) == (mode == "short")


def test_errors_before_joining_end_at_the_lines_of_the_program(launcher: Launcher) -> None:
    launcher.listener.close()
    rank = launcher.start("try:\n    1 / 0\nexcept ZeroDivisionError:\n    kfcomm.sync.init(transport='tpc')")
    _, errors = rank.communicate()
    assert {line.split('"')[1] for line in errors.splitlines() if line.startswith("  File ")} == {"<string>"}
    assert "did you mean 'tcp'" in errors
