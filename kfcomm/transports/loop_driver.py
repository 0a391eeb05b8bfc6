"""Driver of a reactor by an asyncio loop: readiness callbacks, one timer, and polling while something is awaited.

News in shared memory come without a descriptor. While something is awaited the loop polls, and lets other processes run
in between (sched_yield(2): 1 µs if no other is ready, where any sleep costs 50). After a while without news it parks:
peers must wake it from then on, and an idle process costs nothing.

It works on any asyncio loop, uvloop included. Everything runs on the loop; another driver of the reactor may also call
``wake`` if the loop's ``call_soon`` allows it.
"""

from __future__ import annotations

import asyncio
import os

from kfcomm.transports.reactor import Reactor

SPIN_S = 1e-3
"""Polling without news before the loop parks while something is awaited; a wake-up costs up to a tenth of it."""
LINGER_S = 2e-4
"""The same when nothing is awaited: the next collective of a program often comes soon."""
LOOKS = 16
"""Polls without news before the loop's other callbacks get their turn; 1 where the peers are on the same loop."""


class LoopDriver:
    """Driver of one reactor by one loop, which sleeps at most until ``timer_s``, by the monotonic clock."""

    def __init__(self, reactor: Reactor, loop: asyncio.AbstractEventLoop, *, looks: int = LOOKS) -> None:
        self._reactor = reactor
        self._loop = loop
        self._looks = looks
        self._is_scheduled = self._is_closed = False
        self._quiet_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.timer_s = float("inf")
        reactor.woken = self.wake
        reactor.failed = self._failed
        for descriptor in reactor.descriptors():
            loop.add_reader(descriptor, self._turn)
        self.wake()

    def wake(self) -> None:
        """Poll soon: something is due. Costs 0.1 µs when the loop is about to poll anyway."""
        self._quiet_since_s = 0.0
        if not self._is_scheduled and not self._is_closed:
            # in this order: after an interrupt in between it is done twice, not never
            self._loop.call_soon(self._scheduled_turn)
            self._is_scheduled = True

    def close(self) -> None:
        """Stop driving, and close the reactor."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in self._reactor.descriptors():
            self._loop.remove_reader(descriptor)
        self._reactor.close()

    def _scheduled_turn(self) -> None:
        self._is_scheduled = False
        if not self._is_closed:
            # The loop reports ready descriptors itself, unless turns for the pollers leave it no time.
            self._turn(is_told=not self._reactor.pollers)

    def _turn(self, *, is_told: bool = False) -> None:
        reactor = self._reactor
        reactor.is_driven = True
        try:
            moved = reactor.progress(is_told=is_told)
            if reactor.is_awake and not moved:
                moved = self._look()
        except BaseException:
            self.wake()  # one link has ended by it; the others continue
            raise
        finally:
            reactor.is_driven = False
        if self._is_closed:
            return
        if reactor.deferred or (moved and reactor.is_awake):
            self.wake()
        elif reactor.is_awake:
            self._rest()
        self._set_timer()

    def _look(self) -> bool:
        for _ in range(min(self._looks, self._reactor.looks) - 1):
            os.sched_yield()
            if self._reactor.glance():
                return True
        os.sched_yield()
        return False

    def _rest(self) -> None:
        """Poll again, or park after a while without news."""
        reactor = self._reactor
        now_s = reactor.time()
        quiet_since_s = self._quiet_since_s or now_s
        if now_s - quiet_since_s > self._spin_s():
            if not reactor.park():
                self.wake()
            return
        self.wake()
        self._quiet_since_s = quiet_since_s

    def _spin_s(self) -> float:
        """Polling without news before the loop parks."""
        return SPIN_S if self._reactor.is_needed else LINGER_S

    def _set_timer(self) -> None:
        due_s = self._reactor.next_deadline_s
        if due_s < self.timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self.timer_s = due_s
            self._timer = self._loop.call_later(max(0.0, due_s - self._reactor.time()), self._due)

    def _due(self) -> None:
        self._timer, self.timer_s = None, float("inf")
        self._turn()

    def _failed(self, error: BaseException) -> None:
        message = "an error in a callback of kfcomm's engine"
        self._loop.call_exception_handler({"message": message, "exception": error})
