"""Standard input and output of the ranks: pipes to the terminal and the log files.

If the output of a rank cannot be written yet, its pipe is not read any further: it fills and the rank waits, so that
memory stays bounded. Writing happens in a thread, so that a blocked terminal or pager does not keep the launcher from
handling signals.

If one rank alone gets the standard input, it inherits the very file or pipe of the launcher. A terminal cannot be
inherited, since ranks are in its background, nor can input that several ranks get: then the launcher reads and copies
it, no further than the slowest of these ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

from kfcomm.common.sockets import readable, writable
from kfcomm.launch.screen import Screen, Stream, Writes

_READ_NBYTES = 1 << 16


_AT_ONCE_NBYTES = 4096
"""A writable pipe takes this much without blocking (PIPE_BUF)."""
_LOOK_EVERY_MS = 100

_NAMES = {Stream.OUT: "standard output", Stream.ERR: "standard error"}
_OTHER = {Stream.OUT: Stream.ERR, Stream.ERR: Stream.OUT}


class Output:
    """Writes all output. ``on_broken`` is called once, when its reader is gone (``| head``).

    Other errors of writing (a full disk, a closed descriptor) do not affect the job: the output is dropped and counted,
    with a message on the other stream, at the first error and at the end.
    """

    def __init__(self, screen: Screen, on_broken: Callable[[], None], descriptors: Mapping[Stream, int]) -> None:
        self._screen = screen
        self._descriptors = descriptors
        self._on_broken = on_broken
        self._broken = False
        self._abandoned = False
        self._dropped = {stream: Dropped(_NAMES[stream]) for stream in Stream}
        self._lock = asyncio.Lock()

    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Write output of a rank; empty data at its end."""
        async with self._lock:
            now_s = time.monotonic()
            await self._write(self._screen.feed(rank, stream, data, now_s) if data else self._screen.end(rank, stream))

    async def say(self, text: str) -> None:
        """Write a line of the launcher."""
        async with self._lock:
            await self._write(self._screen.say(text))

    async def finish(self) -> None:
        """Write how much was dropped."""
        for stream, dropped in self._dropped.items():
            if dropped.nbytes:
                async with self._lock:
                    await self._write([(_OTHER[stream], f"kfcomm: {dropped.total()}\n".encode())])

    def answered(self) -> None:
        """Note that a line was typed at the terminal, after the incomplete one."""
        self._screen.answered()

    def abandon(self) -> None:
        """Stop waiting for a blocked terminal or pager."""
        self._abandoned = True

    async def _write(self, writes: Writes) -> None:
        if not writes or self._broken:
            return
        try:
            await asyncio.to_thread(self._write_now, writes)
        except BrokenPipeError:
            self._broken = True
            self._on_broken()

    def _write_now(self, writes: Writes) -> None:
        for stream, data in writes:
            try:
                self._write_all(self._descriptors[stream], data)
            except BrokenPipeError:
                raise
            except OSError as error:
                first = self._dropped[stream].add(len(data), error)
                if first is not None:
                    with contextlib.suppress(OSError):
                        self._write_all(self._descriptors[_OTHER[stream]], f"kfcomm: {first}\n".encode())

    def _write_all(self, descriptor: int, data: bytes) -> None:
        """Write to a descriptor; its blocking mode is left alone, since other processes may share it."""
        view = memoryview(data)
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while view:
            # Polling in steps, so that an abandoned write returns soon.
            if poll.poll(0 if self._abandoned else _LOOK_EVERY_MS):
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(descriptor, view[:_AT_ONCE_NBYTES]) :]
            elif self._abandoned:
                raise TimeoutError(errno.ETIMEDOUT, "nobody takes it")


class Dropped:
    """Counts bytes that could not be written to one place."""

    def __init__(self, name: str) -> None:
        self.nbytes = 0
        self._name = name
        self._reason = ""

    def add(self, nbytes: int, error: OSError) -> str | None:
        """Count; return a message the first time."""
        is_first = self.nbytes == 0
        self.nbytes += nbytes
        self._reason = error.strerror or str(error)
        return f"{self._name} cannot be written ({self._reason}): it is dropped, the job goes on" if is_first else None

    def total(self) -> str:
        """Message at the end."""
        return f"{self.nbytes} bytes of {self._name} could not be written ({self._reason})"


class Log:
    """Log file of one rank; truncated when it is opened, at the first write at the latest."""

    def __init__(self, path: Path) -> None:
        self.dropped = Dropped(str(path))
        self._path = path
        self._file: FileIO | None = None

    def open(self) -> FileIO:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
        return self._file

    def write(self, data: bytes) -> str | None:
        """Write or drop data; return a message the first time it is dropped."""
        view = memoryview(data)
        try:
            while view:
                view = view[self.open().write(view) :]
        except OSError as error:
            return self.dropped.add(len(view), error)
        return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def open_standard_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if they are closed, so that no socket or file gets their numbers.

    Reading them gives nothing, and writing fails, as before.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free is this one
            os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class Pump:
    """Reads one pipe of a rank until it ends, or until `finish` and nothing more is in it."""

    def __init__(self, descriptor: int, sink: Callable[[bytes], Awaitable[None]]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._sink = sink
        self._finishing = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Forward all output, then ``b""``."""
        while data := await self._read():
            await self._sink(data)
        await self._sink(b"")

    def finish(self) -> None:
        """Stop waiting: an escaped process may keep the pipe open for ever."""
        self._finishing = True
        self._wake()

    async def _read(self) -> bytes:
        while True:
            with contextlib.suppress(BlockingIOError):
                return os.read(self._descriptor, _READ_NBYTES)
            if self._finishing:
                return b""
            await self._readable()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        loop.add_reader(self._descriptor, self._wake)
        try:
            await self._waiter
        finally:
            loop.remove_reader(self._descriptor)
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_STANDARD_INPUT = 0
_FEED_NBYTES = 1 << 12
_FOREGROUND_EVERY_S = 0.5


class Feed:
    """The standard input of the ranks.

    Args:
        ranks: those of this host that get the input.
        answered: called when a line was typed at the terminal.
    """

    def __init__(self, ranks: Sequence[int], answered: Callable[[], None]) -> None:
        self._ranks = frozenset(ranks)
        self._answered = answered
        self._is_terminal = os.isatty(_STANDARD_INPUT)
        self._is_direct = len(self._ranks) == 1 and not self._is_terminal
        self._ends: set[int] = set()

    @contextlib.contextmanager
    def open_for(self, rank: int) -> Iterator[int]:
        """Standard input of one rank, while it is started."""
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
        """Copy the input to the ranks, until it ends or all of them have closed it."""
        if not self._ends:
            return
        before = signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # it would stop a background reader
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
        """Close the pipes; ranks can still read their contents. May be called twice."""
        while self._ends:
            os.close(self._ends.pop())

    async def _read(self) -> bytes:
        """Read input; empty at the end."""
        while True:
            if self._is_terminal and not _is_ours():
                # in the background: the shell reads what is typed now
                await asyncio.sleep(_FOREGROUND_EVERY_S)
                continue
            with contextlib.suppress(PermissionError):  # files are always readable, and epoll refuses them
                await readable(_STANDARD_INPUT)
            try:
                return os.read(_STANDARD_INPUT, _FEED_NBYTES)
            except BlockingIOError:
                continue
            except OSError:
                if not self._is_terminal:
                    return b""
                await asyncio.sleep(_FOREGROUND_EVERY_S)

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
    """Whether this process is in the foreground of its terminal."""
    try:
        return os.tcgetpgrp(_STANDARD_INPUT) == os.getpgrp()
    except OSError:
        return False
