"""Primary launcher of an elastic job, on its first host: decides which ranks are replaced, where, and which leave.

See `other_hosts` for its communication with the other launchers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgpack

from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import KfcommError
from kfcomm.launch.elastic import Elasticity, Stage
from kfcomm.launch.exit_reports import Failure
from kfcomm.launch.hosts import Discovery, difference
from kfcomm.launch.launcher import NOT_STARTED, JobOutcome, Launcher, LauncherPhase, claimed
from kfcomm.launch.local_ranks import these
from kfcomm.rendezvous.keyvalue import (
    DISMISSED,
    GIVEN_UP,
    LAUNCHERS,
    LEAVING,
    OUTCOME,
    RELEASED,
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
class Sizing:
    """Starts and dismisses the processes of an elastic job, as its size, its hosts and their slots demand."""

    launcher: Launcher
    elastic: Elasticity  # numbers and stages of the ranks
    discovery: Discovery | None = None  # script that names the hosts; None if they do not change
    # addresses of hosts whose launchers arrived after the beginning
    arrivals: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    store: KeyValue = field(init=False)
    # tasks of processes whose start the store has not saved, by uid
    starting: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _held: Wanted | None = None
    _fitted: tuple[Any, ...] = ()

    def watches(self, store: KeyValue) -> list[Coroutine[Any, Any, None]]:
        """Start what is missing; watch requests and hosts."""
        self.store = store
        self.start_owed()
        return [
            self._ask_for_spares(), self._watch_sizes(), self._watch_arrivals(), self._watch_slots(),
            self._watch_replaced(),
        ]  # fmt: skip

    @property
    def is_quiet(self) -> bool:
        """Whether a rank has completed the program, or the job has failed: then no rank is started."""
        return self.elastic.is_ending or not self.launcher.outcome.is_open

    def start_owed(self) -> int:
        """Start owed processes, as far as there are places, and later the others; return how many were started."""
        count = 0
        while self.launcher.phase is LauncherPhase.RUNS and (found := self.elastic.start(monotonic())) is not None:
            uid, host = found
            self.starting[uid] = self.launcher.spawn(self._start_at(host, uid))
            count += 1
        if self.elastic.owed and (due_s := self.elastic.next_place_s()) is not None:
            # not cancelled when it is not needed any more: then nothing is owed
            asyncio.get_running_loop().call_at(due_s, self.start_owed)
        return count

    async def _start_at(self, host: int, uid: int) -> None:
        """Have the launcher of a host start a process."""
        try:
            # Saved before the process starts, since a restarted launcher must not use the uid again.
            await self.store.claim(f"{START}/{host}/{uid}", b"")
        except KfcommError as error:
            self.elastic.not_started(uid)
            if not isinstance(error, StoreClosed):
                self.launcher.say(f"rank {uid} is not started: {error}; another is in {RETRY_S:g} s")
                asyncio.get_running_loop().call_later(RETRY_S, self.start_owed)
            return
        finally:
            self.starting.pop(uid, None)
        if host == (self.launcher.host or 0):
            await self.launcher.launch(uid, self.store)

    def give_up_starting(self) -> None:
        """Withdraw the starts that the store has not saved."""
        while self.starting:
            uid, task = self.starting.popitem()
            self.elastic.not_started(uid)  # here, since a task that has not begun cannot handle its cancellation
            task.cancel()

    def ask_size(self, size: int) -> asyncio.Task[None]:
        """Request a number of ranks; the task is done when the store has saved it, which may wait until it answers."""
        return self.launcher.spawn(_asked(self.store, size))

    async def _ask_for_spares(self) -> None:
        """Request the initial size: ranks admit spares only up to a requested size."""
        if self.discovery is None and self.elastic.spares and await self.store.find(f"{SIZES}/1") is None:
            await self.store.ask_size(self.elastic.size)

    async def _watch_sizes(self) -> None:
        """Follow requests for another number of ranks."""
        async for size in self.store.watch_sizes():
            self._held = None  # the request has replaced the limit
            if not self.is_quiet and size != self.elastic.asked:
                self.dismiss(self.elastic.resize(size, await self.waiting()))
                self.say_size(self.start_owed())

    def say_size(self, count: int) -> None:
        """Tell the user about a change of size."""
        self.launcher.say(f"{self.elastic.size} ranks are wanted" + (f"; {count} started" if count else ""))

    async def _watch_slots(self) -> None:
        """Follow the discovery script: grow with its slots, and have ranks without a slot leave."""
        if self.discovery is None or (known := self.elastic.slots) is None:
            return
        async for slots in self.discovery.answers(known, self.launcher.say):
            for line in difference(known, slots):
                self.launcher.say(f"--discover: {line}")
            self.elastic.slots = known = slots
            waiting = await self.waiting()
            # Checked now: the job may have ended while the store answered.
            if self.is_quiet or self.launcher.phase > LauncherPhase.ALONE:
                return
            self._make_fit(waiting)
            await self._hold()

    def _make_fit(self, waiting: list[int]) -> None:
        elastic, before = self.elastic, self.elastic.size
        self.dismiss(elastic.vacate(waiting))
        now = (elastic.capacity, elastic.asked, *sorted(elastic.in_stage(Stage.LEAVING)))
        # Only after a change, since `fit` forgets earlier losses.
        if now != self._fitted:
            self._fitted = now
            self.dismiss(elastic.fit(waiting))
        count = self.start_owed()
        if count or elastic.size != before:
            self.say_size(count)

    async def _hold(self) -> None:
        """Tell the ranks, as soon as the store can save it, the wanted size and which of them have to leave."""
        going = sorted(self.elastic.in_stage(Stage.LEAVING))
        wanted = Wanted(self.elastic.size, tuple(going))
        if wanted == self._held:
            return
        if going and (self._held is None or going != list(self._held.leavers)):
            self.launcher.say(f"these are to go: {ranks_in_words(going)}")
        self._held = wanted
        with contextlib.suppress(KfcommError):
            await self.store.hold(wanted)

    async def _watch_arrivals(self) -> None:
        """Start ranks on hosts whose launchers arrive later, or return."""
        while True:
            address = await self.arrivals.get()
            if self.launcher.phase <= LauncherPhase.ALONE:
                self.launcher.say(f"a launcher has come on {address}")
                self.start_owed()

    async def _watch_replaced(self) -> None:
        """Start replacements that the ranks have requested."""
        async for uid, _ in self.store.watch(REPLACED):
            if not self.is_quiet and self.elastic.replace(uid):
                self.launcher.say(f"rank {uid} is to be replaced; {self.start_owed()} started in its place")

    async def waiting(self) -> list[int]:
        """Uids of processes that were started to join, and have not been admitted."""
        return [uid for uid in sorted(self.elastic.running) if not await self.was_let_in(uid)]

    async def was_let_in(self, uid: int) -> bool:
        """Whether a process takes part, or did."""
        try:
            return uid < self.launcher.blame.size or await self.store.was_let_in(uid)
        except StoreClosed:
            return True  # processes that were not admitted before end by themselves

    def dismiss(self, uids: Iterable[int]) -> None:
        """Release processes that are not wanted any more."""
        for uid in uids:
            self.elastic.released(uid)
            self.launcher.ranks.dismiss(uid)
            if uid not in self.launcher.ranks.children:
                # Its launcher is on another host.
                self.launcher.spawn(claimed(self.store, f"{DISMISSED}/{uid}"))


@dataclass(slots=True)
class PrimaryRole:
    """Role of the launcher on the first host of an elastic job, or the only one."""

    launcher: Launcher
    sizing: Sizing  # starts and dismisses processes
    lost_after_s: float  # time without a sign of life after which a rank is silent
    store: KeyValue = field(init=False)
    _given_up: set[int] = field(default_factory=set)
    _failures: dict[int, Failure] = field(default_factory=dict)
    _secondary: set[int] = field(default_factory=set)
    _is_silence_told: bool = False

    @property
    def elastic(self) -> Elasticity:
        """Numbers and stages of the ranks."""
        return self.sizing.elastic

    def watches(self, store: KeyValue) -> list[Coroutine[Any, Any, None]]:
        """Start what is missing; watch requests, hosts and the state of the ranks."""
        self.store = store
        failed = {uid: code for uid, code in self.launcher.ended.items() if code}
        self._failures = {uid: Failure(uid, code, monotonic()) for uid, code in failed.items()}
        return [
            *self.sizing.watches(store), self._watch_given_up(), self._watch_leaving(), self._watch_launchers(),
            self._watch_silent(), self._watch_released(),
        ]  # fmt: skip

    def exits(self, store: KeyValue) -> AsyncIterator[Exit]:
        """Exits, until the store is unreachable."""
        return store.watch_exits(self.launcher.host)

    def is_over(self) -> bool:
        """Whether the outcome is published, and all ranks of this host have ended."""
        return self.launcher.phase is LauncherPhase.OVER and not (self.launcher.ranks.living or self.sizing.starting)

    async def act(self, store: KeyValue) -> None:
        """Settle and publish the outcome, once no rank continues."""
        launcher = self.launcher
        if self.sizing.is_quiet:
            self.sizing.give_up_starting()
        if self.elastic.is_ending:  # no rank is left to admit them
            self.sizing.dismiss(await self.sizing.waiting())
        await self.fail_if_nobody_goes_on()
        if launcher.phase < LauncherPhase.OVER and not (launcher.outcome.is_open and self.elastic.running):
            if launcher.outcome.is_open and not self.elastic.is_ending:
                launcher.outcome.failed = self._cause()
            launcher.advance(LauncherPhase.OVER)
            launcher.ranks.wait_for_released(launcher.say)
            await claimed(store, f"{OUTCOME}/0", _outcome(launcher.outcome))

    async def fail_if_nobody_goes_on(self) -> None:
        """End the job if no rank is left that could admit waiting processes."""
        running = self.elastic.running
        if not running or not self.launcher.outcome.is_open:
            return
        members = running.difference(await self.sizing.waiting())
        is_silent = bool(members) and members <= await self._silent_ones()
        # If all ranks are silent and none has failed, there is only a message: they were stopped, and may be continued.
        if is_silent and not self._is_silence_told:
            stuck = f"{these(members)} stopped or stuck"
            self.launcher.say(f"no rank that runs has shown a sign of life for {self.lost_after_s:g} s: {stuck}")
        self._is_silence_told = is_silent
        if is_silent:
            is_over, what = await self._is_one_missed(), "go on"
        else:
            is_over, what = not (members or self.elastic.is_ending) and bool(self._failures), "let others in"
        if is_over:
            self.launcher.say(f"no rank is left to {what}")
            self.sizing.give_up_starting()
            self.sizing.dismiss(running - members)
            self.launcher.fail(self._cause())

    async def _silent_ones(self) -> set[int]:
        """Uids of the silent ranks of all hosts."""
        told: dict[str, bytes] = {}
        with contextlib.suppress(StoreClosed):
            told = await self.store.collect(SILENT, 0, timeout_s=0.0)
        return self.launcher.ranks.silent.union(*map(msgpack.unpackb, told.values()))

    async def _is_one_missed(self) -> bool:
        """Whether a rank has failed that live ranks would have given up by now."""
        for uid in self._failures.keys() - self._given_up:
            if await self.sizing.was_let_in(uid):
                return True
        return False

    def _cause(self) -> Failure:
        """The last failure that is not given up and blames no other rank; else the last one."""
        unanswered = [one for uid, one in self._failures.items() if uid not in self._given_up]
        causes = [one for one in unanswered if one.rank not in self._secondary]
        nobody = Failure(
            max(self.launcher.ended, default=0), 1, monotonic(), summary="no rank has come to the end of the program"
        )
        return (causes or unanswered or [nobody, *self._failures.values()])[-1]

    def rank_ended(self, end: Exit) -> None:
        """Replace a rank that failed, or settle that too few are left."""
        launcher, elastic = self.launcher, self.elastic
        if end.why == Why.RELEASED:
            elastic.released(end.rank)
        stage = elastic.ended(end.rank, end.code, monotonic())
        # The launcher of that host is gone, so it cannot start replacements.
        if end.why in (Why.SILENT, Why.ABSENT):
            elastic.places[elastic.where[end.rank]].is_gone = True
        if not launcher.outcome.is_open:
            return
        if end.code == 0 or stage is Stage.RELEASED:
            if end.code and end.rank not in launcher.ranks.dismissed:
                launcher.say(f"rank {end.rank}, which was released, ended ({_how(end)})")
            self.sizing.start_owed()  # a slot may have become free
            return
        if elastic.is_ending and stage is Stage.GIVEN_UP and (end.code < 0 or end.why == Why.ELSEWHERE):
            return  # the others have completed the program without it, and its process was killed or has heard of that
        said = launcher.blame.said(end.rank)
        summary = "" if said is None else said.summary
        self._failures[end.rank] = Failure(end.rank, end.code, monotonic(), summary=summary)
        if end.why == Why.ELSEWHERE:
            self._secondary.add(end.rank)
        if elastic.has_failed:
            launcher.fail(self._cause())
            return
        num_left, count = len(elastic.running), self.sizing.start_owed()
        instead = f"; {count} started in its place" if count else ""
        if elastic.owed and (due_s := elastic.next_place_s()) is not None:
            instead = f"; another is started in {max(0.0, due_s - monotonic()):.0f} s"
        launcher.say(f"rank {end.rank} ended ({_how(end)}); {num_left} go on{instead}")

    def rank_released(self, uid: int) -> None:
        """Start a replacement if one is wanted, as after another change of size."""
        self.launcher.ranks.released.add(uid)
        if self.elastic.released(uid) and (count := self.sizing.start_owed()):
            self.sizing.say_size(count)
        self.launcher.changed.set()

    def store_lost(self) -> None:
        """Continue without the store: running ranks do not need it. Other hosts are no longer reachable."""
        if self.launcher.phase is LauncherPhase.RUNS:
            self.launcher.advance(LauncherPhase.ALONE)
            self.sizing.give_up_starting()
            for uid, host in self.elastic.where.items():
                # Their exits cannot be heard any more, and the job would wait for them for ever.
                if host != (self.launcher.host or 0):
                    self.elastic.not_started(uid)
            self.launcher.say("the store is unreachable: automatic replacement is disabled")

    async def _watch_given_up(self) -> None:
        """Kill ranks that the others have given up: they may be stopped or stuck."""
        async for uid, _ in self.store.watch(GIVEN_UP):
            self.rank_given_up(uid)

    def rank_given_up(self, uid: int) -> None:
        """Note that the ranks continue without one of them."""
        self._given_up.add(uid)
        self.elastic.given_up(uid)
        self.launcher.ranks.kill_later(uid)  # after it could show its user why it fails

    async def _watch_released(self) -> None:
        """Hear of released ranks that were stopped before they could report their release, or of other hosts."""
        async for uid, _ in self.store.watch(RELEASED):
            self.rank_released(uid)

    async def _watch_silent(self) -> None:
        async for _ in self.launcher.ranks.silences(self.lost_after_s, self.launcher.blame):
            self.launcher.changed.set()

    async def _watch_leaving(self) -> None:
        async for host, _ in self.store.watch(LEAVING):
            self.elastic.places[host].is_gone = True

    async def _watch_launchers(self) -> None:
        """Mark the unreported ranks of launchers that have ended as not started."""
        async for host, _ in self.store.watch(LAUNCHERS):
            self.elastic.places[host].is_gone = True
            for uid in self.elastic.uids_at(host):
                self.launcher.note(Exit(uid, NOT_STARTED, Why.ITSELF))


async def _asked(exits: KeyValue, size: int) -> None:
    with contextlib.suppress(KfcommError):
        await exits.ask_size(size)


def _outcome(outcome: JobOutcome) -> bytes:
    failed = outcome.failed
    rank, code, summary = (-1, 0, "") if failed is None else (failed.rank, failed.code, failed.summary)
    said: bytes = msgpack.packb([outcome.signal or 0, rank, code, summary])
    return said


def _how(end: Exit) -> str:
    if end.why in (Why.SILENT, Why.ABSENT):
        return "its host is not heard of any more"
    return describe_exit(end.code)
