"""One contender's processes, from start to end, and the turns they are given.

Between turns every worker waits in a blocking read, outside of its library. Output of the processes goes to a file; its
end is shown when something fails. Nothing that was started is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench import ROOT
from bench.compare.contenders.base import UnavailableError
from bench.compare.launch import Launch, Pythons
from bench.compare.worker import PACKET_NBYTES
from bench.compare.works import Mode, Work

PATIENCE_S = 180.0
"""Longest wait for a world to start, or for one turn."""
GRACE_S = 20.0
"""Time to leave in peace, at the end."""


class WorldError(Exception):
    """A world did not start, died, hangs or computes nonsense. The text says which, with the end of its output."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one world. The first three are seconds per call.

    Attributes:
        span_s: from the first rank's start to the last rank's end.
        slowest_s: the longest time of any rank.
        cpu_s: CPU time of all ranks together.
        parked_s: how long the ranks had waited for this turn, all together.
        parked_cpu_s: CPU time that they used meanwhile.
    """

    span_s: float
    slowest_s: float
    cpu_s: float
    parked_s: float = 0.0
    parked_cpu_s: float = 0.0

    @classmethod
    def of(cls, replies: Iterable[dict[str, float]], calls: int) -> Turn:
        """From the replies of all ranks."""
        ranks = list(replies)
        return cls(
            span_s=(max(rank["end_s"] for rank in ranks) - min(rank["start_s"] for rank in ranks)) / calls,
            slowest_s=max(rank["end_s"] - rank["start_s"] for rank in ranks) / calls,
            cpu_s=sum(rank["cpu_s"] for rank in ranks) / calls,
            parked_s=sum(rank["parked_s"] for rank in ranks),
            parked_cpu_s=sum(rank["parked_cpu_s"] for rank in ranks),
        )


class World:
    """The processes of one contender. A context manager: they end with it.

    Raises:
        WorldError: from the constructor and from ``turn``.
        LookupError: from the constructor: the contender is not installed.
        UnavailableError: from the constructor: the contender cannot be used on this machine.
    """

    def __init__(self, launch: Launch, ranks: int, pythons: Pythons, folder: Path) -> None:
        self.title = launch.title
        self.versions: dict[str, str] = {}
        self._folder = folder
        self._folder.mkdir()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: list[socket.socket] = []
        commands = launch.commands(pythons, ranks)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(folder / "turns"))
                listener.listen(ranks)
                self._start(commands)
                self._gather(listener, ranks)
        except BaseException:
            self._end(0.0)
            raise

    def turn(self, work: Work, mode: Mode, calls: int) -> Turn:
        """Every rank does the work ``calls`` times."""
        self._tell({"work": work.name, "mode": mode, "calls": calls})
        return Turn.of(self._replies(), calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(WorldError):
            self._tell({"work": None})
        self._end(GRACE_S if error is None else 0.0)

    def _start(self, commands: list[tuple[list[str], dict[str, str]]]) -> None:
        meeting = self._folder / "meeting"
        meeting.mkdir()
        common = {"COMPARE_SOCKET": str(self._folder / "turns"), "COMPARE_MEETING": str(meeting)}
        with (self._folder / "log").open("wb") as log:
            for command, settings in commands:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=inherited() | common | settings,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        process_group=0,  # not a session: ranks that yield would yield to their own session alone
                    )
                )

    def _gather(self, listener: socket.socket, ranks: int) -> None:
        while len(self._workers) < ranks:
            self._await(listener)
            worker, _ = listener.accept()
            self._workers.append(worker)
            report = self._message(worker)
            if "unavailable" in report:
                raise UnavailableError(report["unavailable"])
            self.versions.update(report["versions"])

    def _tell(self, message: dict[str, Any]) -> None:
        packet = json.dumps(message).encode()
        for worker in self._workers:
            try:
                worker.send(packet)
            except OSError as error:
                raise self._failure("a rank has gone") from error

    def _replies(self) -> list[dict[str, float]]:
        return [self._message(worker) for worker in self._workers]

    def _message(self, worker: socket.socket) -> dict[str, Any]:
        self._await(worker)
        packet = worker.recv(PACKET_NBYTES)
        if not packet:
            raise self._failure("a rank has gone")
        return dict(json.loads(packet))

    def _await(self, readable: socket.socket) -> None:
        """Returns when there is something to read. The end of any process is an end of the waiting as well."""
        poll = select.poll()
        poll.register(readable, select.POLLIN)
        with contextlib.ExitStack() as stack:
            for process in self._processes:
                ends = os.pidfd_open(process.pid)
                stack.callback(os.close, ends)
                poll.register(ends, select.POLLIN)
            ready = [fd for fd, _ in poll.poll(PATIENCE_S * 1000)]
        if readable.fileno() in ready:
            return
        raise self._failure("a process has ended" if ready else f"no word within {PATIENCE_S:.0f} s")

    def _failure(self, what: str) -> WorldError:
        tail = (self._folder / "log").read_text(errors="replace").splitlines()[-15:]
        return WorldError("\n  ".join([f"{self.title}: {what}", *tail]))

    def _end(self, grace_s: float) -> None:
        """Waits for the processes; those that stay are asked to end, then killed."""
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            deadline_s = time.monotonic() + grace_s
            for process in self._processes:
                if sign is not None and process.poll() is None:
                    os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline_s - time.monotonic(), 0.1))
            grace_s = 5.0
        for worker in self._workers:
            worker.close()


def inherited() -> dict[str, str]:
    """This process's environment, less what would tell a library that it is part of some other job."""
    foreign = (
        "KFCOMM_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_",
        "OMPI_",
        "PMI",
        "SLURM_",
        "MPIR_",
        "FI_",
        "UCX_",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
