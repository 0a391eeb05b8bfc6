"""Launchers of a job whose ranks may change: one on each host, and the first host's says who is started where.

What they tell each other lies in folders of the store::

    folder       who writes               what it says
    -----------  -----------------------  ----------------------------------------------------------------
    start/HOST   the first                the launcher of that host starts a process of this birth
    dismissed    the first                a process that waits is not wanted any more
    outcome      the first                how the job has ended, which ends it on all hosts
    leaving      a launcher that was      nobody is started there any more
                 asked to end
    launchers    a launcher that ends     what it was to start and did not is started elsewhere
    given-up     ranks                    the process is of no use any more, and is killed where it runs

If the first launcher is gone the others keep what runs until that ends, or until it is started again: then they tell it
what has happened meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from kfcomm.errors import KfcommError, RendezvousError
from kfcomm.launch.blame import Failure
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.process import Child, CommandError
from kfcomm.launch.supervisor import Exits, Supervisor, Verdict, now_s
from kfcomm.rendezvous.board import (
    DISMISSED,
    GIVEN_UP,
    LAUNCHERS,
    LEAVING,
    OUTCOME,
    SIZES,
    START,
    Exit,
    Why,
    describe_exit,
)  # fmt: skip
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.folders import AGAIN_S, StoreClosed

_SAID_WITHIN_S = 5.0
NOT_STARTED = 126
"""The exit code of a process that the kernel did not run."""


@dataclass(slots=True)
class Mortal(Supervisor):
    """Watches ranks on one host, some of which may end before the job does.

    Attributes:
        start: starts the process of this birth.
        say: tells of what happens.
    """

    start: Callable[[int], Child] = field(init=False)
    say: Callable[[str], None] = field(init=False)

    async def _launch(self, birth: int, exits: Exits) -> None:
        try:
            child = self.start(birth)
        except CommandError as error:
            self.say(f"rank {birth} could not be started: {error}")
            end = Exit(birth, NOT_STARTED, Why.ITSELF)
            self._note(end)
            await self._report(end, exits)
        else:
            self._follow_too(birth, child)

    async def _watch_given_up(self, exits: Exits) -> None:
        """A rank that the others have given up, and that is stopped or stuck, is of no use to anybody.

        One that has said why it fails is on its way out, and may say so to its user, too.
        """
        async for birth, _ in exits.watch(GIVEN_UP):
            self.listen()
            due_s = 0.0 if self.blame.said(birth) is None else self.grace_s
            asyncio.get_running_loop().call_later(due_s, self._signal, birth, signal.SIGKILL)

    def _signal(self, birth: int, number: int) -> None:
        if birth in self.children and birth not in self.ended:
            self.children[birth].send(number)


@dataclass(slots=True)
class First(Mortal):
    """On the first host, or the only one: decides who is replaced, and where.

    Attributes:
        elastic: how many ranks there may be.
    """

    elastic: Elasticity = field(kw_only=True)
    _exits: Exits = field(init=False)
    _dismissed: set[int] = field(default_factory=set)
    _starting: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _later: asyncio.TimerHandle | None = None
    _last: Failure | None = None
    _is_told: bool = False
    _is_alone: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def _begin(self, exits: Exits) -> list[Coroutine[Any, Any, None]]:
        self._exits = exits
        self._start_owed()
        return [
            self._ask_for_spares(exits), self._watch_sizes(exits), self._watch_given_up(exits),
            self._watch_leaving(exits), self._watch_launchers(exits),
        ]  # fmt: skip

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        del watcher
        is_quiet = self.ended.keys() >= self.children.keys() and not self._starting
        is_over = is_quiet and not (self.verdict.is_open and self.elastic.running)
        if is_over and self._later is not None:
            self._later.cancel()
        if is_over and self._is_told:
            for task in self._tasks:  # what a store that does not answer keeps waiting
                task.cancel()
        return is_over and self._is_told

    async def _look(self, exits: Exits) -> None:
        if self.elastic.is_ending or not self.verdict.is_open:
            self._give_up_starting()
        if self.elastic.is_ending:  # nobody is left to let them in
            self._dismiss(await self._waiting(exits))
        else:
            await self._fail_if_nobody_lets_in(exits)
        if not self._is_told and not (self.verdict.is_open and self.elastic.running):
            self._is_told = True
            await _claimed(exits, f"{OUTCOME}/0", _outcome(self.verdict))

    async def _fail_if_nobody_lets_in(self, exits: Exits) -> None:
        """All ranks are gone, and those that wait to be let in would wait for ever."""
        running = self.elastic.running - self._dismissed
        if not running or min(running) < self.blame.size or not self.verdict.is_open:
            return
        if running <= set(await self._waiting(exits)) and self._last is not None:
            self.verdict.failed = self._last
            self.say("no rank is left to let others in")
            self._give_up_starting()
            self._dismiss(running)
            self._end(signal.SIGTERM)

    def _has_ended(self, end: Exit) -> None:
        elastic = self.elastic
        elastic.ended(end.rank, end.code, now_s())
        if end.why in (Why.SILENT, Why.ABSENT):
            elastic.places[elastic.where[end.rank]].is_gone = True
        if not self.verdict.is_open or end.code == 0 or end.rank in self._dismissed:
            return
        said = self.blame.said(end.rank)
        self._last = Failure(end.rank, end.code, now_s(), summary="" if said is None else said.summary)
        if elastic.has_failed:
            self.verdict.failed = self._last
            self._end(signal.SIGTERM)
            return
        elastic.replace()
        how, num_left = _how(end), len(elastic.running)
        count = self._start_owed()
        instead = f"; {count} started in its place" if count else ""
        if elastic.owed and (due_s := elastic.next_place_s()) is not None:
            instead = f"; another is started in {max(0.0, due_s - now_s()):.0f} s"
        self.say(f"rank {end.rank} ended ({how}); {num_left} go on{instead}")

    def _start_owed(self) -> int:
        """Start those for whom there is a place, and the others when there is one; returns how many were started."""
        count = 0
        self._later = None
        while self.verdict.is_open and not self._is_alone and (found := self.elastic.start(now_s())) is not None:
            birth, host = found
            self._starting[birth] = self._do(self._start_at(host, birth))
            count += 1
        if self.elastic.owed and (due_s := self.elastic.next_place_s()) is not None:
            self._later = asyncio.get_running_loop().call_at(due_s, self._start_owed)
        return count

    def ask_size(self, size: int) -> asyncio.Task[None]:
        """Ask for so many ranks; it is done when the store keeps that, which may take until it answers again."""
        return self._do(_asked(self._exits, size))

    async def _start_at(self, host: int, birth: int) -> None:
        """Have the launcher of a host start a process, once the store keeps that: a number is used once."""
        try:
            await self._exits.claim(f"{START}/{host}/{birth}", b"")
        except (asyncio.CancelledError, KfcommError):
            self.elastic.running.discard(birth)
            return
        finally:
            del self._starting[birth]
        if host == (self.host or 0):
            await self._launch(birth, self._exits)

    async def _ask_for_spares(self, exits: Exits) -> None:
        """Who waits beside the others is let in only where a number is asked for."""
        if self.elastic.spares and await exits.find(f"{SIZES}/1") is None:
            await exits.ask_size(self.elastic.size)

    def _store_is_gone(self) -> None:
        """What is kept of the job is lost: those that run do not need it."""
        if self.verdict.is_open and not self._is_told:
            self._is_alone = True
            self._give_up_starting()
            self.say("the store is gone: nobody is replaced any more")

    def _give_up_starting(self) -> None:
        for task in list(self._starting.values()):
            task.cancel()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _watch_sizes(self, exits: Exits) -> None:
        """Another number of ranks is asked for."""
        elastic = self.elastic
        async for size in exits.watch_sizes():
            if self.verdict.is_open and not elastic.is_ending and size != elastic.size:
                self._dismiss(elastic.resize(size, await self._waiting(exits)))
                count = self._start_owed()
                self.say(f"{elastic.size} ranks are wanted" + (f"; {count} started" if count else ""))

    async def _watch_leaving(self, exits: Exits) -> None:
        async for host, _ in exits.watch(LEAVING):
            self.elastic.places[host].is_gone = True

    async def _watch_launchers(self, exits: Exits) -> None:
        """A launcher that has ended has reported what it had: what it was to start besides, it has not."""
        async for host, _ in exits.watch(LAUNCHERS):
            self.elastic.places[host].is_gone = True
            for birth in self.elastic.births_at(host):
                if birth not in self.ended:
                    self._note(Exit(birth, NOT_STARTED, Why.ITSELF))

    async def _waiting(self, exits: Exits) -> list[int]:
        """Births of those that were started to join, and have not been let in."""
        later = [birth for birth in sorted(self.elastic.running - self._dismissed) if birth >= self.blame.size]
        return [birth for birth in later if not await exits.was_let_in(birth)]

    def _dismiss(self, births: Iterable[int]) -> None:
        """These are not wanted any more, and nobody is to miss them."""
        for birth in births:
            self._dismissed.add(birth)
            self._signal(birth, signal.SIGTERM)
            if birth not in self.children:
                self._do(_claimed(self._exits, f"{DISMISSED}/{birth}"))


@dataclass(slots=True)
class Agent(Mortal):
    """On any other host: does what the first host's launcher says.

    Attributes:
        first: by which it is heard of, and hears of this one.
        let_go: called when the job is over, to have those end that wait to be let in.
    """

    first: StoreClient = field(kw_only=True)
    let_go: Callable[[], None] = lambda: None
    _is_concluded: bool = False
    _is_alone: bool = False
    _has_left: bool = False

    def _begin(self, exits: Exits) -> list[Coroutine[Any, Any, None]]:
        return [
            self._watch_orders(exits), self._watch_dismissed(exits), self._watch_outcome(exits),
            self._watch_given_up(exits), self._watch_first(exits),
        ]  # fmt: skip

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        del watcher
        is_free = self._is_concluded or self._is_alone or self.verdict.signal is not None
        return is_free and self.ended.keys() >= self.children.keys()

    async def _look(self, exits: Exits) -> None:
        if self.verdict.signal is not None and not self._has_left:
            self._has_left = True
            await _claimed(exits, f"{LEAVING}/{self.host}")
        if self._is_alone and any(code == 0 for code in self.ended.values()):
            # the program has come to its end: nobody is left to let others in
            for birth in self.children.keys() - self.ended.keys():
                with contextlib.suppress(KfcommError):
                    if birth >= self.blame.size and not await exits.was_let_in(birth):
                        self._signal(birth, signal.SIGTERM)

    async def _watch_first(self, exits: Exits) -> None:
        """Be heard by the first launcher, and know whether it is there."""
        while True:
            async for _ in self.first.watch_exits(self.host):
                pass  # they are heard of elsewhere
            self._first_is_gone()
            if not await self._has_first_again():
                self.let_go()
                return
            self._is_alone = False
            self.say("the launcher of the first host is back")
            for birth in self.children.keys() & self.ended.keys():  # it may not know of it
                await self._report(Exit(birth, self.ended[birth]), exits)

    async def _report(self, end: Exit, exits: Exits) -> None:
        """To the first launcher itself as well, which hears of it also while the store is kept by none."""
        told = [self.first.report_exit(end)] if exits is not self.first else []
        await asyncio.gather(exits.report_exit(end), *told, return_exceptions=True)

    async def _has_first_again(self) -> bool:
        """Wait until it has been started again; or until it is known that the job is over."""
        while True:
            try:
                await self.first.arrive(self.host or 0, timeout_s=AGAIN_S)
            except StoreClosed:
                return False
            except RendezvousError:
                await asyncio.sleep(AGAIN_S)
            else:
                return True

    def _first_is_gone(self) -> None:
        if not (self._is_concluded or self._is_alone) and self.verdict.is_open:
            self._is_alone = True
            self.say("the launcher of the first host is gone: nobody is replaced any more, unless it is started again")
            self._changed.set()

    def _has_ended(self, end: Exit) -> None:
        """The first launcher judges it."""

    def _exits_of(self, exits: Exits) -> AsyncIterator[Exit]:
        return exits.watch_exits(lasting=True)

    def _store_is_gone(self) -> None:
        """Whether the first launcher is, is watched by itself."""

    def _judge(self) -> None:
        ends = [(birth, self.ended[birth]) for birth in self.children if birth in self.ended]
        if self._is_alone and self.verdict.is_open and ends and all(code for _, code in ends):
            birth, code = ends[-1]
            self.verdict.failed = Failure(birth, code, now_s())

    async def _watch_orders(self, exits: Exits) -> None:
        async for birth, _ in exits.watch(f"{START}/{self.host}"):
            if self.verdict.is_open and not self._is_concluded:
                await self._launch(birth, exits)

    async def _watch_dismissed(self, exits: Exits) -> None:
        async for birth, _ in exits.watch(DISMISSED):
            self._signal(birth, signal.SIGTERM)

    async def _watch_outcome(self, exits: Exits) -> None:
        async for _, said in exits.watch(OUTCOME):
            self._is_concluded = True
            number, rank, code, summary = msgpack.unpackb(said)
            if self.verdict.is_open and number:
                self.verdict.signal = number
                self._end(number)
            elif self.verdict.is_open and code:
                self.verdict.failed = Failure(rank, code, now_s(), summary=summary)
                self._end(signal.SIGTERM)
            self._changed.set()


async def _claimed(exits: Exits, key: str, value: bytes = b"") -> None:
    """Say it; if the store is gone, nobody is left to hear it, and no end waits for that."""
    with contextlib.suppress(KfcommError, TimeoutError):
        async with asyncio.timeout(_SAID_WITHIN_S):
            await exits.claim(key, value)


async def _asked(exits: Exits, size: int) -> None:
    with contextlib.suppress(KfcommError):
        await exits.ask_size(size)


def _outcome(verdict: Verdict) -> bytes:
    failed = verdict.failed
    rank, code, summary = (-1, 0, "") if failed is None else (failed.rank, failed.code, failed.summary)
    said: bytes = msgpack.packb([verdict.signal or 0, rank, code, summary])
    return said


def _how(end: Exit) -> str:
    if end.why in (Why.SILENT, Why.ABSENT):
        return "its host is not heard of any more"
    return describe_exit(end.code)
