"""Ends of sessions: bounded waits of a closing rank, and the release of inherited sessions in a forked child.

A long wait is reported, and each has its own bound. Once there is a reason to hurry (a peer is dead, the program was
interrupted), the rest of closing has one common bound, which may end a wait that is under way.

A forked child keeps a dead parent's sockets alive, so peers of the parent would see no end of file: the child replaces
every inherited descriptor, without touching the loop that the parent still uses (their epoll is shared).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kfcomm.engine.control import ControlPlane
    from kfcomm.engine.session import Session
    from kfcomm.transports.base import DeviceSetup

logger = logging.getLogger("kfcomm")

LEAVE_WITHIN_S = 5.0
"""How long a rank that closes stays for the others' questions."""
CLOSE_WITHIN_S = 2.0
"""How long it waits for the goodbyes of its links."""
HURRIED_S = 1.5
"""What is left of closing takes no longer than this once there is a reason to hurry."""
SAID_AFTER_S = 1.0
"""A wait that lasts longer is reported once, unless other ranks have left meanwhile: many ranks take longer."""


class Drain(NamedTuple):
    """A wait of `Closing` before the collectives in flight fail."""

    done: asyncio.Future[None]
    within_s: float  # bound of the wait
    why: Callable[[], str]  # the ranks waited for and the reason, in words


class Closing:
    """The waits of a rank that closes, one after the other; all on one loop."""

    def __init__(self, rank: int) -> None:
        self.was_cancelled = False  # the caller of close was; the rest is then done without waiting
        self._rank = rank
        self._until_s = math.inf
        self._bound: asyncio.Timeout | None = None
        self._report: asyncio.TimerHandle | None = None

    def hurry(self, within_s: float = HURRIED_S) -> None:
        """Bound all further waits together, and the one under way, by this."""
        self._until_s = min(self._until_s, asyncio.get_running_loop().time() + within_s)
        bound = self._bound
        if bound is not None and not bound.expired():
            bound.reschedule(min(self._until_s, bound.when() or math.inf))

    def left_s(self, at_most_s: float) -> float:
        """Bound of a wait that begins now, in seconds."""
        return max(0.0, min(at_most_s, self._until_s - asyncio.get_running_loop().time()))

    async def wait(self, awaited: Awaitable[object], at_most_s: float, why: Callable[[], str] | None = None) -> None:
        """Wait for something, bounded; what is not done by then is cancelled.

        Args:
            awaited: for what.
            at_most_s: how long, in seconds, unless ``hurry`` was called.
            why: for which ranks, and for what, in words; called if it lasts. None: what is awaited reports itself.
        """
        if why is not None:
            self._report = asyncio.get_running_loop().call_later(SAID_AFTER_S / 2, self._say, why)
        try:
            async with asyncio.timeout(self.left_s(at_most_s)) as bound:
                self._bound = bound
                try:
                    await awaited
                finally:
                    self._bound = None
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self.was_cancelled = True
            self.hurry(0.0)
        finally:
            if self._report is not None:
                self._report.cancel()

    async def leave(self, control: ControlPlane) -> None:
        """Stay until no other rank needs this one, bounded."""

        def why() -> str:
            needed = control.needed_by()
            if needed:
                return f"for ranks {needed}, which may still ask this one"
            return "for a thread of its own, which is late (is the machine busy?): no other rank needs it"

        await self.wait(control.leave(LEAVE_WITHIN_S), LEAVE_WITHIN_S, why)

    def _say(self, why: Callable[[], str], before: str = "") -> None:
        loop, reason = asyncio.get_running_loop(), why()
        when_s = None if self._bound is None else self._bound.when()
        if reason != before:
            self._report = loop.call_later(SAID_AFTER_S / 2, self._say, why, reason)
        elif when_s is not None:
            left_s = max(0.0, when_s - loop.time())
            logger.warning("rank %d: close() waits %s, for %.0f s more at the most", self._rank, reason, left_s)


async def in_a_thread(blocking: Callable[[], None]) -> None:
    """Call something that blocks, without holding up the loop."""
    try:
        await asyncio.get_running_loop().run_in_executor(None, blocking)
    except RuntimeError:
        # the interpreter is ending and starts no more threads; then nothing is left on this loop to be held up
        blocking()


sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Those that are not closed, and those of former epochs whose links are not."""
_inherited: list[DeviceSetup] = []
"""In a forked child: kept for ever, since a library that frees what it has on a device fails in a child."""


def open_sessions() -> list[Session]:
    """The sessions of this process that are not closed, by rank."""
    return sorted(
        (session for session in sessions if session.is_in_use and not session.is_closed),
        key=lambda session: session.rank,
    )


def let_go(session: Session) -> None:
    """In a forked child: replace every descriptor of a session by one of /dev/null, and keep its devices alive."""
    descriptors = [
        *session.network.descriptors(),
        *session.engine.links.descriptors(),
        *session.engine.reactor.own_descriptors(),
        *(descriptor for service in session.services for descriptor in service.descriptors()),
    ]
    session.network.sever()
    _inherited.append(session.devices)
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.dup2(nothing, descriptor)
        os.close(nothing)


def _mend_uvloop() -> None:
    """Let a forked child exit: libuv joins its worker threads then, and crashes if the parent has left them behind.

    Asked for work, it starts others (https://github.com/libuv/libuv/issues/4443).
    """
    uvloop = sys.modules.get("uvloop")
    if uvloop is not None:
        loop = uvloop.new_event_loop()
        loop.run_until_complete(loop.getaddrinfo("127.0.0.1", 0))
        loop.close()


def _after_fork() -> None:
    if sessions:
        atexit.register(_mend_uvloop)
    for session in list(sessions):
        session.forked()
    sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
