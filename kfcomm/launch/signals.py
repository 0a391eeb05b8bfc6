"""Effects of signals at a launcher on the ranks of its job.

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
to ``kfcomm.init`` has no handler yet. What a rank starts before inherits that. After it has set a handler, what it
starts has the default again (execve(2)), which is why such a signal goes to the process of the rank alone: the one that
has joined, or, before, the one that was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator

import msgpack

from kfcomm.errors import KfcommError
from kfcomm.rendezvous.keyvalue import AGAIN_S, KeyValue, StoreClosed

_WAIT_S = 20.0
FOLDER = "signals"
"""Folder of the store for signals to the ranks of all hosts: number of the signal, and position of its launcher."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HALTING = (signal.SIGTSTP, signal.SIGCONT)
MAX_TOLD = 10_000
"""Largest number of signals of one job between hosts; the store saves each."""

logger = logging.getLogger("kfcomm")


class Passing:
    """Forwards signals to the ranks of this host, and through the store to those of other hosts.

    Args:
        host: position of this host among several; None for a single host.
        deliver: sends a signal to the ranks of this host.
    """

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
            known = set(found)


def ignore() -> None:
    """Make a new process survive forwarded signals until its program sets a handler."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)


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
                signal.signal(number, signal.SIG_IGN)
