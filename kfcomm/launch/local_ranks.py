"""Processes of the ranks of this host: forwarded signals, the end with its grace, and silence.

Effects of signals at a launcher on the ranks of its job:

============================ ======================================================================================
signal                       effect
============================ ======================================================================================
SIGINT, SIGTERM, SIGHUP,     each rank's process group gets it; what has not ended after the grace is killed, and a
SIGQUIT                      second one kills at once. SIGHUP is left ignored where it is (nohup)
SIGUSR1, SIGUSR2             the process of each rank that survives it gets it, on all hosts; its child processes do not
SIGTSTP                      the groups of all ranks are stopped, on all hosts; then a single launcher
SIGCONT                      they go on
============================ ======================================================================================

Ranks are started with SIGUSR1 and SIGUSR2 ignored, since by default these end a process, and a rank that has not come
to ``kfcomm.init`` has no handler yet. Such a signal goes to the process of the rank alone: the one that has joined, or,
before, the one that was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import monotonic

import msgpack

from kfcomm.common.sizes import ranks_in_words
from kfcomm.errors import KfcommError
from kfcomm.launch.exit_reports import Blame, ExitReports
from kfcomm.launch.process import PASSED_ON, Child
from kfcomm.rendezvous.keyvalue import AGAIN_S, KeyValue, StoreClosed

_WAIT_S = 20.0
FOLDER = "signals"
"""Folder of the store for signals to the ranks of all hosts: number of the signal, and position of its launcher."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HALTING = (signal.SIGTSTP, signal.SIGCONT)
MAX_TOLD = 10_000
"""Largest number of signals of one job between hosts; the store saves each."""
_LOOKS = 4
"""Number of checks for signs of life within ``lost_after_s``."""
RELEASED_WITHIN_S = 60.0
"""Time for released ranks to end after the job; stopped ranks get none."""

logger = logging.getLogger("kfcomm")


@dataclass(slots=True)
class LocalRanks:
    """Processes of this host, by uid."""

    grace_s: float  # seconds between asking and killing
    children: dict[int, Child] = field(default_factory=dict)  # all processes that were ever started here
    ended: dict[int, int] = field(default_factory=dict)  # return codes of ended ones
    reports: ExitReports = field(init=False)  # receives their exit reports and signs of life
    silent: set[int] = field(default_factory=set)  # ranks without a sign of life for too long
    # processes that were to start or waiting, and are not wanted any more
    dismissed: set[int] = field(default_factory=set)
    # ranks that the others of an elastic job have released; they end by themselves
    released: set[int] = field(default_factory=set)
    _ran_s: dict[int, float] = field(default_factory=dict)
    _killer: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None

    @property
    def living(self) -> set[int]:
        """Uids of the processes that have not ended."""
        return self.children.keys() - self.ended.keys()

    def send(self, number: int, uids: Iterable[int]) -> None:
        """Send a signal to the process groups of the live ranks."""
        for uid in self.living.intersection(uids):
            self.children[uid].send(number)

    def forward(self, number: int) -> None:
        """Forward a signal that does not end the job."""
        for uid in self.living:
            if number in PASSED_ON:
                # To one process alone: what a rank starts after it has set its handler has the default action again
                # (execve(2)), and would end.
                self.children[uid].notify(number, self.reports.pids.get(uid))
            else:
                self.children[uid].send(signal.SIGSTOP if number == signal.SIGTSTP else number)

    def end(self, number: int) -> None:
        """Ask all to end; kill them after the grace, or at once the second time."""
        # The timer is never reset: a job that keeps failing while it ends is still killed in time.
        if self._killer is None:
            self.send(number, self.children)
            self._killer = asyncio.get_running_loop().call_later(self.grace_s, self._kill)
        else:
            self._kill()

    def _kill(self) -> None:
        self.send(signal.SIGKILL, self.children)

    def dismiss(self, uid: int) -> None:
        """End a process that is not wanted any more, or will not be started."""
        self.dismissed.add(uid)
        self.send(signal.SIGTERM, [uid])
        self.kill_later(uid)

    def kill_later(self, uid: int) -> None:
        """Kill a process after the grace."""
        asyncio.get_running_loop().call_later(self.grace_s, self.send, signal.SIGKILL, [uid])

    def wait_for_released(self, say: Callable[[str], None]) -> None:
        """Give released ranks time to end, since the job is over."""
        loop = asyncio.get_running_loop()

        def wait_longer() -> None:
            if late := self.released & self.living:
                limit = f"waited for up to {RELEASED_WITHIN_S:g} s"
                say(f"the job is over; {these(late)} released before, and {limit}")
            self._patience = loop.call_later(RELEASED_WITHIN_S, wait_no_longer)

        def wait_no_longer() -> None:
            for uid in self.released:
                self.dismiss(uid)

        if self._patience is None:
            self._patience = loop.call_later(self.grace_s, wait_longer)

    def close(self) -> None:
        """Cancel the timers that are not guarded by the end of the ranks."""
        for timer in (self._killer, self._patience):
            if timer is not None:
                timer.cancel()

    async def silences(self, lost_after_s: float, blame: Blame) -> AsyncIterator[set[int]]:
        """Yield `silent` again and again: processes stopped, or joined and without a sign of life, for that long."""
        heard_s = looked_s = monotonic()
        while True:
            await asyncio.sleep(lost_after_s / _LOOKS)
            if monotonic() - looked_s > lost_after_s / 2:
                # This launcher itself was stopped (Ctrl-Z) and has read no signs of life: the time starts again.
                heard_s = monotonic()
            looked_s = monotonic()
            self.reports.drain()
            seen_s = {uid: self._seen_s(uid, looked_s, blame) for uid in self.living}
            self.silent = {uid for uid, at_s in seen_s.items() if max(at_s, heard_s) < looked_s - lost_after_s}
            # The other ranks no longer watch a released one, so that none of them would give it up.
            self.send(signal.SIGKILL, self.silent & self.released)
            yield self.silent

    def _seen_s(self, uid: int, now_s: float, blame: Blame) -> float:
        """Time at which a rank was last seen alive; before it joins and while it leaves, by its process state."""
        if not self.children[uid].is_stopped:
            self._ran_s[uid] = now_s
        ran_s, said = self._ran_s.setdefault(uid, now_s), blame.said(uid)
        has_left = said is not None and said.at_s is not None
        return ran_s if has_left else min(ran_s, self.reports.lived_s.get(uid, ran_s))


