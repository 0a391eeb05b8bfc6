"""A blocking call that does the work of its session itself, while the I/O thread rests.

It posts, looks for what arrives through shared memory and carries it out, until its own result is there. Whoever
else wants the baton gets it in between. Once there is something to do that only the loop can, or nothing comes for a
while, the call steps back and waits like any other.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kfcomm.sync.baton import BatonLoop

if TYPE_CHECKING:
    from kfcomm.session import Session

T = TypeVar("T")

QUIET_S = 2e-3
"""Of fruitless looking until the caller goes to sleep."""
LOOKS = 64
"""Between two glances at the clock."""


class StandIn:
    """One blocking call; see the module."""

    __slots__ = ("_loop", "_session", "_works")

    def __init__(self, loop: BatonLoop, session: Session) -> None:
        self._loop = loop
        self._session = session
        self._works = False

    def run(self, call: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Begin what ``call`` gives and bring it as far as may be.

        Returns:
            A future that is done, or something that the loop has to bring to its end.
        """
        loop, session = self._loop, self._session
        begun: Awaitable[T] | None = None
        loop.stand_in()
        try:
            self._works = True
            session.stand_in()
            begun = call()
            if isinstance(begun, asyncio.Future):
                self._look_until_done(begun)
        except BaseException as error:
            self._interrupted(error, begun)
            raise
        finally:
            session.step_back()
            loop.step_back()
        return begun

    def _look_until_done(self, future: asyncio.Future[T]) -> None:
        loop, hub = self._loop, self._session.hub
        if hub is None:
            return
        progress, is_done, pause = hub.progress, future.done, os.sched_yield
        quiet_since_s = 0.0
        while not (is_done() or loop.is_stirred):
            if loop.baton.is_wanted:
                loop.let_others()
            for _ in range(LOOKS):
                if progress():
                    quiet_since_s = 0.0
                    break
                self._works = False
                pause()
                self._works = True
            else:
                now_s = time.monotonic()
                if not quiet_since_s:
                    quiet_since_s = now_s
                elif now_s - quiet_since_s > QUIET_S:
                    return

    def _interrupted(self, error: BaseException, begun: Awaitable[T] | None) -> None:
        """Ctrl-C between two looks ends the call alone; in the midst of the work nobody knows what is left undone."""
        if self._works and not isinstance(error, Exception):
            self._session.give_up(f"the communicator was interrupted at its work by {type(error).__name__}")
        elif isinstance(begun, asyncio.Future):
            begun.cancel()
