"""What the launcher reads, and which ranks get it.

One rank alone gets the very file or pipe that the launcher has, and takes of it what it wants. A terminal cannot be
handed on, for ranks are in the background there; and what several ranks shall have each must be copied: then the
launcher reads, and no further than the slowest of these ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence

from kfcomm.common.sockets import readable, writable

_STANDARD_INPUT = 0
_READ_NBYTES = 1 << 12
_LOOK_EVERY_S = 0.5


class Feed:
    """The standard input of the ranks.

    Args:
        ranks: those of this host that get what is read.
        answered: called when a line has been typed at the terminal.
    """

    def __init__(self, ranks: Sequence[int], answered: Callable[[], None]) -> None:
        self._ranks = frozenset(ranks)
        self._answered = answered
        self._is_terminal = os.isatty(_STANDARD_INPUT)
        self._is_direct = len(self._ranks) == 1 and not self._is_terminal
        self._ends: set[int] = set()

    @contextlib.contextmanager
    def open_for(self, rank: int) -> Iterator[int]:
        """The standard input of one rank, while it is started."""
        if rank not in self._ranks:
            yield subprocess.DEVNULL
        elif self._is_direct:
            yield _STANDARD_INPUT
        else:
            source, end = os.pipe()
            os.set_blocking(end, False)
            self._ends.add(end)
            try:
                yield source
            finally:
                os.close(source)

    async def run(self) -> None:
        """Copy what is read to the ranks, until it ends or nobody takes it any more."""
        if not self._ends:
            return
        before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # else a read in the background stops the launcher
        try:
            while self._ends and (data := await self._read()):
                if self._is_terminal and b"\n" in data:
                    self._answered()
                for end in list(self._ends):
                    await self._write(end, data)
        finally:
            signal.signal(signal.SIGTTIN, before)
            self.close()

    def close(self) -> None:
        """The ranks read to the end of what they have got. May be called twice."""
        while self._ends:
            os.close(self._ends.pop())

    async def _read(self) -> bytes:
        """What has come; nothing at the end."""
        while True:
            if self._is_terminal and not _is_ours():
                # what is typed now is for the shell
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            with contextlib.suppress(PermissionError):  # a file can always be read, and not be waited for
                await readable(_STANDARD_INPUT)
            try:
                return os.read(_STANDARD_INPUT, _READ_NBYTES)
            except BlockingIOError:
                continue
            except OSError:
                if not self._is_terminal:
                    return b""
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _write(self, end: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(end, view) :]
                    continue
                await writable(end)
        except BrokenPipeError:
            self._ends.discard(end)
            os.close(end)


def _is_ours() -> bool:
    """Whether this process is in the foreground of its terminal, if that is still there."""
    try:
        return os.tcgetpgrp(_STANDARD_INPUT) == os.getpgrp()
    except OSError:
        return False
