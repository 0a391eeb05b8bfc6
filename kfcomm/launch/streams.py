"""What the ranks of this host write: to the logs all of it, to the display what is news.

The traceback of a rank that fails because of another is held back until it is known which failed first, and then
shortened to a line. Not for ever: where nothing comes of it (a process that does not end), it is shown whole. Of
tracebacks that several ranks print alike one is shown (see `repeats`).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Protocol

from kfcomm.common.sizes import ranges
from kfcomm.launch.exit_reports import LEAVING_WITHIN_S
from kfcomm.launch.launcher import Launcher, Verdict
from kfcomm.launch.screen import Stream
from kfcomm.launch.stdio import Log
from kfcomm.launch.tracebacks import HELD_FOR_S, Error, Repeats, Victims
from kfcomm.rendezvous.exit_report import ExitReport

_TRACEBACK = b"Traceback"
_HELD_FOR_S = LEAVING_WITHIN_S + 2.0


class Display(Protocol):
    """Where the output of the ranks goes."""

    async def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """What a rank has written; nothing at the end of the stream."""

    async def say(self, text: str) -> None:
        """A line of the launcher's own."""


class Streams:
    """The way from the ranks' pipes to the display and the logs.

    Args:
        display: where it is shown.
        logs: by rank, of all that were started so far; empty without.
        launcher: knows what has become of the job.

    Attributes:
        listen: called to hear what the ranks have said by now.
    """

    def __init__(self, display: Display, logs: Mapping[int, Log], launcher: Launcher) -> None:
        self.listen: Callable[[], None] = lambda: None
        self._display = display
        self._logs = logs
        self._launcher = launcher
        self._victims = Victims()
        self._repeats = Repeats()
        self._settling: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()
        self._timers: list[asyncio.TimerHandle] = []
        self._shows: set[asyncio.Task[None]] = set()

    def heard(self, report: ExitReport) -> None:
        """A rank said something of its end."""
        self._launcher.blame.heard(report)
        if report.at_s is not None and report.code:
            self._repeats.leaves(report.rank)
        if not report.is_printed or not report.text:
            return
        if not report.is_elsewhere or self._launcher.keep_going:
            self._repeats.told(report.rank, report.text)
        else:
            self._victims.expect(report)
            self._timers.append(asyncio.get_running_loop().call_later(_HELD_FOR_S, self._give_up))

    async def relay(self, rank: int, stream: Stream, data: bytes) -> None:
        """Pass on what a rank has written; nothing at its end."""
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
                # what it prints now it has told before
                self.listen()
            now_s = asyncio.get_running_loop().time()
            shown = self._victims.shown(rank, data)
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
        return not self._launcher.verdict.is_open and not self._launcher.keep_going

    async def _settle(self, *, is_over: bool = False) -> None:
        """Show what has been held back for long enough."""
        now_s = asyncio.get_running_loop().time()
        for rank, text in self._repeats.settle(now_s, is_ending=self._is_ending, is_over=is_over):
            await self._display.feed(rank, Stream.ERR, text)

    def _settle_soon(self) -> None:
        self._settling = None
        self._shows.add(asyncio.get_running_loop().create_task(self._tell()))

    async def _tell(self, *, is_over: bool = False) -> None:
        """Show what was held back, and tell who has what is not shown."""
        async with self._turn:
            await self._settle(is_over=is_over)
            if is_over or not self._is_ending:  # else more of them come soon
                for line in self._repeats.tell():
                    await self._display.say(line)
            if self._repeats.is_waiting and self._settling is None:
                self._settling = asyncio.get_running_loop().call_later(HELD_FOR_S, self._settle_soon)

    async def say(self, text: str) -> None:
        """A line of the launcher's own."""
        await self._display.say(text)

    async def finish(self, verdict: Verdict) -> None:
        """All streams have ended: show what was held back, and say what the logs lack."""
        self._cancel_timers()
        if self._shows:
            await asyncio.wait(self._shows)
        await self._tell(is_over=True)
        if verdict.failed is not None:
            await self._show_unprinted(verdict.failed.rank)
        await self._release(None if verdict.is_open else -1 if verdict.failed is None else verdict.failed.rank)
        for log in self._logs.values():
            if log.dropped.nbytes:
                await self._display.say(log.dropped.total())

    def close(self) -> None:
        """Close the logs."""
        self._cancel_timers()
        for log in self._logs.values():
            log.close()

    async def _show_unprinted(self, rank: int) -> None:
        """The rank that failed first was ended before it could print its traceback; it has told it."""
        said = self._launcher.blame.said(rank)
        if said is None or said.is_printed or not said.text:
            return
        if self._launcher.ended.get(rank) in (-signal.SIGTERM, -signal.SIGKILL):
            await self._display.feed(rank, Stream.ERR, said.text)

    def _give_up(self) -> None:
        """Nothing has come of what was said: show it."""
        if self._launcher.verdict.is_open:
            show = asyncio.get_running_loop().create_task(self._release(None))
            self._shows.add(show)

    async def _release(self, first: int | None) -> None:
        alike: dict[bytes, list[int]] = {}
        for rank, text in self._victims.release(first).items():
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
