"""Reactor: deferred calls, timers, ready descriptors and pollers, without a thread or an event loop of its own.

It holds pending work, and ``progress`` does the work that is due. Any thread may drive it, one at a time: an asyncio
loop (``LoopDriver``), or a caller that blocks (``kfcomm.sync``). Pollers look for news without a descriptor: those in
shared memory.

Invariants:

- Callbacks run inside ``progress`` only, one after the other, and never inside the call that registered them.
- ``woken`` is called whenever something becomes due while no driver is at work; a resting driver must react to it.
- Other threads than the driver, without the lock that excludes it, may only call ``call_soon_threadsafe``.
"""

from __future__ import annotations

import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from kfcomm.common import do_nothing

logger = logging.getLogger("kfcomm")

Callback = Callable[..., object]

READABLE, WRITABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP, select.EPOLLOUT
_EVENTS = 64
"""Ready descriptors that one system call returns at most."""
LOOKS = 64
"""Polls of shared memory between polls of descriptors."""


class Poller(Protocol):
    """Source of news without a descriptor, that must be polled: shared memory."""

    is_awake: bool  # this process polls, so that peers need not wake it

    @property
    def is_needed(self) -> bool:
        """Whether it is worth polling: something is awaited, or peers wait for what is queued."""

    def progress(self) -> bool:
        """Poll once; whether there was anything."""

    def park(self) -> bool:
        """Have peers wake this process by a descriptor from now on; False if there is something to do instead."""

    def unpark(self) -> None:
        """Poll again, without wake-ups."""


class Readiness(Protocol):
    """Part of a driver that links need; a `Reactor` and every asyncio loop have it."""

    def call_soon(self, callback: Callback, *arguments: Any) -> object:
        """Call back soon, not from inside this call."""

    def add_reader(self, descriptor: int, callback: Callback) -> object:
        """Call back whenever this descriptor is readable."""

    def remove_reader(self, descriptor: int) -> object:
        """Stop calling back."""

    def add_writer(self, descriptor: int, callback: Callback) -> object:
        """Call back whenever this descriptor is writable."""

    def remove_writer(self, descriptor: int) -> object:
        """Stop calling back."""


class Timer:
    """A deferred call at a given time."""

    __slots__ = ("arguments", "callback", "when_s")

    def __init__(self, when_s: float, callback: Callback, arguments: tuple[Any, ...]) -> None:
        self.when_s = when_s
        self.callback: Callback | None = callback
        self.arguments = arguments

    def cancel(self) -> None:
        """Cancel the call."""
        self.callback = None
        self.arguments = ()


