"""The life of a job: its ranks are started, watched, and ended together.

- The first rank to fail, on any host, gives the job its exit code, and the others are asked to end (unless the
  job keeps going). What has not ended after the grace is killed.
- A signal to the launcher is passed on to every rank's group; a second one kills at once.
- Each end is reported to the store, so that peers learn of it even where something else keeps the sockets open.
- When `run` returns, no process of the job is left on this host; nor if the launcher is killed (see `guardian`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kfcomm.errors import RendezvousError
from kfcomm.launch.process import Child, shell_code


class Exits(Protocol):
    """Where ends are reported and learnt of: the store, or a client of it."""

    async def report_exit(self, rank: int, code: int) -> None:
        """Report the end of a rank."""

    def watch_exits(self) -> AsyncIterator[tuple[int, int]]:
        """Rank and return code of each that has ended or ends; ends when the store does."""
        ...


@dataclass(slots=True)
class Verdict:
    """How a job ended; the first cause stands.

    Attributes:
        failed: the rank that failed first and its return code.
        signal: the signal by which the launcher was asked to end.
        lost: whether the first host's launcher went away while ranks were running.
    """

    failed: tuple[int, int] | None = None
    signal: int | None = None
    lost: bool = False

    @property
    def is_open(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return self.failed is None and self.signal is None and not self.lost

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher."""
        if self.signal is not None:
            return 128 + self.signal
        if self.failed is not None:
            return shell_code(self.failed[1])
        return int(self.lost)


@dataclass(slots=True)
class Supervisor:
    """Watches the ranks of one host.

    Attributes:
        size: number of ranks of the job.
        children: the ranks on this host.
        grace_s: seconds between asking and killing.
        keep_going: whether the others run on when one fails.
    """

    size: int
    children: Mapping[int, Child]
    grace_s: float
    keep_going: bool
    verdict: Verdict = field(default_factory=Verdict)
    _ended: dict[int, int] = field(default_factory=dict)
    _killer: asyncio.TimerHandle | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self, exits: Exits) -> Verdict:
        """Watch until all ranks of this host have ended, and all others have too, or the job has failed.

        Args:
            exits: where ends are reported; those of other hosts are learnt of there.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self._watch_others(exits))
                for rank, child in self.children.items():
                    tasks.create_task(self._follow(rank, child, exits))
                while not self._is_over(watcher):
                    await self._changed.wait()
                    self._changed.clear()
                watcher.cancel()
        finally:
            if self._killer is not None:
                self._killer.cancel()
        return self.verdict

    def interrupt(self, number: int) -> None:
        """The launcher was asked to end by a signal: pass it on; if the ranks are ending already, kill."""
        if self.verdict.is_open:
            self.verdict.signal = number
        # Python programs ignore SIGPIPE, and it was not they who wrote where nobody reads
        self._end(signal.SIGTERM if number == signal.SIGPIPE else number)

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        if not self._ended.keys() >= self.children.keys():
            return False
        given_up = not self.verdict.is_open and not (self.keep_going and self.verdict.failed)
        return given_up or len(self._ended) == self.size or watcher.done()

    async def _follow(self, rank: int, child: Child, exits: Exits) -> None:
        code = await child.ended()
        self._note(rank, code)
        with contextlib.suppress(RendezvousError):
            await exits.report_exit(rank, code)

    async def _watch_others(self, exits: Exits) -> None:
        async for rank, code in exits.watch_exits():
            self._note(rank, code)
        if not self._ended.keys() >= self.children.keys() and self.verdict.is_open:
            self.verdict.lost = True
            self._end(signal.SIGTERM)
        self._changed.set()

    def _note(self, rank: int, code: int) -> None:
        if rank in self._ended:
            return
        self._ended[rank] = code
        self._changed.set()
        if code != 0 and self.verdict.is_open:
            self.verdict.failed = rank, code
            if not self.keep_going:
                self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Ask the ranks to end, and see to it that they do."""
        if self._killer is None:
            self._send(number)
            self._killer = asyncio.get_running_loop().call_later(self.grace_s, self._send, signal.SIGKILL)
        else:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank, child in self.children.items():
            if rank not in self._ended:
                child.send(number)
