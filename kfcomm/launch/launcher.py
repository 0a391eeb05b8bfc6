"""Launcher of one host: the ranks of a job are started, watched, and ended together.

- The first rank to fail, on any host (see `exit_reports`), gives the job its exit code, and the others are asked to end
  (unless the job keeps going). What has not ended after the grace is killed.
- A signal to the launcher is forwarded to every rank's group; a second one kills at once.
- Each exit is reported to the store, so that peers are notified even if another process keeps the sockets open.
- When `run` returns, no process of the job is left on this host; nor if the launcher is killed (see `guardian`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from kfcomm.errors import RendezvousError
from kfcomm.launch.exit_reports import Blame, Failure
from kfcomm.launch.process import Child, shell_code
from kfcomm.launch.signals import PASSED_ON, Passing
from kfcomm.rendezvous.keyvalue import Exit, KeyValue, Why

_REPORT_WITHIN_S = 5.0
_HURRIED_REPORT_WITHIN_S = 1.0


@dataclass(slots=True)
class Verdict:
    """Outcome of a job; the first cause stands.

    Attributes:
        failed: the rank that failed first.
        signal: the signal by which the launcher was asked to end.
        lost: whether the first host's launcher went away while ranks were running.
    """

    failed: Failure | None = None
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
            return shell_code(self.failed.code)
        return int(self.lost)


@dataclass(slots=True)
class Launcher:
    """Watches the ranks of one host of a job of fixed size.

    Attributes:
        blame: finds the first failure among the ranks of the job.
        children: the ranks on this host.
        grace_s: seconds between asking and killing.
        keep_going: whether the others run on when one fails.
        host: position of this host among those of the job; None if it is the only one.
        listen: reads pending exit reports; called before an exit is judged.
        pids: the processes that have joined, by rank.
        ended: return codes of ended ranks of all hosts.
        has_stopped: whether `watch` has returned or raised; nothing is started after that.
    """

    blame: Blame
    children: Mapping[int, Child]
    grace_s: float
    keep_going: bool
    host: int | None = None
    listen: Callable[[], None] = lambda: None
    pids: Mapping[int, int] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    ended: dict[int, int] = field(default_factory=dict)
    passing: Passing = field(init=False)
    has_stopped: bool = False
    _follow_too: Callable[[int, Child], None] = lambda _, __: None
    _killer: asyncio.TimerHandle | None = None
    _judging: asyncio.TimerHandle | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.passing = Passing(self.host, self.pass_on)

    async def watch(self, exits: KeyValue) -> Verdict:
        """Watch until all ranks of this host have ended, and all others have too, or the job has failed.

        Args:
            exits: store for exits of this and other hosts.
        """
        try:
            # A task that raises ends the whole watch: a launcher without one of its tasks would wait for ever.
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self._watch_others(exits))
                follows = [tasks.create_task(self._follow(rank, child, exits)) for rank, child in self.children.items()]
                self._follow_too = lambda rank, child: follows.append(
                    tasks.create_task(self._follow(rank, child, exits))
                )
                passing = [] if self.host is None else [self.passing.tell(exits), self.passing.listen(exits)]
                hearing = [tasks.create_task(one) for one in (*self._begin(exits), *passing)]
                # Every source of change sets the event; state is only judged here, so that no order of events matters.
                while not self._is_over(watcher):
                    await self._changed.wait()
                    self._changed.clear()
                    await self._look(exits)
                for task in (watcher, *hearing):
                    task.cancel()
                # a store that does not answer must not delay the end of the job, least of all after Ctrl-C
                within_s = _REPORT_WITHIN_S if self.verdict.signal is None else _HURRIED_REPORT_WITHIN_S
                for follow in follows:
                    asyncio.get_running_loop().call_later(within_s, follow.cancel)
        finally:
            self.has_stopped = True
            self._stop()
            for timer in (self._killer, self._judging):
                if timer is not None:
                    timer.cancel()
        self._judge()
        return self.verdict

    def interrupt(self, number: int) -> None:
        """Forward a signal that ends the launcher; if the ranks are ending already, kill them."""
        if self.verdict.is_open:
            self.verdict.signal = number
            self._changed.set()
        # Python programs ignore SIGPIPE, and the closed pipe is the launcher's, not theirs
        self._end(signal.SIGTERM if number == signal.SIGPIPE else number)

    def pass_on(self, number: int) -> None:
        """Forward a signal to the ranks of this host; see `signals`."""
        for rank, child in self.children.items():
            if rank not in self.ended and number in PASSED_ON:
                child.notify(number, self.pids.get(rank))
            elif rank not in self.ended:
                child.send(signal.SIGSTOP if number == signal.SIGTSTP else number)

    def _begin(self, exits: KeyValue) -> list[Coroutine[Any, Any, None]]:
        """Further watches to run during the job."""
        del exits
        return []

    def _stop(self) -> None:
        """Cancel timers and tasks."""

    async def _look(self, exits: KeyValue) -> None:
        """Act on a change of state."""

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        if not self.ended.keys() >= self.children.keys():
            return False
        given_up = not self.verdict.is_open and not (self.keep_going and self.verdict.failed)
        return given_up or len(self.ended) == self.blame.size or watcher.done()

    def _judge(self) -> None:
        """Settle the first failure at the end, if it is not known yet."""
        if self.verdict.is_open and isinstance(failure := self.blame.verdict(math.inf), Failure):
            self.verdict.failed = failure

    async def _follow(self, rank: int, child: Child, exits: KeyValue) -> None:
        code = await child.ended()
        # The report was sent before the process ended, but its socket may not have been read yet.
        self.listen()
        end = Exit(rank, code, self._why(rank))
        self._note(end)
        await self._report(end, exits)

    def _why(self, rank: int) -> Why:
        """Reason of a local rank's end, from its exit report."""
        said = self.blame.said(rank)
        return Why.ELSEWHERE if said is not None and said.is_elsewhere else Why.ITSELF

    async def _report(self, end: Exit, exits: KeyValue) -> None:
        with contextlib.suppress(RendezvousError):
            await exits.report_exit(end)

    async def _watch_others(self, exits: KeyValue) -> None:
        async for end in self._exits_of(exits):
            if end.rank not in self.children:
                self._note(end)
            elif end.why in (Why.SILENT, Why.ABSENT) and self.verdict.is_open:
                # the primary launcher has given up this host
                self.verdict.failed = Failure(end.rank, end.code, now_s(), Why(end.why))
                self._changed.set()
                self._end(signal.SIGTERM)
        self._store_is_gone()
        self._changed.set()

    def _exits_of(self, exits: KeyValue) -> AsyncIterator[Exit]:
        return exits.watch_exits(self.host)

    def _store_is_gone(self) -> None:
        """End the job: the primary launcher is gone with its store."""
        if not self.ended.keys() >= self.children.keys() and self.verdict.is_open:
            self.verdict.lost = True
            self._end(signal.SIGTERM)

    def _note(self, end: Exit) -> None:
        if end.rank in self.ended:
            return
        self.ended[end.rank] = end.code
        self._changed.set()
        self._has_ended(end)

    def _has_ended(self, end: Exit) -> None:
        """Handle the end of a rank of any host, once."""
        if self.verdict.is_open:
            self.blame.ended(end, now_s())
            self._judge_now()

    def _judge_now(self) -> None:
        """Find the first failure; if it is not settled yet, try again when it must be."""
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None
        if not self.verdict.is_open:
            return
        self.listen()
        match self.blame.verdict(now_s()):
            case Failure() as failure:
                self.verdict.failed = failure
                self._changed.set()
                if not self.keep_going:
                    self._end(signal.SIGTERM)
            case float(due_s):
                self._judging = asyncio.get_running_loop().call_at(due_s, self._judge_now)

    def _end(self, number: int) -> None:
        """Ask the ranks to end; kill them after the grace, or at once the second time."""
        # The timer is never reset: a job that keeps failing while it ends is still killed in time.
        if self._killer is None:
            self._send(number)
            self._killer = asyncio.get_running_loop().call_later(self.grace_s, self._send, signal.SIGKILL)
        else:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank, child in self.children.items():
            if rank not in self.ended:
                child.send(number)


def now_s() -> float:
    """Monotonic clock of the host; also the loop's clock."""
    return time.monotonic()