def these(uids: Iterable[int]) -> str:
    """Ranks as the subject of a sentence: ``ranks 1-2 are``."""
    found = list(uids)
    return f"{ranks_in_words(found)} {'is' if len(found) == 1 else 'are'}"


class Passing:
    """Forwards signals to the ranks of this host, and through the store to other hosts, if there are any."""

    def __init__(self, host: int | None, deliver: Callable[[int], None]) -> None:
        self._host = host
        self._deliver = deliver
        self._told: asyncio.Queue[int] = asyncio.Queue()

    def hear(self, number: int) -> None:
        """Forward a signal that this launcher got."""
        self._deliver(number)
        if self._host is not None:
            self._told.put_nowait(number)
        elif number == signal.SIGTSTP:
            # SIGTSTP is handled here, so its default action has to be repeated by hand.
            os.kill(os.getpid(), signal.SIGSTOP)

    async def tell(self, store: KeyValue) -> None:
        """Send the signals of this launcher to the others; never returns."""
        while True:
            number = await self._told.get()
            with contextlib.suppress(KfcommError):
                await self._tell(store, number)

    async def _tell(self, store: KeyValue, number: int) -> None:
        # Unique by its random part: `claim` returns the value that holds the key, and numbers have no gaps.
        mine: bytes = msgpack.packb([number, self._host, secrets.token_bytes(8)])
        while (count := len(await store.collect(FOLDER, 0, timeout_s=0.0))) < MAX_TOLD:
            if await store.claim(f"{FOLDER}/{count + 1}", mine) == mine:
                return
        logger.warning("%s is passed on to the ranks of this host alone", signal.Signals(number).name)

    async def listen(self, store: KeyValue) -> None:
        """Deliver new signals of other launchers to the ranks of this host; ends with the store."""
        known: set[str] | None = None
        while True:
            count = 0 if known is None else len(known) + 1
            try:
                found = await store.collect(FOLDER, count, timeout_s=0.0 if known is None else _WAIT_S)
            except StoreClosed:
                return
            except KfcommError:
                await asyncio.sleep(AGAIN_S)
                continue
            for name in sorted(found.keys() - (found.keys() if known is None else known), key=int):
                number, host, _ = msgpack.unpackb(found[name])
                if host != self._host and number in (*PASSED_ON, *HALTING):
                    self._deliver(number)
            # The first answer only says what was sent before this launcher began to listen.
            known = set(found)


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Ignore forwarded signals while the launcher has no ranks."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def heard(end: Callable[[int], None], pass_on: Callable[[int], None]) -> Iterator[None]:
    """Handle signals with these functions; ignored signals stay ignored, except forwarded ones."""
    loop = asyncio.get_running_loop()
    handlers = dict.fromkeys((*PASSED_ON, *HALTING), pass_on) | dict.fromkeys(ENDING, end)
    for number in (signal.SIGHUP, signal.SIGTSTP):
        if signal.getsignal(number) is signal.SIG_IGN:
            del handlers[number]
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
            if number in PASSED_ON:
                # asyncio has restored the default, by which a late signal would end the launcher.
                signal.signal(number, signal.SIG_IGN)
