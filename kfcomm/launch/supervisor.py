"""The life of a job: its ranks are started, watched, and ended together.

- The first rank to fail, on any host (see `blame`), gives the job its exit code, and the others are asked to end
  (unless the job keeps going). What has not ended after the grace is killed.
- A signal to the launcher is passed on to every rank's group; a second one kills at once.
- Each end is reported to the store, so that peers learn of it even where something else keeps the sockets open.
- When `run` returns, no process of the job is left on this host; nor if the launcher is killed (see `guardian`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kfcomm.errors import RendezvousError
from kfcomm.launch.blame import Blame, Failure
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.process import Child, shell_code
from kfcomm.rendezvous.board import Exit, Why, describe_exit

_REPORT_WITHIN_S = 1.0


class Exits(Protocol):
    """Where ends are reported and learnt of: the store, or a client of it."""

    async def report_exit(self, end: Exit) -> None:
        """Report the end of a rank."""

    def watch_exits(self, host: int | None = None) -> AsyncIterator[Exit]:
        """The end of each rank that has ended or ends; ends when the store does."""
        ...

    def watch_given_up(self) -> AsyncIterator[int]:
        """Each rank that the others have given up."""
        ...

    async def was_let_in(self, birth: int) -> bool:
        """Whether a process that was started later is a rank of the job, or was."""
        ...

    async def ask_size(self, size: int) -> None:
        """Ask for so many ranks."""

    def watch_sizes(self) -> AsyncIterator[int]:
        """Each number of ranks that is asked for, once it is; ends when the store does."""
        ...


@dataclass(slots=True)
class Verdict:
    """How a job ended; the first cause stands.

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
class Supervisor:
    """Watches the ranks of one host.

    Attributes:
        blame: who failed first, of the ranks of the job.
        children: the ranks on this host.
        grace_s: seconds between asking and killing.
        keep_going: whether the others run on when one fails.
        host: position of this host among those of the job; None if it is the only one.
        listen: called before a rank's end is judged, to hear what it said before.
        elastic: of a job whose ranks may change; else None.
        start: starts the process of this number, in an elastic job.
        say: tells of what happens in one.
        ended: return codes of the ranks that have ended, of all hosts.
    """

    blame: Blame
    children: Mapping[int, Child]
    grace_s: float
    keep_going: bool
    host: int | None = None
    listen: Callable[[], None] = lambda: None
    elastic: Elasticity | None = None
    start: Callable[[int], Child] | None = None
    say: Callable[[str], None] = lambda _: None
    verdict: Verdict = field(default_factory=Verdict)
    ended: dict[int, int] = field(default_factory=dict)
    _dismissed: set[int] = field(default_factory=set)
    _more: Callable[[int, Child], None] = lambda _, __: None
    _killer: asyncio.TimerHandle | None = None
    _judge: asyncio.TimerHandle | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def watch(self, exits: Exits) -> Verdict:
        """Watch until all ranks of this host have ended, and all others have too, or the job has failed.

        Args:
            exits: where ends are reported; those of other hosts are learnt of there.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watcher = tasks.create_task(self._watch_others(exits))
                follows = [tasks.create_task(self._follow(rank, child, exits)) for rank, child in self.children.items()]
                self._more = lambda birth, child: follows.append(tasks.create_task(self._follow(birth, child, exits)))
                if self.elastic is not None:
                    heard = [
                        tasks.create_task(self._watch_sizes(exits, self.elastic)),
                        tasks.create_task(self._watch_given_up(exits)),
                    ]
                while not self._is_over(watcher):
                    await self._changed.wait()
                    self._changed.clear()
                watcher.cancel()
                if self.elastic is not None:
                    for task in heard:
                        task.cancel()
                if self.verdict.signal is not None:
                    # whoever asked for the end does not wait for a host that does not answer
                    for follow in follows:
                        asyncio.get_running_loop().call_later(_REPORT_WITHIN_S, follow.cancel)
        finally:
            for timer in (self._killer, self._judge):
                if timer is not None:
                    timer.cancel()
        if self.verdict.is_open and isinstance(failure := self.blame.verdict(math.inf), Failure):
            self.verdict.failed = failure
        return self.verdict

    def interrupt(self, number: int) -> None:
        """The launcher was asked to end by a signal: pass it on; if the ranks are ending already, kill."""
        if self.verdict.is_open:
            self.verdict.signal = number
            self._changed.set()
        # Python programs ignore SIGPIPE, and it was not they who wrote where nobody reads
        self._end(signal.SIGTERM if number == signal.SIGPIPE else number)

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        if not self.ended.keys() >= self.children.keys():
            return False
        if self.elastic is not None:
            return True
        given_up = not self.verdict.is_open and not (self.keep_going and self.verdict.failed)
        return given_up or len(self.ended) == self.blame.size or watcher.done()

    async def _follow(self, rank: int, child: Child, exits: Exits) -> None:
        code = await child.ended()
        self.listen()
        said = self.blame.said(rank)
        why = Why.ELSEWHERE if said is not None and said.is_elsewhere else Why.ITSELF
        self._note(Exit(rank, code, why))
        with contextlib.suppress(RendezvousError):
            await exits.report_exit(Exit(rank, code, why))
        if self.elastic is not None and self.elastic.is_ending:
            # nobody is left to let them in
            self._dismiss(await self._waiting(exits, self.elastic))

    async def _watch_others(self, exits: Exits) -> None:
        async for end in exits.watch_exits(self.host):
            if end.rank not in self.children:
                self._note(end)
            elif end.why in (Why.SILENT, Why.ABSENT) and self.verdict.is_open:
                # the first host has given this one up
                self.verdict.failed = Failure(end.rank, end.code, _now_s(), Why(end.why))
                self._end(signal.SIGTERM)
        if not self.ended.keys() >= self.children.keys() and self.verdict.is_open:
            self.verdict.lost = True
            self._end(signal.SIGTERM)
        self._changed.set()

    def _note(self, end: Exit) -> None:
        if end.rank in self.ended:
            return
        self.ended[end.rank] = end.code
        self._changed.set()
        if self.elastic is not None:
            self._note_elastic(end, self.elastic)
        elif self.verdict.is_open:
            self.blame.ended(end, _now_s())
            self._judge_now()

    def _note_elastic(self, end: Exit, elastic: Elasticity) -> None:
        """A rank of a job that outlives it has ended."""
        elastic.ended(end.rank, end.code)
        if not self.verdict.is_open or end.code == 0 or end.rank in self._dismissed:
            return
        if elastic.has_failed:
            said = self.blame.said(end.rank)
            self.verdict.failed = Failure(end.rank, end.code, _now_s(), summary="" if said is None else said.summary)
            self._end(signal.SIGTERM)
            return
        count = elastic.replaced()
        instead = f"; {count} started in its place" if count else ""
        self.say(f"rank {end.rank} ended ({describe_exit(end.code)}); {len(elastic.running)} go on{instead}")
        self._start(count, elastic)

    def _start(self, count: int, elastic: Elasticity) -> None:
        for _ in range(count):
            if self.start is not None:
                birth = elastic.next_birth
                elastic.begun(birth)
                self._more(birth, self.start(birth))

    async def _watch_sizes(self, exits: Exits, elastic: Elasticity) -> None:
        """Another number of ranks is asked for."""
        async for size in exits.watch_sizes():
            if self.verdict.is_open and not elastic.is_ending and size != elastic.size:
                count, unwanted = elastic.resize(size, await self._waiting(exits, elastic))
                self._dismiss(unwanted)
                self.say(f"{elastic.size} ranks are wanted" + (f"; {count} started" if count else ""))
                self._start(count, elastic)

    async def _waiting(self, exits: Exits, elastic: Elasticity) -> list[int]:
        """Births of those that were started to join, and have not been let in."""
        later = [birth for birth in sorted(elastic.running - self._dismissed) if birth >= self.blame.size]
        return [birth for birth in later if not await exits.was_let_in(birth)]

    def _dismiss(self, births: Iterable[int]) -> None:
        """These are not wanted any more, and nobody is to miss them."""
        for birth in births:
            self._dismissed.add(birth)
            self.children[birth].send(signal.SIGTERM)

    async def _watch_given_up(self, exits: Exits) -> None:
        """A rank that the others have given up, and that is stopped or stuck, is of no use to anybody."""
        async for birth in exits.watch_given_up():
            if birth in self.children and birth not in self.ended:
                self.children[birth].send(signal.SIGKILL)

    def _judge_now(self) -> None:
        """See whether it is known who failed first; else look again when it must be."""
        if self._judge is not None:
            self._judge.cancel()
            self._judge = None
        if not self.verdict.is_open:
            return
        self.listen()
        match self.blame.verdict(_now_s()):
            case Failure() as failure:
                self.verdict.failed = failure
                self._changed.set()
                if not self.keep_going:
                    self._end(signal.SIGTERM)
            case float(due_s):
                self._judge = asyncio.get_running_loop().call_at(due_s, self._judge_now)

    def _end(self, number: int) -> None:
        """Ask the ranks to end, and see to it that they do."""
        if self._killer is None:
            self._send(number)
            self._killer = asyncio.get_running_loop().call_later(self.grace_s, self._send, signal.SIGKILL)
        else:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        for rank, child in self.children.items():
            if rank not in self.ended:
                child.send(number)


def _now_s() -> float:
    """The host's monotonic clock, which is the loop's, too."""
    return time.monotonic()
