"""What the ranks of this host write: to the logs all of it, to the display what is news.

The traceback of a rank that fails because of another is held back until it is known which failed first, and then
shortened to a line. Not for ever: where nothing comes of it (a process that does not end), it is shown whole.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Protocol

from kfcomm.launch.blame import LEAVING_WITHIN_S
from kfcomm.launch.output import Log
from kfcomm.launch.screen import Stream
from kfcomm.launch.supervisor import Supervisor, Verdict
from kfcomm.launch.victims import Victims
from kfcomm.rendezvous.farewell import Farewell

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
        supervisor: knows what has become of the job.

    Attributes:
        listen: called to hear what the ranks have said by now.
    """

    def __init__(self, display: Display, logs: Mapping[int, Log], supervisor: Supervisor) -> None:
        self.listen: Callable[[], None] = lambda: None
        self._display = display
        self._logs = logs
        self._supervisor = supervisor
        self._victims = Victims()
        self._timers: list[asyncio.TimerHandle] = []
        self._shows: set[asyncio.Task[None]] = set()

    def heard(self, farewell: Farewell) -> None:
        """A rank said something of its end."""
        self._supervisor.blame.heard(farewell)
        if farewell.is_elsewhere and farewell.is_printed and farewell.text and not self._supervisor.keep_going:
            self._victims.expect(farewell)
            self._timers.append(asyncio.get_running_loop().call_later(_HELD_FOR_S, self._give_up))

    async def relay(self, rank: int, stream: Stream, data: bytes) -> None:
        """Pass on what a rank has written; nothing at its end."""
        log = self._logs.get(rank)
        if log is not None and (news := log.write(data)) is not None:
            await self._display.say(news)
        shown = data
        if stream is Stream.ERR:
            if _TRACEBACK in data:
                # what it prints now it has told before
                self.listen()
            shown = self._victims.shown(rank, data)
        if shown:
            await self._display.feed(rank, stream, shown)
        if not data:
            await self._display.feed(rank, stream, b"")

    async def say(self, text: str) -> None:
        """A line of the launcher's own."""
        await self._display.say(text)

    async def finish(self, verdict: Verdict) -> None:
        """All streams have ended: show what was held back, and say what the logs lack."""
        self._cancel_timers()
        if self._shows:
            await asyncio.wait(self._shows)
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
        said = self._supervisor.blame.said(rank)
        if said is None or said.is_printed or not said.text:
            return
        if self._supervisor.ended.get(rank) in (-signal.SIGTERM, -signal.SIGKILL):
            await self._display.feed(rank, Stream.ERR, said.text)

    def _give_up(self) -> None:
        """Nothing has come of what was said: show it."""
        if self._supervisor.verdict.is_open:
            show = asyncio.get_running_loop().create_task(self._release(None))
            self._shows.add(show)

    async def _release(self, first: int | None) -> None:
        for rank, text in self._victims.release(first).items():
            await self._display.feed(rank, Stream.ERR, text)

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()
