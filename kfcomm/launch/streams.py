"""Standard streams of the ranks of this host: output to the logs, and without repetitions to the display; input.

If the output of a rank cannot be written yet, its pipe is not read any further: it fills and the rank waits, so that
memory stays bounded.

The traceback of a rank that fails because of another is held back until the first failure is known, and then
shortened to a line; after a bounded time it is shown whole. Of equal tracebacks of several ranks one is shown (see
`tracebacks`).

If one rank alone gets the standard input, it inherits the very file or pipe of the launcher. A terminal cannot be
inherited, since ranks are in its background, nor can input that several ranks get: then the launcher reads and copies
it, no further than the slowest of these ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Protocol

from kfcomm.common.sizes import ranges
from kfcomm.common.sockets import readable, writable
from kfcomm.launch.exit_reports import LEAVING_WITHIN_S
from kfcomm.launch.launcher import JobOutcome, Launcher
from kfcomm.launch.output import Log, Stream
from kfcomm.launch.tracebacks import HELD_FOR_S, Error, Repeats, SecondaryFailures
from kfcomm.rendezvous.exit_report import ExitReport

_READ_NBYTES = 1 << 16
_TRACEBACK = b"Traceback"
_HELD_FOR_S = LEAVING_WITHIN_S + 2.0


class Display(Protocol):
    """Destination of the ranks' output."""

    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Take output of a rank; empty data at the end of the stream."""

    async def say(self, text: str) -> None:
        """Take a line of the launcher."""


class OutputStreams:
    """Relay from the pipes of the ranks to the display, and to the logs by rank (empty without logs)."""

    def __init__(self, display: Display, logs: Mapping[int, Log], launcher: Launcher) -> None:
        self._display = display
        self._logs = logs
        self._launcher = launcher
        self._secondary = SecondaryFailures()
        self._repeats = Repeats()
        self._settling: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()
        self._timers: list[asyncio.TimerHandle] = []
        self._shows: set[asyncio.Task[None]] = set()  # begun by timers; `finish` waits for them

    def heard(self, report: ExitReport) -> None:
        """Handle an exit report."""
        self._launcher.blame.heard(report)
        if report.at_s is not None and report.code:
            self._repeats.leaves(report.rank)
        if not report.is_printed or not report.text:
            return
        if not report.is_elsewhere or self._launcher.keep_going:
            self._repeats.told(report.rank, report.text)
        else:
            self._secondary.expect(report)
            self._timers.append(asyncio.get_running_loop().call_later(_HELD_FOR_S, self._give_up))

    async def relay(self, rank: int, stream: Stream, data: bytes) -> None:
        """Relay output of a rank; empty data at its end."""
        log = self._logs.get(rank)
        if log is not None and (news := log.write(data)) is not None:
            await self._display.say(news)
        if stream is Stream.ERR:
            await self._relay_errors(rank, data)
        elif data:
            await self._display.feed(rank, stream, data)
        if not data:
            await self._display.feed(rank, stream, b"")

    async def _relay_errors(self, rank: int, data: bytes) -> None:
        async with self._turn:
            if _TRACEBACK in data:
                # the rank reports a traceback before it prints it
                self._launcher.ranks.reports.drain()
            now_s = asyncio.get_running_loop().time()
            self._repeats.is_interrupted = self._launcher.outcome.signal == signal.SIGINT
            shown = self._secondary.shown(rank, data)
            shown = self._repeats.shown(rank, shown, now_s) if shown else b""
            if not data:
                shown += self._repeats.shown(rank, b"", now_s)
            if shown:
                await self._display.feed(rank, Stream.ERR, shown)
            if self._repeats.is_waiting:
                await self._settle()
                if self._settling is None:
                    self._settling = asyncio.get_running_loop().call_later(HELD_FOR_S, self._settle_soon)

    @property
    def _is_ending(self) -> bool:
        """Whether all ranks have been asked to end."""
        return not self._launcher.outcome.is_open and not self._launcher.keep_going

    async def _settle(self, *, is_over: bool = False) -> None:
        """Show output that was held back long enough."""
        now_s = asyncio.get_running_loop().time()
        for rank, text in self._repeats.settle(now_s, is_ending=self._is_ending, is_over=is_over):
            await self._display.feed(rank, Stream.ERR, text)

    def _settle_soon(self) -> None:
        self._settling = None
        self._shows.add(asyncio.get_running_loop().create_task(self._tell()))

    async def _tell(self, *, is_over: bool = False) -> None:
        """Show held-back output, and lines on tracebacks that are not shown."""
        async with self._turn:
            await self._settle(is_over=is_over)
            if is_over or not self._is_ending:  # otherwise more of them follow soon
                for line in self._repeats.tell():
                    await self._display.say(line)
            if self._repeats.is_waiting and self._settling is None:
                self._settling = asyncio.get_running_loop().call_later(HELD_FOR_S, self._settle_soon)

    @property
    def common(self) -> frozenset[str]:
        """Messages of errors that were told once for several ranks."""
        return frozenset(self._repeats.common)

    async def say(self, text: str) -> None:
        """Take a line of the launcher."""
        await self._display.say(text)

    async def finish(self, outcome: JobOutcome) -> None:
        """All streams have ended: show held-back output, and what the logs lack."""
        self._cancel_timers()
        if self._shows:
            await asyncio.wait(self._shows)
        await self._tell(is_over=True)
        if outcome.failed is not None:
            await self._show_unprinted(outcome.failed.rank)
        await self._release(None if outcome.is_open else -1 if outcome.failed is None else outcome.failed.rank)
        for log in self._logs.values():
            if log.dropped.nbytes:
                await self._display.say(log.dropped.total())

    def close(self) -> None:
        """Close the logs."""
        self._cancel_timers()
        for log in self._logs.values():
            log.close()

    async def _show_unprinted(self, rank: int) -> None:
        """Show the reported traceback of the first failed rank, if it was killed before it could print it."""
        said = self._launcher.blame.said(rank)
        if said is None or said.is_printed or not said.text:
            return
        if self._launcher.ended.get(rank) in (-signal.SIGTERM, -signal.SIGKILL):
            await self._display.feed(rank, Stream.ERR, said.text)

    def _give_up(self) -> None:
        """Show held-back tracebacks: no first failure was found in time."""
        if self._launcher.outcome.is_open:
            show = asyncio.get_running_loop().create_task(self._release(None))
            self._shows.add(show)

    async def _release(self, first: int | None) -> None:
        alike: dict[bytes, list[int]] = {}
        for rank, text in self._secondary.release(first).items():
            alike.setdefault(text, []).append(rank)
        for text, ranks in alike.items():
            is_line = text.count(b"\n") == 1
            if len(ranks) == 1 or not is_line:
                await self._display.feed(ranks[0], Stream.ERR, text)
            if len(ranks) > 1:
                shown = "" if is_line else f" (as shown for rank {ranks[0]})"
                await self._display.say(f"ranks {ranges(sorted(ranks))}: {Error.of(text).summary}{shown}")

    def _cancel_timers(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None
        while self._timers:
            self._timers.pop().cancel()


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
            # Only when the pipe is empty: what was written before `finish` is not lost.
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
    """Standard input of the ranks; ``answered`` is called when a line was typed at the terminal."""

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
                    # One after the other: the input is read no further than the slowest rank has taken it.
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
