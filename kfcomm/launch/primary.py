"""Primary launcher of an elastic job, on its first host: decides which ranks are replaced, where, and which leave.

See `elastic_launcher` for its communication with the other launchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack

from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import KfcommError
from kfcomm.launch.elastic import Elasticity, Stage
from kfcomm.launch.elastic_launcher import NOT_STARTED, ElasticLauncher, claimed, these
from kfcomm.launch.exit_reports import Failure
from kfcomm.launch.hosts import Discovery, difference
from kfcomm.launch.launcher import Verdict, now_s
from kfcomm.rendezvous.keyvalue import (
    DISMISSED,
    LAUNCHERS,
    LEAVING,
    OUTCOME,
    REPLACED,
    SILENT,
    SIZES,
    START,
    Exit,
    KeyValue,
    StoreClosed,
    Why,
    describe_exit,
)  # fmt: skip
from kfcomm.types import Wanted

RETRY_S = 5.0
"""Pause before the store is asked again after it refused an order to start a rank."""


@dataclass(slots=True)
class PrimaryLauncher(ElasticLauncher):
    """Launcher on the first host, or the only one: decides which ranks are replaced, and where.

    Attributes:
        elastic: numbers and stages of the ranks.
        discovery: script that names the hosts; None if they do not change.
        arrivals: addresses of hosts whose launchers arrived after the beginning.
    """

    elastic: Elasticity = field(kw_only=True)
    discovery: Discovery | None = None
    arrivals: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _exits: KeyValue = field(init=False)
    _given_up: set[int] = field(default_factory=set)
    _starting: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _later: asyncio.TimerHandle | None = None
    _failures: dict[int, Failure] = field(default_factory=dict)
    _victims: set[int] = field(default_factory=set)
    _held: Wanted | None = None
    _fitted: tuple[Any, ...] = ()
    _is_silence_told: bool = False
    _is_told: bool = False
    _is_alone: bool = False
    _defect: BaseException | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def _begin(self, exits: KeyValue) -> list[Coroutine[Any, Any, None]]:
        self._exits = exits
        self._failures = {birth: Failure(birth, code, now_s()) for birth, code in self.ended.items() if code}
        self._start_owed()
        return [
            self._ask_for_spares(exits), self._watch_sizes(exits), self._watch_given_up(exits),
            self._watch_leaving(exits), self._watch_launchers(exits), self._watch_arrivals(),
            self._watch_slots(exits), self._watch_replaced(exits), self._watch_signs_of_life(exits),
            self._watch_released(exits),
        ]  # fmt: skip

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        del watcher
        is_quiet = self.ended.keys() >= self.children.keys() and not self._starting
        is_over = is_quiet and not (self.verdict.is_open and self.elastic.running)
        if is_over and self._later is not None:
            self._later.cancel()
        if is_over and self._is_told:
            for task in self._tasks:  # they may wait for a store that does not answer
                task.cancel()
        return is_over and self._is_told

    async def _look(self, exits: KeyValue) -> None:
        if self._defect is not None:
            raise self._defect  # without this task the launcher could wait for ever
        if self.elastic.is_ending or not self.verdict.is_open:
            self._give_up_starting()
        if self.elastic.is_ending:  # no rank is left to admit them
            self._dismiss(await self._waiting(exits))
        await self._fail_if_nobody_goes_on(exits)
        if not self._is_told and not (self.verdict.is_open and self.elastic.running):
            self._is_told = True
            if self.verdict.is_open and not self.elastic.is_ending:
                self.verdict.failed = self._cause()
            self._wait_for_released()
            await claimed(exits, f"{OUTCOME}/0", _outcome(self.verdict))

    async def _fail_if_nobody_goes_on(self, exits: KeyValue) -> None:
        """End the job if no rank is left that could admit waiting processes.

        If all ranks are silent and none has failed, only show a message: they were stopped, and may be continued.
        """
        running = self.elastic.running
        if not running or not self.verdict.is_open:
            return
        members = running.difference(await self._waiting(exits))
        is_silent = bool(members) and members <= await self._silent_ones(exits)
        if is_silent and not self._is_silence_told:
            stuck = f"{these(members)} stopped or stuck"
            self.say(f"no rank that runs has shown a sign of life for {self.lost_after_s:g} s: {stuck}")
        self._is_silence_told = is_silent
        if is_silent:
            is_over, what = await self._is_one_missed(exits), "go on"
        else:
            is_over, what = not (members or self.elastic.is_ending) and bool(self._failures), "let others in"
        if is_over:
            self.verdict.failed = self._cause()
            self.say(f"no rank is left to {what}")
            self._give_up_starting()
            self._dismiss(running - members)
            self._end(signal.SIGTERM)

    async def _silent_ones(self, exits: KeyValue) -> set[int]:
        """Uids of the silent ranks of all hosts."""
        told: dict[str, bytes] = {}
        with contextlib.suppress(StoreClosed):
            told = await exits.collect(SILENT, 0, timeout_s=0.0)
        return self.silent.union(*map(msgpack.unpackb, told.values()))

    async def _is_one_missed(self, exits: KeyValue) -> bool:
        """Whether a rank has failed that live ranks would have given up by now."""
        for birth in self._failures.keys() - self._given_up:
            if await self._was_let_in(birth, exits):
                return True
        return False

    def _cause(self) -> Failure:
        """The last failure that is not given up and blames no other rank; else the last one."""
        unanswered = [one for birth, one in self._failures.items() if birth not in self._given_up]
        causes = [one for one in unanswered if one.rank not in self._victims]
        nobody = Failure(max(self.ended, default=0), 1, now_s(), summary="no rank has come to the end of the program")
        return (causes or unanswered or [nobody, *self._failures.values()])[-1]

    async def _tell_silent(self, exits: KeyValue) -> None:
        del exits
        self._changed.set()

    def _is_given_up(self, birth: int) -> None:
        self._given_up.add(birth)
        self.elastic.given_up(birth)

    def _has_ended(self, end: Exit) -> None:
        elastic = self.elastic
        if end.why == Why.RELEASED:
            elastic.released(end.rank)
        stage = elastic.ended(end.rank, end.code, now_s())
        # The launcher of that host is gone, so it cannot start replacements.
        if end.why in (Why.SILENT, Why.ABSENT):
            elastic.places[elastic.where[end.rank]].is_gone = True
        if not self.verdict.is_open:
            return
        if end.code == 0 or stage is Stage.RELEASED:
            self._say_end_of_released(end)
            self._start_owed()  # a slot may have become free
            return
        if elastic.is_ending and stage is Stage.GIVEN_UP and end.code < 0:
            return  # the others have completed the program without it, and its process was killed
        said = self.blame.said(end.rank)
        self._failures[end.rank] = Failure(end.rank, end.code, now_s(), summary="" if said is None else said.summary)
        if end.why == Why.ELSEWHERE:
            self._victims.add(end.rank)
        if elastic.has_failed:
            self.verdict.failed = self._cause()
            self._end(signal.SIGTERM)
            return
        how, num_left = _how(end), len(elastic.running)
        count = self._start_owed()
        instead = f"; {count} started in its place" if count else ""
        if elastic.owed and (due_s := elastic.next_place_s()) is not None:
            instead = f"; another is started in {max(0.0, due_s - now_s()):.0f} s"
        self.say(f"rank {end.rank} ended ({how}); {num_left} go on{instead}")

    def _say_end_of_released(self, end: Exit) -> None:
        if end.code and end.rank not in self.dismissed:
            self.say(f"rank {end.rank}, which was released, ended ({_how(end)})")

    def _start_owed(self) -> int:
        """Start owed processes, as far as there are places, and later the others; return how many were started."""
        count = 0
        self._later = None
        is_open = self.verdict.is_open and not (self._is_alone or self.has_stopped)
        while is_open and (found := self.elastic.start(now_s())) is not None:
            birth, host = found
            self._starting[birth] = self._do(self._start_at(host, birth))
            count += 1
        if self.elastic.owed and (due_s := self.elastic.next_place_s()) is not None:
            self._later = asyncio.get_running_loop().call_at(due_s, self._start_owed)
        return count

    def ask_size(self, size: int) -> asyncio.Task[None]:
        """Request a number of ranks; the task is done when the store has saved it, which may wait until it answers."""
        return self._do(_asked(self._exits, size))

    async def _start_at(self, host: int, birth: int) -> None:
        """Have the launcher of a host start a process, after the store has saved its uid, which is used once."""
        try:
            # Saved before the process starts: a restarted launcher must not use the uid again.
            await self._exits.claim(f"{START}/{host}/{birth}", b"")
        except asyncio.CancelledError:
            self.elastic.not_started(birth)
            return
        except KfcommError as error:
            self.elastic.not_started(birth)
            if not isinstance(error, StoreClosed):
                self.say(f"rank {birth} is not started: {error}; another is in {RETRY_S:g} s")
                asyncio.get_running_loop().call_later(RETRY_S, self._start_owed)
            return
        finally:
            self._starting.pop(birth, None)
        if host == (self.host or 0):
            await self._launch(birth, self._exits)

    async def _ask_for_spares(self, exits: KeyValue) -> None:
        """Request the initial size: ranks admit spares only up to a requested size."""
        if self.discovery is None and self.elastic.spares and await exits.find(f"{SIZES}/1") is None:
            await exits.ask_size(self.elastic.size)

    def _stop(self) -> None:
        ElasticLauncher._stop(self)
        if self._later is not None:
            self._later.cancel()
        for task in self._tasks:
            task.cancel()

    def _store_is_gone(self) -> None:
        """Continue without the store: running ranks do not need it. Other hosts are no longer reachable."""
        if self.verdict.is_open and not self._is_told:
            self._is_alone = True
            self._give_up_starting()
            for birth, host in self.elastic.where.items():
                if host != (self.host or 0):
                    self.elastic.not_started(birth)
            self.say("the store is unreachable: automatic replacement is disabled")

    def _give_up_starting(self) -> None:
        while self._starting:
            birth, task = self._starting.popitem()
            self.elastic.not_started(birth)  # here, since a task that has not begun cannot handle its cancellation
            task.cancel()

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._defect = self._defect or (None if task.cancelled() else task.exception())
        self._changed.set()

    async def _watch_sizes(self, exits: KeyValue) -> None:
        """Follow requests for another number of ranks."""
        elastic = self.elastic
        async for size in exits.watch_sizes():
            self._held = None  # the request has replaced the limit
            if self.verdict.is_open and not elastic.is_ending and size != elastic.asked:
                self._dismiss(elastic.resize(size, await self._waiting(exits)))
                self._say_size(self._start_owed())

    def _say_size(self, count: int) -> None:
        self.say(f"{self.elastic.size} ranks are wanted" + (f"; {count} started" if count else ""))

    async def _watch_slots(self, exits: KeyValue) -> None:
        """Follow the discovery script: grow with its slots, and have ranks without a slot leave."""
        if self.discovery is None or (known := self.elastic.slots) is None:
            return
        async for slots in self.discovery.answers(known, self.say):
            for line in difference(known, slots):
                self.say(f"--discover: {line}")
            self.elastic.slots = known = slots
            waiting = await self._waiting(exits)
            if self._is_told or not self.verdict.is_open or self.elastic.is_ending:
                return
            self._make_fit(waiting)
            await self._hold(exits)

    def _make_fit(self, waiting: list[int]) -> None:
        elastic, before = self.elastic, self.elastic.size
        self._dismiss(elastic.vacate(waiting))
        now = (elastic.capacity, elastic.asked, *sorted(elastic.in_stage(Stage.LEAVING)))
        if now != self._fitted:
            self._fitted = now
            self._dismiss(elastic.fit(waiting))
        count = self._start_owed()
        if count or elastic.size != before:
            self._say_size(count)

    async def _hold(self, exits: KeyValue) -> None:
        """Tell the ranks, as soon as the store can save it, the wanted size and which of them have to leave."""
        going = sorted(self.elastic.in_stage(Stage.LEAVING))
        wanted = Wanted(self.elastic.size, tuple(going))
        if wanted == self._held:
            return
        if going and (self._held is None or going != list(self._held.leavers)):
            self.say(f"these are to go: {ranks_in_words(going)}")
        self._held = wanted
        with contextlib.suppress(KfcommError):
            await exits.hold(wanted)

    async def _watch_arrivals(self) -> None:
        """Start ranks on hosts whose launchers arrive later, or return."""
        while True:
            address = await self.arrivals.get()
            if self.verdict.is_open and not self._is_told:
                self.say(f"a launcher has come on {address}")
                self._start_owed()

    async def _watch_replaced(self, exits: KeyValue) -> None:
        """Start replacements that the ranks have requested."""
        elastic = self.elastic
        async for birth, _ in exits.watch(REPLACED):
            if self.verdict.is_open and not elastic.is_ending and elastic.replace(birth):
                self.say(f"rank {birth} is to be replaced; {self._start_owed()} started in its place")

    async def _watch_leaving(self, exits: KeyValue) -> None:
        async for host, _ in exits.watch(LEAVING):
            self.elastic.places[host].is_gone = True

    async def _watch_launchers(self, exits: KeyValue) -> None:
        """Mark the unreported ranks of launchers that have ended as not started."""
        async for host, _ in exits.watch(LAUNCHERS):
            self.elastic.places[host].is_gone = True
            for birth in self.elastic.births_at(host):
                if birth not in self.ended:
                    self._note(Exit(birth, NOT_STARTED, Why.ITSELF))

    async def _waiting(self, exits: KeyValue) -> list[int]:
        """Uids of processes that were started to join, and have not been admitted."""
        return [birth for birth in sorted(self.elastic.running) if not await self._was_let_in(birth, exits)]

    async def _was_let_in(self, birth: int, exits: KeyValue) -> bool:
        """Whether a process takes part, or did. Processes not admitted before the store is gone end by themselves."""
        try:
            return birth < self.blame.size or await exits.was_let_in(birth)
        except StoreClosed:
            return True

    def hear_released(self, birth: int) -> None:
        """As in `ElasticLauncher`; start a replacement if one is wanted, as after another change of size."""
        ElasticLauncher.hear_released(self, birth)
        if self.elastic.released(birth) and (count := self._start_owed()):
            self._say_size(count)
        self._changed.set()

    def _dismiss(self, births: Iterable[int]) -> None:
        """Release processes that are not wanted any more."""
        for birth in births:
            self.elastic.released(birth)
            self._is_dismissed(birth)
            if birth not in self.children:
                self._do(claimed(self._exits, f"{DISMISSED}/{birth}"))


async def _asked(exits: KeyValue, size: int) -> None:
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