class Reactor:
    """Deferred calls, timers, descriptors and pollers of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.time = clock  # the monotonic clock; another one where time is virtual
        self.pollers: list[Poller] = []  # polled in every ``progress``
        self.looks = LOOKS  # polls without news before a driver also looks at descriptors and the clock
        # This host has more ranks than processors; more programs and I/O threads of ranks. Set by the session.
        self.is_crowded = self.is_full = False
        self.is_driven = False  # the driver will call ``progress`` again before it rests; set by the driver
        self.woken: Callable[[], None] = do_nothing  # called when something is due; set by the driver
        # called with an error that a callback raised; set by the driver
        self.failed: Callable[[BaseException], None] = _log
        self._watched: dict[int, tuple[Callback | None, Callback | None]] = {}
        self.due_s = float("inf")  # earliest time of a timer, by that clock
        self.deferred: deque[tuple[Callback, tuple[Any, ...]]] = deque()  # due calls, and their arguments
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._is_rung = False
        self._found: list[tuple[int, int]] = []
        self._ringing = threading.Lock()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.add_reader(self._bell, self._answer)

    # ---------------------------------------------------------------- what is to be done

    def call_soon(self, callback: Callback, *arguments: Any) -> None:
        """Call back in this ``progress`` or the next one."""
        ready = self.deferred
        ready.append((callback, arguments))
        if len(ready) == 1 and not self.is_driven:
            self.woken()

    def wake(self) -> None:
        """Call ``woken`` for something that is due outside this reactor."""
        if not self.is_driven:
            self.woken()

    def call_soon_threadsafe(self, callback: Callback, *arguments: Any) -> None:
        """Call back soon, from any thread. Raises `RuntimeError`: the reactor is closed."""
        if self._epoll.closed:
            raise RuntimeError("this reactor is closed")
        self.deferred.append((callback, arguments))
        self.ring()

    def ring(self) -> None:
        """Make ``wait`` return, on whatever thread."""
        with self._ringing:  # else the bell and its flag could differ for good
            if not self._is_rung and not self._epoll.closed:
                os.eventfd_write(self._bell, 1)
                self._is_rung = True

    def call_later(self, delay_s: float, callback: Callback, *arguments: Any) -> Timer:
        """Call back after so many seconds."""
        return self.call_at(self.time() + delay_s, callback, *arguments)

    def call_at(self, when_s: float, callback: Callback, *arguments: Any) -> Timer:
        """Call back at a time of the monotonic clock."""
        timer = Timer(when_s, callback, arguments)
        heapq.heappush(self._timers, (when_s, next(self._numbers), timer))
        if when_s < self.due_s:
            self.due_s = when_s
            if not self.is_driven:
                self.woken()
        return timer

    def add_reader(self, descriptor: int, callback: Callback) -> None:
        """Call back whenever this descriptor is readable."""
        self._watch(descriptor, callback, self._watched.get(descriptor, (None, None))[1])

    def remove_reader(self, descriptor: int) -> None:
        """Stop calling back."""
        self._watch(descriptor, None, self._watched.get(descriptor, (None, None))[1])

    def add_writer(self, descriptor: int, callback: Callback) -> None:
        """Call back whenever this descriptor is writable."""
        self._watch(descriptor, self._watched.get(descriptor, (None, None))[0], callback)

    def remove_writer(self, descriptor: int) -> None:
        """Stop calling back."""
        self._watch(descriptor, self._watched.get(descriptor, (None, None))[0], None)

    # ---------------------------------------------------------------- for drivers

    def progress(self, *, is_told: bool = False) -> bool:
        """Do everything that is due, without waiting; whether there was anything.

        Descriptors are skipped if ``is_told``: the driver is notified when one of ``descriptors`` is readable.
        """
        moved = self.glance()
        if not is_told and (len(self._watched) > 1 or self._is_rung):  # more than the bell
            moved = self._look_at_descriptors() or moved
        if self.due_s <= self.time():
            moved = self._run_timers() or moved
        return (bool(self.deferred) and self._run_ready()) or moved

    def glance(self) -> bool:
        """Run deferred calls and pollers only, without descriptors and timers: 1 µs less than ``progress``."""
        moved = False
        if self.deferred:
            moved = self._run_ready()
        for poller in self.pollers:
            try:
                if poller.progress():
                    moved = True
            except Exception as error:  # noqa: BLE001  as in `_run`
                self.failed(error)
                moved = True
        return moved

    @property
    def is_needed(self) -> bool:
        """Whether it is worth polling."""
        for poller in self.pollers:  # noqa: SIM110  a generator would cost three times as much
            if poller.is_needed:
                return True
        return False

    @property
    def is_awake(self) -> bool:
        """Whether there are pollers that peers do not wake."""
        for poller in self.pollers:  # noqa: SIM110  see is_needed
            if poller.is_awake:
                return True
        return False

    @property
    def next_deadline_s(self) -> float:
        """Time of the next timer, by the monotonic clock; infinity without one."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        self.due_s = due_s = timers[0][0] if timers else float("inf")
        return due_s

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor to wait for: readable while a watched one is ready, or after ``ring``."""
        return () if self._epoll.closed else (self._epoll.fileno(),)

    def own_descriptors(self) -> list[int]:
        """Return descriptors that a forked child must close, besides those that are watched."""
        return [] if self._epoll.closed else [self._epoll.fileno(), self._bell]

    def park(self) -> bool:
        """Have peers wake this process from now on; False if there is something to do instead."""
        if not self.deferred and self._park_all():
            return True
        self.unpark()
        return False

    def unpark(self) -> None:
        """Poll from now on, without wake-ups."""
        for poller in self.pollers:
            poller.unpark()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a watched descriptor is ready, ``ring`` is called, or the time is over; runs no callback.

        The next ``progress`` begins with the descriptors found ready, without another system call. This is the only
        method that may be called while another thread drives: the findings may be out of date, which callbacks must
        tolerate.
        """
        self._found = self._epoll.poll(max(0.0, timeout_s), _EVENTS)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that would be lost otherwise; ``context`` as in asyncio."""
        self.failed(context.get("exception") or RuntimeError(context["message"]))

    def close(self) -> None:
        """Stop watching, and drop deferred calls."""
        self.deferred.clear()
        self._timers.clear()
        self._watched.clear()
        with self._ringing:
            if not self._epoll.closed:
                self._epoll.close()
                os.close(self._bell)
                self._is_rung = False

    # ---------------------------------------------------------------- inside

    def _answer(self) -> None:
        with self._ringing:
            if self._is_rung:  # else it was answered since it was found ready
                self._is_rung = False
                os.eventfd_read(self._bell)

    def _watch(self, descriptor: int, reader: Callback | None, writer: Callback | None) -> None:
        epoll = self._epoll
        mask = (READABLE if reader is not None else 0) | (WRITABLE if writer is not None else 0)
        if descriptor in self._watched:
            if mask:
                epoll.modify(descriptor, mask)
            else:
                del self._watched[descriptor]
                epoll.unregister(descriptor)
        elif mask:
            epoll.register(descriptor, mask)
        if mask:
            self._watched[descriptor] = (reader, writer)

    def _park_all(self) -> bool:
        is_parked = True
        for poller in self.pollers:
            try:
                is_parked = poller.park() and is_parked
            except Exception as error:  # noqa: BLE001  parking polls once more
                self.failed(error)
                is_parked = False
        return is_parked

    def _look_at_descriptors(self) -> bool:
        moved = False
        found, self._found = self._found, []
        for descriptor, events in found or self._epoll.poll(0, _EVENTS):
            reader, writer = self._watched.get(descriptor, (None, None))
            if reader is not None and events & READABLE:
                self._run(reader, ())
                moved = True
            if writer is not None and events & ~select.EPOLLIN and self._watched.get(descriptor, (0, 0))[1] is writer:
                self._run(writer, ())
                moved = True
        return moved

    def _run_timers(self) -> bool:
        now_s = self.time()
        timers = self._timers
        moved = False
        while timers and timers[0][0] <= now_s:
            timer = heapq.heappop(timers)[2]
            if timer.callback is not None:
                self._run(timer.callback, timer.arguments)
                moved = True
        self.due_s = timers[0][0] if timers else float("inf")
        return moved

    def _run_ready(self) -> bool:
        """Run the calls deferred so far; those that they defer wait for the next turn, so that others get theirs."""
        ready = self.deferred
        for _ in range(len(ready)):
            if not ready:  # closed by one of them
                break
            callback, arguments = ready.popleft()
            self._run(callback, arguments)
        return True

    def _run(self, callback: Callback, arguments: Sequence[Any]) -> None:
        try:
            callback(*arguments)
        except Exception as error:  # noqa: BLE001  a defect in one callback must not stop the others
            self.failed(error)


def _log(error: BaseException) -> None:
    logger.error("an error in a callback of the engine", exc_info=error)
