"""Bounded waits of a rank that closes, each reported when it lasts.

Each wait has a bound of its own. Once there is a reason to hurry (a peer is dead, the program was interrupted), the
rest of closing has one common bound, which may end a wait that is under way.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

logger = logging.getLogger("kfcomm")

LEAVE_WITHIN_S = 5.0
"""How long a rank that closes stays for the others' questions."""
CLOSE_WITHIN_S = 2.0
"""How long it waits for the goodbyes of its links."""
HURRIED_S = 1.5
"""What is left of closing takes no longer than this once there is a reason to hurry."""
SAID_AFTER_S = 1.0
"""A wait that lasts longer is reported."""


class Drain(NamedTuple):
    """Something that is waited for before what is in flight fails.

    Attributes:
        done: when it is over.
        within_s: how long it is waited for.
        why: for which ranks, and for what, in words.
    """

    done: asyncio.Future[None]
    within_s: float
    why: Callable[[], str]


class Closing:
    """The waits of a rank that closes, one after the other; all on one loop.

    Attributes:
        was_cancelled: the caller of close was cancelled; the rest was then done without waiting.
    """

    def __init__(self, rank: int) -> None:
        self.was_cancelled = False
        self._rank = rank
        self._until_s = math.inf
        self._bound: asyncio.Timeout | None = None

    def hurry(self, within_s: float = HURRIED_S) -> None:
        """From now on all waits together last no longer than this, the one under way included."""
        self._until_s = min(self._until_s, asyncio.get_running_loop().time() + within_s)
        bound = self._bound
        if bound is not None and not bound.expired():
            bound.reschedule(min(self._until_s, bound.when() or math.inf))

    def left_s(self, at_most_s: float) -> float:
        """How long a wait may last that begins now."""
        return max(0.0, min(at_most_s, self._until_s - asyncio.get_running_loop().time()))

    async def wait(self, awaited: Awaitable[object], at_most_s: float, why: Callable[[], str] | None = None) -> None:
        """Wait for something, bounded; what is not done by then is cancelled.

        Args:
            awaited: for what.
            at_most_s: how long, in seconds, unless ``hurry`` was called.
            why: for which ranks, and for what, in words; called if it lasts. None: what is awaited reports itself.
        """
        report = asyncio.get_running_loop().call_later(SAID_AFTER_S, self._say, why)
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
            report.cancel()

    def _say(self, why: Callable[[], str] | None) -> None:
        when_s = None if self._bound is None else self._bound.when()
        if when_s is not None and why is not None:
            left_s = max(0.0, when_s - asyncio.get_running_loop().time())
            logger.warning("rank %d: close() waits %s, for %.0f s more at the most", self._rank, why(), left_s)


async def in_a_thread(blocking: Callable[[], None]) -> None:
    """Call something that blocks, without holding up the loop."""
    try:
        await asyncio.get_running_loop().run_in_executor(None, blocking)
    except RuntimeError:
        # the interpreter is ending and starts no more threads; then nothing is left on this loop to be held up
        blocking()
