"""Launcher of one host: the ranks of a job are started, watched, and ended together.

- The first rank to fail, on any host (see `exit_reports`), gives the job its exit code, and the others are asked to end
  (unless the job keeps going). What has not ended after the grace is killed.
- A signal to the launcher is forwarded to every rank's group; a second one kills at once.
- Each exit is reported to the store, so that peers are notified even if another process keeps the sockets open.
- When `run` returns, no process of the job is left on this host; nor if the launcher is killed (see `guardian`).

One loop waits for events. What they mean depends on the role of the launcher (`FixedRole`; in an elastic job
``primary.PrimaryRole`` on the first host, ``other_hosts.HostRole`` elsewhere) and on its phase::

    phase    the job, as seen here          a rank fails        store is lost     a size is wanted  an ending signal
    -------  -----------------------------  ------------------  ----------------  ----------------  ----------------
    RUNS     runs                           ENDS or RUNS_ON;    ENDS; elastic:    ranks start or    ENDS
                                            elastic: replaced   ALONE             leave
    ALONE    elastic, without the store or  ENDS if too few     -                 -                 ENDS
             the primary launcher           are left
    RUNS_ON  has failed; keeps going        -                   ends by itself    -                 ranks end
    ENDS     its ranks have to end          -                   -                 -                 ranks are killed
    OVER     elastic: outcome is published  -                   -                 -                 ranks end
    STOPPED  nothing is started any more    -                   -                 -                 -

A launcher goes through the phases downwards, but for the way back from ALONE to RUNS on another host whose primary
launcher was restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from time import monotonic
from typing import Any, Protocol

from kfcomm.errors import KfcommError
from kfcomm.launch.exit_reports import Blame, Failure
from kfcomm.launch.local_ranks import LocalRanks, Passing
from kfcomm.launch.process import Child, CommandError, shell_code
from kfcomm.rendezvous.keyvalue import Exit, KeyValue, Why

_REPORT_WITHIN_S = 5.0
_HURRIED_REPORT_WITHIN_S = 1.0
_SAID_WITHIN_S = 5.0
NOT_STARTED = 126
"""Exit code of a process that the kernel did not run."""
TIME_IS_UP = 124
"""Exit code of a job that its time limit has ended, as that of timeout(1)."""


class LauncherPhase(IntEnum):
    """Phase of a launcher; see the table above."""

    RUNS = 0
    ALONE = 1
    RUNS_ON = 2
    ENDS = 3
    OVER = 4
    STOPPED = 5


@dataclass(slots=True)
class JobOutcome:
    """Outcome of a job; the first cause stands."""

    failed: Failure | None = None  # the rank that failed first
    signal: int | None = None  # the signal by which the launcher was asked to end
    lost: bool = False  # whether the first host's launcher went away while ranks were running
    expired_s: float | None = None  # the time limit, if that has ended the job

    @property
    def is_open(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return self.failed is None and self.signal is None and not self.lost

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher."""
        if self.expired_s is not None:
            return TIME_IS_UP
        if self.signal is not None:
            return 128 + self.signal
        if self.failed is not None:
            return shell_code(self.failed.code)
        return int(self.lost)


class Role(Protocol):
    """Decisions of a launcher, which depend on its host and on whether the job is elastic."""

    def watches(self, store: KeyValue) -> list[Coroutine[Any, Any, None]]:
        """Begin; return what to watch beside the exits, until the job is over."""

    def exits(self, store: KeyValue) -> AsyncIterator[Exit]:
        """Exits of all hosts, until the store is lost."""

    def rank_ended(self, end: Exit) -> None:
        """Handle the end of a rank of any host, once."""

    def rank_released(self, uid: int) -> None:
        """Note that the ranks have released one of this host, or any if the store says so."""

    def store_lost(self) -> None:
        """Handle the end of `exits`."""

    async def act(self, store: KeyValue) -> None:
        """Act on a change of state."""

    def is_over(self) -> bool:
        """Whether there is nothing more to watch."""


