"""From the pipes of the ranks to the terminal and the log files.

A rank whose output cannot be written yet is not read any further: the pipe fills and the rank waits, so that
memory stays bounded. Writing happens in a thread, for a terminal or pager that does not take it must not stop
the launcher from hearing signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Awaitable, Callable

from kfcomm.launch.screen import Screen, Stream, Writes

_READ_NBYTES = 1 << 16


class Output:
    """Where everything is written. ``on_broken`` is called once, when nobody reads any more (``| head``)."""

    def __init__(self, screen: Screen, descriptors: dict[Stream, int], on_broken: Callable[[], None]) -> None:
        self._screen = screen
        self._descriptors = descriptors
        self._on_broken = on_broken
        self._broken = False
        self._lock = asyncio.Lock()

    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Pass on what came from a rank; nothing at its end."""
        async with self._lock:
            await self._write(self._screen.feed(rank, stream, data) if data else self._screen.end(rank, stream))

    async def say(self, text: str) -> None:
        """A line of the launcher's own."""
        async with self._lock:
            await self._write(self._screen.say(text))

    async def _write(self, writes: Writes) -> None:
        if not writes or self._broken:
            return
        try:
            await asyncio.to_thread(self._write_now, writes)
        except OSError:
            self._broken = True
            self._on_broken()

    def _write_now(self, writes: Writes) -> None:
        for stream, data in writes:
            _write_all(self._descriptors[stream], data)


class Pump:
    """Reads one pipe of a rank until it ends, or until `finish` and nothing more is in it."""

    def __init__(self, descriptor: int, sink: Callable[[bytes], Awaitable[None]]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._sink = sink
        self._finishing = False
        self._waiter: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Pass on all that comes, then ``b""``."""
        while data := await self._read():
            await self._sink(data)
        await self._sink(b"")

    def finish(self) -> None:
        """Stop waiting: a process that got away may keep the pipe open for ever."""
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


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # another program has made the terminal non-blocking
            select.select([], [descriptor], [])
