"""`kfcomm run` as a real process, with a check that all its child processes have ended.

Ranks open a named pipe for writing and leave it open to whatever they start; they write a line when they are
ready. The pipe's end is the end of all of them: nothing here looks at a clock.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TOKEN = "the token of this job"


def environ(**more: str) -> dict[str, str]:
    """The environment of the tests without any setting of kfcomm, and with what is asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KFCOMM_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def command(*arguments: str) -> list[str]:
    # not -X dev: asyncio would then complain about a machine that is merely slow
    return [sys.executable, "-W", "error", "-m", "kfcomm", *arguments]


def finished(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`kfcomm` with these arguments, run to its end."""
    return subprocess.run(
        command(*arguments), env=env or environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


class Launcher:
    """A running `kfcomm run`, and the pipe that its ranks hold open."""

    def __init__(self, process: subprocess.Popen[str], reader: int, bridge: int) -> None:
        self.process = process
        self._reader = reader
        # keeps the pipe from ending before the first rank has opened it
        self._bridge: int | None = bridge
        self._buffer = b""

    def lines(self, count: int) -> list[str]:
        """The next lines that the ranks write to the pipe, sorted."""
        while self._buffer.count(b"\n") < count:
            ended = os.pidfd_open(self.process.pid)
            ready, _, _ = select.select([self._reader, ended], [], [])
            os.close(ended)
            assert self._reader in ready, self.process.communicate()
            self._buffer += os.read(self._reader, 4096)
        *found, self._buffer = self._buffer.split(b"\n", count)
        return sorted(line.decode() for line in found)

    def wait_for_the_last_holder(self) -> None:
        """Returns when every process that held the pipe has ended."""
        self._close_bridge()
        while os.read(self._reader, 4096):
            pass

    def descendants(self) -> list[int]:
        """Descriptors of everything that the launcher has started, the guardian included."""
        return [os.pidfd_open(each.pid) for each in psutil.Process(self.process.pid).children(recursive=True)]

    def _close_bridge(self) -> None:
        if self._bridge is not None:
            os.close(self._bridge)
            self._bridge = None

    def close(self) -> None:
        """End the launcher, if it has not ended, and wait for its ranks."""
        self.process.kill()
        self.process.communicate()
        self.wait_for_the_last_holder()
        os.close(self._reader)


def listed(*line: str) -> list[str]:
    """The command on this host."""
    return list(line)


@contextlib.contextmanager
def launched(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, inside: Callable[..., list[str]] = listed
) -> Iterator[Launcher]:
    """`kfcomm run` with these arguments, on the host of ``inside``; its ranks find the pipe's name in ``HELD``."""
    name = folder / "held"
    os.mkfifo(name)
    reader = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
    bridge = os.open(name, os.O_WRONLY)
    os.set_blocking(reader, True)
    process = subprocess.Popen(
        inside(*command("run", *arguments)),
        env={**(env or environ()), "HELD": str(name)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    launcher = Launcher(process, reader, bridge)
    try:
        yield launcher
    finally:
        launcher.close()
        name.unlink()


def wait_for_the_end_of(descriptors: list[int]) -> None:
    """Returns when all these processes have ended; closes their descriptors."""
    for descriptor in descriptors:
        select.select([descriptor], [], [])
        os.close(descriptor)