@dataclass(slots=True)
class Launcher:
    """Event loop and state of a launcher; its role takes the decisions."""

    ranks: LocalRanks  # the processes of this host
    blame: Blame  # finds the first failure among the ranks of the job
    keep_going: bool = False  # whether the others run on when one fails
    host: int | None = None  # position of this host among those of the job; None if it is the only one
    first: KeyValue | None = None  # the first host's store, if this is another host
    ended: dict[int, int] = field(default_factory=dict)  # return codes of ended ranks of all hosts
    role: Role = field(init=False)
    start: Callable[[int], Child] = field(init=False)  # starts the process of a uid
    say: Callable[[str], None] = field(init=False)  # shows a message
    outcome: JobOutcome = field(default_factory=JobOutcome)
    phase: LauncherPhase = LauncherPhase.RUNS
    passing: Passing = field(init=False)
    tasks: asyncio.TaskGroup = field(init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _watches: set[asyncio.Task[None]] = field(default_factory=set)
    _follows: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.passing = Passing(self.host, self.ranks.forward)

    async def watch(self, store: KeyValue) -> JobOutcome:
        """Watch until the role says that the job is over here; ``store`` has the exits of all hosts."""
        try:
            # A task that raises ends the whole watch: a launcher without one of its tasks would wait for ever.
            async with asyncio.TaskGroup() as self.tasks:
                self.spawn(self._watch_exits(store))
                for rank, child in self.ranks.children.items():
                    self._follow(rank, child, store)
                passing = [] if self.host is None else [self.passing.tell(store), self.passing.listen(store)]
                for work in (*self.role.watches(store), *passing):
                    self.spawn(work)
                # Every source of change sets the event; state is only judged here, so that no order of events matters.
                while not self.role.is_over():
                    await self.changed.wait()
                    self.changed.clear()
                    await self.role.act(store)
                # Before the tasks end: a rank that is started now would be watched by none of them.
                self.phase = LauncherPhase.STOPPED
                for task in self._watches:
                    task.cancel()
                # a store that does not answer must not delay the end of the job, least of all after Ctrl-C
                within_s = _REPORT_WITHIN_S if self.outcome.signal is None else _HURRIED_REPORT_WITHIN_S
                for task in self._follows:
                    asyncio.get_running_loop().call_later(within_s, task.cancel)
        finally:
            self.phase = LauncherPhase.STOPPED  # also if a task has failed
            self.ranks.close()
        return self.outcome

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until the job is over; its end counts as a change."""
        task = self.tasks.create_task(work)
        self._watches.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._watches.discard(task)
        self.changed.set()

    def advance(self, phase: LauncherPhase) -> None:
        """Go on to a phase, unless a later one is reached."""
        self.phase = max(self.phase, phase)
        self.changed.set()

    def interrupt(self, number: int) -> None:
        """Forward a signal that ends the launcher; if the ranks are ending already, kill them."""
        if self.outcome.is_open:
            self.outcome.signal = number
            self.advance(LauncherPhase.ENDS)
        # Python programs ignore SIGPIPE, and the closed pipe is the launcher's, not theirs
        self.ranks.end(signal.SIGTERM if number == signal.SIGPIPE else number)

    def expire(self, limit_s: float) -> None:
        """End the job at its time limit, as a signal does; one that is ending already is left alone."""
        if self.phase < LauncherPhase.ENDS:
            if self.outcome.is_open:
                self.outcome.expired_s = limit_s
            self.interrupt(signal.SIGTERM)

    def fail(self, failure: Failure, *, goes_on: bool = False) -> None:
        """Settle the first failure, and end the ranks of this host, unless the job continues."""
        self.outcome.failed = failure
        self.advance(LauncherPhase.RUNS_ON if goes_on else LauncherPhase.ENDS)
        if not goes_on:
            self.ranks.end(signal.SIGTERM)

    async def launch(self, uid: int, store: KeyValue) -> None:
        """Start a rank of an elastic job here."""
        # The order may have been withdrawn while the store saved it.
        if self.phase is not LauncherPhase.STOPPED and uid not in self.ranks.dismissed:
            try:
                self._follow(uid, self.start(uid), store)
                return
            except CommandError as error:
                self.say(f"rank {uid} could not be started: {error}")
        end = Exit(uid, NOT_STARTED, Why.ITSELF)
        self.note(end)
        await self.report(end, store)

    def _follow(self, rank: int, child: Child, store: KeyValue) -> None:
        self._follows.append(self.tasks.create_task(self._report_end(rank, child, store)))

    async def _report_end(self, rank: int, child: Child, store: KeyValue) -> None:
        code = await child.ended()
        # The report was sent before the process ended, but its socket may not have been read yet.
        self.ranks.reports.drain()
        self.ranks.ended[rank] = code
        end = self.exit_of(rank)
        self.note(end)  # judged before it is reported: other hosts may act on a report at once
        await self.report(end, store)

    def exit_of(self, rank: int) -> Exit:
        """End of a rank of this host, with the reported reason."""
        said = self.blame.said(rank)
        why = Why.ELSEWHERE if said is not None and said.is_elsewhere else Why.ITSELF
        return Exit(rank, self.ranks.ended[rank], Why.RELEASED if rank in self.ranks.released else why)

    async def report(self, end: Exit, store: KeyValue) -> None:
        """Report an exit to the store, and to the first host's, in case a shared backend is unreachable."""
        stores = [store] if self.first in (None, store) else [store, self.first]
        # At once, since one of them may be unreachable.
        await asyncio.gather(*(_reported(end, one) for one in stores))

    def note(self, end: Exit) -> None:
        """Note the end of a rank of any host; the first report stands."""
        if end.rank not in self.ended:
            self.ended[end.rank] = end.code
            self.changed.set()
            self.role.rank_ended(end)

    async def _watch_exits(self, store: KeyValue) -> None:
        async for end in self.role.exits(store):
            # Exits of the ranks of this host are noted when their processes end.
            if end.rank not in self.ranks.children:
                self.note(end)
            elif end.why in (Why.SILENT, Why.ABSENT) and self.outcome.is_open:
                # the primary launcher has given up this host
                self.fail(Failure(end.rank, end.code, monotonic(), Why(end.why)))
        self.role.store_lost()


async def claimed(store: KeyValue, key: str, value: bytes = b"") -> None:
    """Claim a key, within a bounded time; errors of the store are ignored."""
    with contextlib.suppress(KfcommError, TimeoutError):
        async with asyncio.timeout(_SAID_WITHIN_S):
            await store.claim(key, value)


async def _reported(end: Exit, store: KeyValue) -> None:
    with contextlib.suppress(KfcommError):
        await store.report_exit(end)


@dataclass(slots=True)
class FixedRole:
    """Role of each launcher of a job of fixed size, which fails with its first rank, or without the first host."""

    launcher: Launcher
    _is_store_lost: bool = False
    _judging: asyncio.TimerHandle | None = None

    def watches(self, store: KeyValue) -> list[Coroutine[Any, Any, None]]:
        """Watch nothing else."""
        del store
        return []

    def exits(self, store: KeyValue) -> AsyncIterator[Exit]:
        """Exits, until the first host's launcher is gone with its store."""
        return store.watch_exits(self.launcher.host)

    def rank_ended(self, end: Exit) -> None:
        """Find the first failure."""
        if self.launcher.outcome.is_open:
            self.launcher.blame.ended(end, monotonic())
            self._judge()

    def rank_released(self, uid: int) -> None:
        """Do nothing: ranks of this job are not released."""

    def store_lost(self) -> None:
        """End the ranks of this host."""
        launcher, self._is_store_lost = self.launcher, True
        if launcher.ranks.living and launcher.outcome.is_open:
            launcher.outcome.lost = True
            launcher.advance(LauncherPhase.ENDS)
            launcher.ranks.end(signal.SIGTERM)

    async def act(self, store: KeyValue) -> None:
        """Settle the first failure at the end, if it is not known yet."""
        del store
        if self.is_over() and self.launcher.outcome.is_open:
            # All time to wait for a better candidate is over.
            self._settle(math.inf)

    def is_over(self) -> bool:
        """Whether all ranks of this host have ended, and all others have too, or the job has failed."""
        launcher = self.launcher
        if launcher.ranks.living:
            return False
        return launcher.phase >= LauncherPhase.ENDS or len(launcher.ended) == launcher.blame.size or self._is_store_lost

    def _judge(self) -> None:
        """Find the first failure; if it is not settled yet, try again when it must be."""
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None
        if self.launcher.phase is LauncherPhase.RUNS:
            # A report that names the cause may be unread.
            self.launcher.ranks.reports.drain()
            due_s = self._settle(monotonic())
            if due_s is not None:
                self._judging = asyncio.get_running_loop().call_at(due_s, self._judge)

    def _settle(self, now_s: float) -> float | None:
        found = self.launcher.blame.outcome(now_s)
        if isinstance(found, Failure):
            self.launcher.fail(found, goes_on=self.launcher.keep_going)
            return None
        return found
