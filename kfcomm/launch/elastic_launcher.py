"""Launchers of an elastic job: one on each host; the primary one, of the first host, decides where ranks are started.

They communicate through folders of the store::

    folder       writer                   value
    -----------  -----------------------  ----------------------------------------------------------------
    start/HOST   primary                  uid of a process that the launcher of that host starts
    dismissed    primary                  uid of a waiting process that is not wanted any more
    outcome      primary                  how the job has ended; ends it on all hosts
    leaving      a launcher that was      no rank is started there any more
                 asked to end
    launchers    a launcher that ends     ranks that it did not start are started elsewhere
    given-up     ranks                    uid of a rank that they gave up; it is killed
    released     ranks                    uid of a rank that has left the job; it ends by itself
    silent       a launcher               its ranks without a sign of life for so long that live peers would
                                          have given them up

If the primary launcher is gone, the others keep their ranks running until these end, or until it is restarted: then
they report all exits again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import KfcommError, RendezvousError
from kfcomm.launch.exit_reports import Failure
from kfcomm.launch.launcher import Launcher, now_s
from kfcomm.launch.process import Child, CommandError
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.keyvalue import (
    AGAIN_S,
    DISMISSED,
    GIVEN_UP,
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

_SAID_WITHIN_S = 5.0
_LOOKS = 4
"""Number of checks for signs of life within ``lost_after_s``."""
RELEASED_WITHIN_S = 60.0
"""Time for released ranks to end after the job; stopped ranks get none."""
NOT_STARTED = 126
"""Exit code of a process that the kernel did not run."""


@dataclass(slots=True)
class ElasticLauncher(Launcher):
    """Watches the ranks of one host, which may end before the job does.

    Attributes:
        lost_after_s: time without a sign of life after which a rank is silent.
        start: starts the process of a uid.
        say: shows a message.
        lived_s: time of the last sign of life of each rank of this host that ever sent one.
        silent: uids of silent ranks.
        dismissed: uids of processes that were to start or waiting, and are not wanted any more.
        released: uids that the ranks have released.
    """

    lost_after_s: float = field(kw_only=True)
    start: Callable[[int], Child] = field(init=False)
    say: Callable[[str], None] = field(init=False)
    lived_s: Mapping[int, float] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    _ran_s: dict[int, float] = field(default_factory=dict)
    dismissed: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    _patience: asyncio.TimerHandle | None = None

    async def _launch(self, birth: int, exits: KeyValue) -> None:
        if not self.has_stopped and birth not in self.dismissed:  # since the order
            try:
                self._follow_too(birth, self.start(birth))
                return
            except CommandError as error:
                self.say(f"rank {birth} could not be started: {error}")
        end = Exit(birth, NOT_STARTED, Why.ITSELF)
        self._note(end)
        await self._report(end, exits)

    async def _watch_given_up(self, exits: KeyValue) -> None:
        """Kill ranks that the others have given up: they may be stopped or stuck.

        After the grace only: a live rank is notified that it was given up, and shows its user why it fails.
        """
        async for birth, _ in exits.watch(GIVEN_UP):
            self._is_given_up(birth)
            self._kill_later(birth)

    def _stop(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    async def _watch_released(self, exits: KeyValue) -> None:
        """Hear of released ranks that were stopped before they could report their release."""
        async for birth, _ in exits.watch(RELEASED):
            self.hear_released(birth)

    def hear_released(self, birth: int) -> None:
        """Note that the ranks have released this one, which ends by itself."""
        self.released.add(birth)

    def _why(self, rank: int) -> Why:
        return Why.RELEASED if rank in self.released else Launcher._why(self, rank)

    def _wait_for_released(self) -> None:
        """The job is over: give released ranks time to end."""
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(self.grace_s, self._wait_longer)

    def _wait_longer(self) -> None:
        late = (self.released & self.children.keys()) - self.ended.keys()
        if late:
            self.say(f"the job is over; {these(late)} released before, and waited for up to {RELEASED_WITHIN_S:g} s")
        self._patience = asyncio.get_running_loop().call_later(RELEASED_WITHIN_S, self._wait_no_longer)

    def _wait_no_longer(self) -> None:
        for birth in self.released:
            self._is_dismissed(birth)

    def _is_dismissed(self, birth: int) -> None:
        self.dismissed.add(birth)
        self._signal(birth, signal.SIGTERM)
        self._kill_later(birth)

    def _kill_later(self, birth: int) -> None:
        asyncio.get_running_loop().call_later(self.grace_s, self._signal, birth, signal.SIGKILL)

    async def _watch_signs_of_life(self, exits: KeyValue) -> None:
        """Find the silent ranks of this host: their processes are stopped, or have joined and send no sign of life."""
        heard_s = looked_s = now_s()
        while True:
            await asyncio.sleep(self.lost_after_s / _LOOKS)
            # A launcher that was stopped (Ctrl-Z) has read no signs of life meanwhile: the time starts again.
            if now_s() - looked_s > self.lost_after_s / 2:
                heard_s = now_s()  # this launcher itself was stopped
            looked_s = now_s()
            self.listen()
            due_s = looked_s - self.lost_after_s
            here = self.children.keys() - self.ended.keys()
            self.silent = {birth for birth in here if max(self._seen_s(birth, looked_s), heard_s) < due_s}
            for birth in self.silent & self.released:
                self._signal(birth, signal.SIGKILL)
            await self._tell_silent(exits)

    def _seen_s(self, birth: int, now_s: float) -> float:
        """Time at which a rank was last seen alive; before it joins and while it leaves, by its process state."""
        if not self.children[birth].is_stopped:
            self._ran_s[birth] = now_s
        ran_s, said = self._ran_s.setdefault(birth, now_s), self.blame.said(birth)
        has_left = said is not None and said.at_s is not None
        return ran_s if has_left else min(ran_s, self.lived_s.get(birth, ran_s))

    async def _tell_silent(self, exits: KeyValue) -> None:
        """Report the silent ranks, after a check."""

    def _is_given_up(self, birth: int) -> None:
        """Note that the ranks continue without this one."""

    def _signal(self, birth: int, number: int) -> None:
        if birth in self.children and birth not in self.ended:
            self.children[birth].send(number)


@dataclass(slots=True)
class HostLauncher(ElasticLauncher):
    """Launcher on any other host: carries out the orders of the primary launcher.

    Attributes:
        first: client of the primary launcher's store, for signs of life in both directions.
        let_go: called when the job is over, to end processes that wait to be admitted.
    """

    first: StoreClient = field(kw_only=True)
    let_go: Callable[[], None] = lambda: None
    _told_silent: set[int] = field(default_factory=set)
    _is_concluded: bool = False
    _is_alone: bool = False
    _has_left: bool = False

    def _begin(self, exits: KeyValue) -> list[Coroutine[Any, Any, None]]:
        return [
            self._watch_orders(exits), self._watch_dismissed(exits), self._watch_outcome(exits),
            self._watch_given_up(exits), self._watch_first(exits), self._watch_signs_of_life(exits),
            self._watch_released(exits),
        ]  # fmt: skip

    def _is_over(self, watcher: asyncio.Task[None]) -> bool:
        del watcher
        is_free = self._is_concluded or self._is_alone or not self.verdict.is_open
        return is_free and self.ended.keys() >= self.children.keys()

    async def _look(self, exits: KeyValue) -> None:
        if self.verdict.signal is not None and not self._has_left:
            self._has_left = True
            await claimed(exits, f"{LEAVING}/{self.host}")
        if self._is_alone and any(code == 0 for code in self.ended.values()):
            # the program is completed: no rank is left to admit others
            for birth in self.children.keys() - self.ended.keys():
                with contextlib.suppress(KfcommError):
                    if birth >= self.blame.size and not await exits.was_let_in(birth):
                        self._signal(birth, signal.SIGTERM)

    async def _tell_silent(self, exits: KeyValue) -> None:
        if self.silent == self._told_silent:
            return
        with contextlib.suppress(KfcommError, TimeoutError):
            async with asyncio.timeout(_SAID_WITHIN_S):
                await exits.set(f"{SILENT}/{self.host}", msgpack.packb(sorted(self.silent)))
                self._told_silent = self.silent

    async def _watch_first(self, exits: KeyValue) -> None:
        """Send signs of life to the primary launcher, and notice when it is gone."""
        while True:
            async for _ in self.first.watch_exits(self.host):
                pass  # handled by _watch_others
            self._first_is_gone()
            if not await self._has_first_again():
                self.let_go()
                return
            self._is_alone = False
            self.say("the launcher of the first host is back")
            for birth in self.children.keys() & self.ended.keys():  # it may have missed the report
                await self._report(Exit(birth, self.ended[birth], self._why(birth)), exits)

    async def _report(self, end: Exit, exits: KeyValue) -> None:
        """Report to the primary launcher's store too, in case the backend is unreachable."""
        told = [self.first.report_exit(end)] if exits is not self.first else []
        await asyncio.gather(exits.report_exit(end), *told, return_exceptions=True)

    async def _has_first_again(self) -> bool:
        """Wait until the primary launcher is back, or the job is known to be over."""
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
            self.say(
                "the launcher of the first host is unreachable: automatic replacement is disabled until it restarts"
            )
            self._changed.set()

    def _has_ended(self, end: Exit) -> None:
        """Do nothing: the primary launcher decides."""

    def _exits_of(self, exits: KeyValue) -> AsyncIterator[Exit]:
        return exits.watch_exits(lasting=True)

    def _store_is_gone(self) -> None:
        """Do nothing: `_watch_first` watches the primary launcher."""

    def _judge(self) -> None:
        ends = [(birth, self.ended[birth]) for birth in self.children if birth in self.ended]
        if self._is_alone and self.verdict.is_open and ends and all(code for _, code in ends):
            birth, code = ends[-1]
            self.verdict.failed = Failure(birth, code, now_s())

    async def _watch_orders(self, exits: KeyValue) -> None:
        async for birth, _ in exits.watch(f"{START}/{self.host}"):
            if self.verdict.is_open and not self._is_concluded:
                await self._launch(birth, exits)

    async def _watch_dismissed(self, exits: KeyValue) -> None:
        async for birth, _ in exits.watch(DISMISSED):
            self._is_dismissed(birth)

    async def _watch_outcome(self, exits: KeyValue) -> None:
        async for _, said in exits.watch(OUTCOME):
            self._is_concluded = True
            self._wait_for_released()
            number, rank, code, summary = msgpack.unpackb(said)
            if self.verdict.is_open and number:
                self.verdict.signal = number
                self._end(number)
            elif self.verdict.is_open and code:
                self.verdict.failed = Failure(rank, code, now_s(), summary=summary)
                self._end(signal.SIGTERM)
            self._changed.set()


def these(births: Iterable[int]) -> str:
    """Ranks as the subject of a sentence: ``ranks 1-2 are``."""
    found = list(births)
    return f"{ranks_in_words(found)} {'is' if len(found) == 1 else 'are'}"


async def claimed(exits: KeyValue, key: str, value: bytes = b"") -> None:
    """Claim a key, within a bounded time; errors of the store are ignored."""
    with contextlib.suppress(KfcommError, TimeoutError):
        async with asyncio.timeout(_SAID_WITHIN_S):
            await exits.claim(key, value)
