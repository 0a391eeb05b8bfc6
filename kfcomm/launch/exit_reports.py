"""Exit reports of the ranks of this host, and which rank of the job failed first.

The launcher listens at an abstract Unix address, which needs no file and reaches a rank through any shell around it.
Only processes of this user are accepted. A rank's connection is never closed before the job is over: that would kill
the rank (see `kfcomm.rendezvous.exit_report`).

Order of exits alone is misleading: ranks that fail because of another often end before it. The failure of a rank that
reports another one as the cause is *secondary*, and passed over while another candidate exists or may appear: for a
short time if none is known (a killed process reports nothing, and its end is seen as soon), longer if a rank has
reported that it leaves with an error of its own. If none appears, the first secondary failure stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from kfcomm.common.sockets import credentials_of
from kfcomm.rendezvous.exit_report import MAX_NBYTES, RELEASED, SIGN_OF_LIFE, ExitReport
from kfcomm.rendezvous.host import BACKLOG
from kfcomm.rendezvous.keyvalue import Exit, Why

_UNKNOWN = -1


class ExitReports:
    """Receives the exit reports of the ranks of this host."""

    def __init__(
        self, ranks: range, heard: Callable[[ExitReport], None], let_go: Callable[[int], None], *, is_elastic: bool
    ) -> None:
        self._is_elastic = is_elastic
        self._let_go = let_go
        self.address = f"kfcomm-{secrets.token_hex(16)}"  # value of ``KFCOMM_LAUNCHER`` for the ranks
        self._ranks = ranks
        self._heard = heard
        self.lived_s: dict[int, float] = {}  # time of each rank's last sign of life, by the monotonic clock
        # process of each rank that has joined and not ended; it may be a child of the one that was started
        self.pids: dict[int, int] = {}
        self._lines: dict[socket.socket, int] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.address)
        self._listener.listen(BACKLOG)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def drain(self) -> None:
        """Read all pending reports."""
        self._accept()
        for line in list(self._lines):
            self._read(line)

    def close(self) -> None:
        """Close all connections, when no rank is left. May be called twice."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for line in list(self._lines):
            self._hang_up(line)

    def _accept(self) -> None:
        # The last call fails, which ends the loop: no connection is left.
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                if not credentials_of(line).is_same_user:
                    line.close()
                    continue
                line.setblocking(False)
                self._lines[line] = _UNKNOWN
                self._loop.add_reader(line, self._read, line)

    def _read(self, line: socket.socket) -> None:
        try:
            while data := line.recv(MAX_NBYTES):
                if data in (SIGN_OF_LIFE, RELEASED):
                    self._hear_sign(self._lines[line], data)
                    continue
                report = ExitReport.from_wire(data)
                if report is not None and self._may_speak(report.rank):
                    self._lines[line] = report.rank
                    self.pids[report.rank] = credentials_of(line).pid
                    self._heard(report)
        except BlockingIOError:
            return
        except OSError:
            pass
        # Only here, at the end of file: closing a connection kills its rank.
        self._hang_up(line)

    def _hear_sign(self, rank: int, sign: bytes) -> None:
        if rank != _UNKNOWN:
            self.lived_s[rank] = time.monotonic()
            if sign == RELEASED:
                self._let_go(rank)

    def _may_speak(self, rank: int) -> bool:
        """Whether a rank may report here; ranks of an elastic job that were started later have larger numbers."""
        return rank in self._ranks or (self._is_elastic and rank >= self._ranks.stop)

    def _hang_up(self, line: socket.socket) -> None:
        self.pids.pop(self._lines.pop(line, _UNKNOWN), None)
        self._loop.remove_reader(line)
        line.close()


CAUSE_WITHIN_S = 2.0
"""Time to wait for the cause if all failures so far are secondary."""
LEAVING_WITHIN_S = 6.0
"""The same if a rank has reported that it leaves: closing may take a rank 5 s."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that failed."""

    rank: int  # in the world
    code: int  # its return code (negative: minus a signal); if it has not ended, the one that its error leads to
    at_s: float  # time when it began to leave, or ended
    why: Why = Why.ITSELF  # reason of its end
    summary: str = ""  # its error in one line, if reported


@dataclass(slots=True)
class Blame:
    """Finds the rank that failed first, of a job of ``size`` ranks. Pure: the time is an argument."""

    size: int
    _said: dict[int, ExitReport] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _failed: list[Failure] = field(default_factory=list)
    _since_s: float = 0.0

    def heard(self, report: ExitReport) -> None:
        """Note a report; the last one of a rank counts."""
        self._said[report.rank] = report

    def said(self, rank: int) -> ExitReport | None:
        """Last report of a rank."""
        return self._said.get(rank)

    def ended(self, end: Exit, now_s: float) -> None:
        """Note the end of a rank; ``end`` tells whether a rank of another host blamed others."""
        self._ended.add(end.rank)
        if end.code == 0:
            return
        if not self._failed:
            self._since_s = now_s
        said = self._said.get(end.rank)
        if said is None or said.at_s is None:
            self._failed.append(Failure(end.rank, end.code, now_s, Why(end.why)))
        else:
            # A rank begins to leave before its process ends: that time is nearer to the cause.
            self._failed.append(Failure(end.rank, end.code, min(said.at_s, now_s), Why(end.why), said.summary))

    def outcome(self, now_s: float) -> Failure | float | None:
        """The first failure; or the time when to ask again at the latest; None without a failure."""
        if not self._failed:
            return None
        first = min((one for one in self._failed if one.why is not Why.ELSEWHERE), key=attrgetter("at_s"), default=None)
        leavers = [
            (said.at_s, said)
            for said in self._said.values()
            if said.at_s is not None and not said.is_elsewhere and said.rank not in self._ended
        ]
        # These have not ended, but began to leave with an error of their own before the first that has.
        leaving = [
            Failure(said.rank, said.code, at_s, summary=said.summary)
            for at_s, said in leavers
            if said.code != 0 and (first is None or at_s < first.at_s)
        ]
        if first is not None and not leaving:
            return first
        due_s = self._since_s + (LEAVING_WITHIN_S if leaving or (first is None and leavers) else CAUSE_WITHIN_S)
        # With all exits known there is nothing to wait for.
        if len(self._ended) < self.size and now_s < due_s:
            return due_s
        return min(leaving or ([first] if first is not None else self._failed), key=attrgetter("at_s"))
