"""Launchers of the other hosts: their arrival, their role in an elastic job, and whether they are alive.

The launchers of a job communicate through folders of the store::

    folder       writer                   value
    -----------  -----------------------  ----------------------------------------------------------------
    launched/P   a launcher               the one launcher that has arrived for position P
    comers/N     a launcher               its host; it asks for a new position
    admitted/N   primary                  it has the N-th position after those of the beginning; or why not
    launchers    a launcher that ends     ranks that it did not start are started elsewhere
    leaving      a launcher that was      no rank is started there any more
                 asked to end
                                          of an elastic job:
    start/HOST   primary                  uid of a process that the launcher of that host starts
    dismissed    primary                  uid of a waiting process that is not wanted any more
    outcome      primary                  how the job has ended; ends it on all hosts
    given-up     ranks                    uid of a rank that they gave up; it is killed
    released     ranks                    uid of a rank that has left the job; it ends by itself
    silent       a launcher               its ranks without a sign of life for so long that live peers would
                                          have given them up

The launcher of a host that is named at the beginning has its position from there; one that arrives later asks for a new
one.

A position belongs to one launcher, as long as it lives: a launcher that returns to a host gets another one, since
the store still holds what was written for and by the previous launcher. The first launcher assigns it once the
previous launcher is known to be gone, and not while that one still asks.

Launchers ask the first host's store for exits again and again. One that does not arrive, or stops asking, is given up:
the ranks of its host are reported as ended, so that all launchers and ranks learn of it as of any other exit.

If the primary launcher of an elastic job is gone, the others keep their ranks running until these end, or until it is
restarted: then they report all exits again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgpack

from kfcomm.errors import KfcommError, RendezvousError
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.exit_reports import Failure
from kfcomm.launch.hosts import HostPlan
from kfcomm.launch.job import LaunchJob
from kfcomm.launch.launcher import Launcher, LauncherPhase, claimed
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.keyvalue import (
    ADMITTED,
    AGAIN_S,
    BOUNDS,
    COMERS,
    DISMISSED,
    GIVEN_UP,
    LAUNCHED,
    LAUNCHERS,
    LEAVING,
    OUTCOME,
    RELEASED,
    SILENT,
    START,
    Exit,
    KeyValue,
    StoreClosed,
    Why,
)  # fmt: skip

LOOK_EVERY_S = 0.5
_LATE_S = 5.0
_SAID_WITHIN_S = 5.0
_POLL_S = 2.0
_MISSED_AFTER_S = 15.0
_COMES_WITHIN_S = 5.0
"""Time for a launcher to take its assigned position; after that it counts as ended."""

logger = logging.getLogger("kfcomm")


class NotNeeded(RendezvousError):
    """The job ended before it used this host."""


async def arrive(job: LaunchJob, client: StoreClient, store: KeyValue, within_s: float) -> int:
    """Report the arrival of this launcher, initial or later, to the first host's store; return its position.

    ``store`` is its client, or this host's mirror of it. The store of a finished job may be there for ``within_s``.

    Raises:
        NotNeeded: the job has ended.
        RendezvousError: another launcher runs or ran on this host; or the store cannot be reached.
    """
    plan, me = job.plan, job.launcher
    loop = asyncio.get_running_loop()
    deadline_s, is_told = loop.time() + within_s, False
    while True:
        try:
            # The store returns the value that holds the key: this launcher's, or that of one that was there before.
            held = b"" if plan.is_late else await store.claim(f"{LAUNCHED}/{plan.here}", me)
            if held == me:
                await client.arrive(plan.here)
                return plan.here
            if job.elastic is None:
                raise RendezvousError(_taken(held))
            await store.find(BOUNDS)  # waits until the store is there
            if plan.is_late and not is_told:
                logger.warning("this host, as %s, waits until --discover names it", plan.address)
                is_told = True
            position = await _new_position(job, store, max(within_s, _MISSED_AFTER_S))
            if position is not None and await store.claim(f"{LAUNCHED}/{position}", me) == me:
                await client.arrive(position)
                return position
        except StoreClosed as error:
            client.identity = b""  # another job may take its place, and this launcher may belong to that
            if loop.time() >= deadline_s:
                raise NotNeeded(f"the job ended before it had a use for this host: {error}") from error
        await asyncio.sleep(LOOK_EVERY_S)


async def _new_position(job: LaunchJob, store: KeyValue, patience_s: float) -> int | None:
    """Request a position, and wait for it; None if the request is lost, as when a job begins again.

    Raises:
        StoreClosed: the store has closed; or is gone for longer than ``patience_s``, and is not restored.
        RendezvousError: the request is refused; or the store is gone, and is kept elsewhere.
    """
    loop = asyncio.get_running_loop()
    asked: bytes = msgpack.packb([job.plan.address, job.launcher])
    number, heard_s = 0, loop.time()
    answers: dict[str, bytes] = {}
    while (told := answers.get(str(number))) is None:
        try:
            if not number:
                number = await _ask(store, asked)
            comers = await store.collect(COMERS, 0, timeout_s=0.0)
            if comers.get(str(number)) != asked:
                return None
            # a waiter is notified when the store closes
            answers = await store.collect(ADMITTED, len(answers) + 1, timeout_s=_POLL_S)
            heard_s = loop.time()
        except StoreClosed:
            raise
        except RendezvousError as error:
            if loop.time() - heard_s > patience_s:
                if job.options.store is not None:
                    raise
                raise StoreClosed(str(error)) from error
            await asyncio.sleep(LOOK_EVERY_S)
    if told:
        raise RendezvousError(told.decode(errors="replace"))
    return job.plan.num_first - 1 + number


async def _ask(store: KeyValue, asked: bytes) -> int:
    """Request a position; return the number of the request."""
    number = 0
    # Numbers have no gaps: if another launcher claims one first, try the next.
    while not number or await store.claim(f"{COMERS}/{number}", asked) != asked:
        number = 1 + len(await store.collect(COMERS, 0, timeout_s=0.0))
    return number


def expect_those_admitted(store: LocalStore, plan: HostPlan, elastic: Elasticity) -> None:
    """Restore the positions that a previous first launcher assigned."""
    for name, told in store.contents.folder(ADMITTED).items():
        if not told and (asked := store.contents.held(f"{COMERS}/{name}")) is not None:
            elastic.expect(plan.num_first - 1 + int(name), msgpack.unpackb(asked)[0])


async def admit(job: LaunchJob, elastic: Elasticity, store: LocalStore) -> None:
    """Assign positions to launchers that request one, on the first host; never returns."""
    loop = asyncio.get_running_loop()
    since_s: dict[str, float] = {}
    begun_s = loop.time()
    while True:
        gone = _gone(store)
        for position, place in enumerate(elastic.places):
            if place.is_gone and str(position) not in gone and store.contents.heard_s.get(position, 0.0) > begun_s:
                # It has asked since: it has arrived, or is back after a restart of this launcher.
                place.is_gone = False
                job.arrivals.put_nowait(place.address)
        for name in sorted(store.contents.folder(COMERS).keys() - store.contents.folder(ADMITTED).keys(), key=int):
            address, _ = msgpack.unpackb(store.contents.held(f"{COMERS}/{name}") or b"")
            refusal = _refusal(store, elastic, address, since_s.setdefault(name, loop.time()), loop.time())
            if refusal == "":
                elastic.expect(job.plan.num_first - 1 + int(name), address)
            if refusal is not None:
                await store.claim(f"{ADMITTED}/{name}", refusal.encode())
        await asyncio.sleep(LOOK_EVERY_S)


def _refusal(store: LocalStore, elastic: Elasticity, address: str, since_s: float, now_s: float) -> str | None:
    """Reason why a launcher, which asks since then, is refused; empty to admit it; None if undecided."""
    if address == elastic.places[0].address:
        return _taken(b"that of the first host")
    if elastic.slots is not None and address not in elastic.slots:
        return None
    gone = _gone(store)
    for position, place in enumerate(elastic.places):
        if place.address != address or str(position) in gone:
            continue
        heard_s, who = store.contents.heard_s.get(position), store.contents.held(f"{LAUNCHED}/{position}")
        # The previous launcher still asks, so it lives.
        if heard_s is not None and heard_s > since_s:
            return _taken(who or b"")
        # It may be lost without being given up yet, or still be on its way to its position.
        if who is not None or now_s - since_s < _COMES_WITHIN_S:
            return None
    return ""


def _gone(store: LocalStore) -> set[str]:
    """Positions whose launchers have ended."""
    return store.contents.folder(LEAVING).keys() | store.contents.folder(LAUNCHERS).keys()


def _taken(who: bytes) -> str:
    told = f": {who.decode(errors='replace')}" if who else ""
    return f"another launcher has come for this host before{told}; a job has one on each host at a time"


@dataclass(slots=True)
class HostRole:
    """Role of a launcher on any other host of an elastic job: carries out the orders of the primary launcher."""

    launcher: Launcher
    first: StoreClient  # client of the primary launcher's store, for signs of life in both directions
    lost_after_s: float  # time without a sign of life after which a rank is silent
    let_go: Callable[[], None] = lambda: None  # called when the job is over, to end processes that wait to be admitted
    _told_silent: set[int] = field(default_factory=set)
    _has_left: bool = False

    def watches(self, store: KeyValue) -> list[Coroutine[Any, Any, None]]:
        """Watch for orders, and for the primary launcher."""
        return [
            self._watch_orders(store), self._watch_dismissed(store), self._watch_outcome(store),
            self._watch_given_up(store), self._watch_first(store), self._watch_silent(store),
            self._watch_released(store),
        ]  # fmt: skip

    def exits(self, store: KeyValue) -> AsyncIterator[Exit]:
        """Exits, also after the primary launcher was restarted."""
        return store.watch_exits(lasting=True)

    def rank_ended(self, end: Exit) -> None:
        """Do nothing: the primary launcher decides."""

    def rank_released(self, uid: int) -> None:
        """Give the reason with the exit of this rank."""
        self.launcher.ranks.released.add(uid)

    def store_lost(self) -> None:
        """Do nothing: `_watch_first` watches the primary launcher."""

    async def act(self, store: KeyValue) -> None:
        """Say that this host leaves; while alone, end by the ranks of this host."""
        launcher, ranks = self.launcher, self.launcher.ranks
        if launcher.outcome.signal is not None and not self._has_left:
            self._has_left = True
            await claimed(store, f"{LEAVING}/{launcher.host}")
        if launcher.phase is not LauncherPhase.ALONE:
            return
        if ranks.ended and not ranks.living and all(ranks.ended.values()):
            uid = [*ranks.children][-1]
            launcher.fail(Failure(uid, ranks.ended[uid], monotonic()))
        elif 0 in launcher.ended.values():
            # the program is completed: no rank is left to admit others
            for uid in ranks.living:
                with contextlib.suppress(KfcommError):
                    if uid >= launcher.blame.size and not await store.was_let_in(uid):
                        ranks.send(signal.SIGTERM, [uid])

    def is_over(self) -> bool:
        """Whether all ranks of this host have ended, and no others are to be started here."""
        return self.launcher.phase is not LauncherPhase.RUNS and not self.launcher.ranks.living

    async def _watch_silent(self, store: KeyValue) -> None:
        async for silent in self.launcher.ranks.silences(self.lost_after_s, self.launcher.blame):
            if silent != self._told_silent:
                with contextlib.suppress(KfcommError, TimeoutError):
                    async with asyncio.timeout(_SAID_WITHIN_S):
                        await store.set(f"{SILENT}/{self.launcher.host}", msgpack.packb(sorted(silent)))
                        self._told_silent = silent

    async def _watch_first(self, store: KeyValue) -> None:
        """Send signs of life to the primary launcher, and notice when it is gone."""
        launcher = self.launcher
        while True:
            async for _ in self.first.watch_exits(launcher.host):
                pass  # handled by the launcher
            if launcher.phase is LauncherPhase.RUNS:
                launcher.advance(LauncherPhase.ALONE)
                launcher.say(
                    "the launcher of the first host is unreachable: automatic replacement is disabled until it restarts"
                )
            if not await self._has_first_again():
                self.let_go()
                return
            if launcher.phase is LauncherPhase.ALONE:
                launcher.phase = LauncherPhase.RUNS
            launcher.say("the launcher of the first host is back")
            for uid in list(launcher.ranks.ended):  # it may have missed the report
                await launcher.report(launcher.exit_of(uid), store)

    async def _has_first_again(self) -> bool:
        """Wait until the primary launcher is back, or the job is known to be over."""
        while True:
            try:
                await self.first.arrive(self.launcher.host or 0, timeout_s=AGAIN_S)
            except StoreClosed:
                return False
            except RendezvousError:
                await asyncio.sleep(AGAIN_S)
            else:
                return True

    async def _watch_orders(self, store: KeyValue) -> None:
        async for uid, _ in store.watch(f"{START}/{self.launcher.host}"):
            if self.launcher.phase <= LauncherPhase.ALONE:
                await self.launcher.launch(uid, store)

    async def _watch_dismissed(self, store: KeyValue) -> None:
        async for uid, _ in store.watch(DISMISSED):
            self.launcher.ranks.dismiss(uid)

    async def _watch_given_up(self, store: KeyValue) -> None:
        async for uid, _ in store.watch(GIVEN_UP):
            # After the grace only: a live rank is notified that it was given up, and shows its user why it fails.
            self.launcher.ranks.kill_later(uid)

    async def _watch_released(self, store: KeyValue) -> None:
        """Hear of released ranks that were stopped before they could report their release."""
        async for uid, _ in store.watch(RELEASED):
            self.rank_released(uid)

    async def _watch_outcome(self, store: KeyValue) -> None:
        launcher = self.launcher
        async for _, said in store.watch(OUTCOME):
            launcher.ranks.wait_for_released(launcher.say)
            number, rank, code, summary = msgpack.unpackb(said)
            if launcher.outcome.is_open and number:
                launcher.interrupt(number)
            elif launcher.outcome.is_open and code:
                launcher.fail(Failure(rank, code, monotonic(), summary=summary))
            launcher.advance(LauncherPhase.OVER)


async def watch_hosts(job: LaunchJob, store: LocalStore, *, come_within_s: float, lost_after_s: float) -> None:
    """Report the ranks of hosts without a live launcher as ended; returns when no host is left to watch.

    A launcher has to arrive within ``come_within_s``, and then to ask at least every ``lost_after_s``.
    """
    loop = asyncio.get_running_loop()
    since_s = dict.fromkeys(range(1, job.plan.num_first), loop.time())
    over: set[int] = set()
    looked_s = loop.time()
    # Launchers of an elastic job may arrive later: then this never returns.
    while since_s or job.elastic is not None:
        await asyncio.sleep(min(LOOK_EVERY_S, lost_after_s / 4))
        now_s = loop.time()
        if now_s - looked_s > _LATE_S:
            # this launcher itself was stopped: the others could not ask
            since_s = dict.fromkeys(since_s, now_s)
        looked_s = now_s
        for host in set(map(int, store.contents.folder(LAUNCHED))) - over - {0}:
            since_s.setdefault(host, now_s)
        left = store.contents.folder(LAUNCHERS)
        for host in list(since_s):
            heard_s = store.contents.heard_s.get(host)
            since_s[host] = max(since_s[host], heard_s or 0.0)
            # A launcher that has ended in order has reported its ranks itself.
            if str(host) not in left:
                if now_s - since_s[host] <= (come_within_s if heard_s is None else lost_after_s):
                    continue
                why = Why.ABSENT if heard_s is None else Why.SILENT
                with contextlib.suppress(RendezvousError):
                    await store.claim(f"{LEAVING}/{host}", b"")
                    for rank in job.ranks_of(host):
                        await store.report_exit(Exit(rank, 1, why))
            over.add(host)
            del since_s[host]


def company(plan: HostPlan, store: LocalStore) -> set[str]:
    """Other hosts, by position, that neither left before the end of the job nor were given up."""
    late = {name for name in store.contents.folder(LAUNCHED) if int(name) >= plan.num_first}
    return {*map(str, range(1, plan.num_first)), *late} - store.contents.folder(LEAVING).keys()


async def all_know(plan: HostPlan, store: LocalStore, wait_s: float) -> None:
    """Wait until the launchers of the other hosts have ended, knowing the outcome; or time is up."""
    loop = asyncio.get_running_loop()
    deadline_s, left = loop.time() + wait_s, store.contents.folder(LAUNCHERS)
    while not company(plan, store) <= left.keys() and loop.time() < deadline_s:
        left = await store.contents.collect(LAUNCHERS, len(left) + 1, None, min(LOOK_EVERY_S, deadline_s - loop.time()))
