"""The launcher's end of what ranks tell of their ends (see `kfcomm.rendezvous.exit_report`).

It listens at an abstract Unix address, which needs no file and reaches a rank through any shell around it. Only
processes of this user are heard. A rank's connection is never closed before the job is over: its end would end the
rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable

from kfcomm.common.unix import credentials_of
from kfcomm.rendezvous.exit_report import MAX_NBYTES, RELEASED, SIGN_OF_LIFE, ExitReport
from kfcomm.rendezvous.listening import BACKLOG

_UNKNOWN = -1


class Farewells:
    """Hears the ranks of this host.

    Args:
        ranks: those that may speak.
        heard: called with each thing that one says.
        let_go: called with a rank that the others have let go.
        is_elastic: whether more may be started.

    Attributes:
        address: what the ranks are told, in ``KFCOMM_LAUNCHER``.
        lived_s: when each rank showed last that it runs, of those that ever did, by the monotonic clock.
        pids: the process of each rank that has joined and has not ended, which need not be the one that was started.
    """

    def __init__(
        self, ranks: range, heard: Callable[[ExitReport], None], *, let_go: Callable[[int], None] | None = None,
        is_elastic: bool = False,
    ) -> None:  # fmt: skip
        self._is_elastic = is_elastic
        self._let_go = let_go
        self.address = f"kfcomm-{secrets.token_hex(16)}"
        self._ranks = ranks
        self._heard = heard
        self.lived_s: dict[int, float] = {}
        self.pids: dict[int, int] = {}
        self._lines: dict[socket.socket, int] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind("\0" + self.address)
        self._listener.listen(BACKLOG)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def drain(self) -> None:
        """Hear all that has been said by now."""
        self._accept()
        for line in list(self._lines):
            self._read(line)

    def close(self) -> None:
        """Hang up, when no rank is left. May be called twice."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for line in list(self._lines):
            self._hang_up(line)

    def _accept(self) -> None:
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
                farewell = ExitReport.from_wire(data)
                if farewell is not None and self._may_speak(farewell.rank):
                    self._lines[line] = farewell.rank
                    self.pids[farewell.rank] = credentials_of(line).pid
                    self._heard(farewell)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._hang_up(line)

    def _hear_sign(self, rank: int, sign: bytes) -> None:
        if rank != _UNKNOWN:
            self.lived_s[rank] = time.monotonic()
            if sign == RELEASED and self._let_go is not None:
                self._let_go(rank)

    def _may_speak(self, rank: int) -> bool:
        """Those that were started later, in an elastic job, have larger numbers."""
        return rank in self._ranks or (self._is_elastic and rank >= self._ranks.stop)

    def _hang_up(self, line: socket.socket) -> None:
        self.pids.pop(self._lines.pop(line, _UNKNOWN), None)
        self._loop.remove_reader(line)
        line.close()
