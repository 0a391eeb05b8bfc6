"""Driver of the engine by blocking callers: each takes the engine lock, posts, and polls until its result is there.

One caller leads at a time; others follow: they sleep until their result is there or the leader has gone (Leader/
Followers: Schmidt et al., 2000). A leader spins while peers of the same host may bring news any moment, then rests on
the engine's descriptor without the lock. While no caller waits, the I/O thread drives what is in flight; it gives way
to a caller at once.

Invariants:

- A call is posted when it is made, by the thread that makes it, whether it blocks or not: so the calls of one thread
  are in the order of the program, over every link.
- What a signal handler raises ends the call alone: handlers run where a call waits (see ``signals``). So does Ctrl-C
  while a caller looks or rests. Inside the engine's own work an exception, of a handler or forced by
  another thread, would leave unknown state behind: then the communicator is closed, with that as its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from os import sched_yield
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from kfcomm.collectives.compiled import NOT_ALIKE
from kfcomm.collectives.slot_use import Over, SlotUse
from kfcomm.common.tracebacks import terse
from kfcomm.engine.direct import LATE_S
from kfcomm.errors import KfcommError, SessionClosed
from kfcomm.sync.lock import Bell
from kfcomm.sync.put_off import PutOff
from kfcomm.sync.thread import LOOK_EVERY_S, IoThread
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor

if TYPE_CHECKING:
    from kfcomm.engine.session import Session

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

QUIET_S = 2e-3
"""Of fruitless looking until a leader rests."""
SOCKET_LOOKS = 16
"""At descriptors, before the kernel is to wake this thread: that takes as long, and the answer is often on its way."""
SLOT_LOOKS = 64
"""At a slot alone, until it is looked at with all the rest."""
NAP_AFTER, NAP_S = 24, 50e-6
"""Looks after which a caller sleeps for a moment, where a host has more ranks than processors. A caller
that yields so often without news has a processor to itself, while the others share the rest; once that one is idle, the
system moves another rank there."""
LULL_S = 0.1
"""Time after a call, with nothing in flight and no caller, until the I/O thread parks. Long, since waking it takes the
caller's time (1 ms with more ranks than cores); a peer that cannot wait rings when it parks."""
MASKED_S = 20e-3
"""The same where no memory is shared: so long what comes stays in the kernel, for the next call of a program that makes
one after the other. Else the I/O thread would wake up for what peers send for that call, and take the caller's time."""


class Awaited(Protocol[T_co]):
    """Something that a caller waits for: a handle, or an operation without one."""

    def done(self) -> bool:
        """Whether it is over."""
        ...

    def result(self) -> T_co:
        """Result of the call, once it is over."""
        ...

    def give_up(self) -> None:
        """End it everywhere, for a caller who was interrupted."""
        ...


class IoDriver(LoopDriver):
    """Drives the engine on the I/O thread, except while a caller leads.

    Attributes:
        calls: after which nothing was in flight.
        has_lull: it will look by itself whether to park.
    """

    def __init__(self, driver: Driver, io: IoThread) -> None:
        self._driver = driver
        self._io = io
        self.calls = self._calls_then = 0
        self.has_lull = False
        super().__init__(driver.reactor, io.loop)

    def lull(self) -> None:
        """A call has ended and nothing is in flight: take over, if none follows soon."""
        if not self._is_closed:
            self.has_lull = True
            self._loop.call_soon(self._begin_lull)

    @property
    def _lull_s(self) -> float:
        return LULL_S if self._reactor.pollers else MASKED_S

    def _begin_lull(self) -> None:
        self._calls_then = self.calls
        self._loop.call_later(self._lull_s, self._after_lull)

    def _after_lull(self) -> None:
        if self._is_closed:
            return
        if self._driver.is_led:  # whoever leads tells when it ends
            self.has_lull = False
        elif self.calls != self._calls_then:
            self._begin_lull()
        else:
            self.has_lull = False
            self.wake()

    def _turn(self, *, is_told: bool = False) -> None:
        if self._driver.is_led:
            self._driver.mask(is_masked=True)  # the leader looks, too; else this thread would be woken again and again
        else:
            self._driver.mask(is_masked=False)
            super()._turn(is_told=is_told)
            self._driver.tell_followers()

    def _look(self) -> bool:
        """Between two looks a caller may take over."""
        return self._io.lock.is_wanted() or super()._look()


class Driver:
    """The callers of one engine, or of several that share a reactor.

    Attributes:
        reactor: of the engine.
        io: the thread that drives it otherwise, and the engine lock.
        signals: what a call on the main thread holds.
        put_off: what is finished before it is closed.
    """

    def __init__(self, io: IoThread, *, is_terse: bool = True) -> None:
        self.io = io
        self.signals = io.signals
        self.is_terse = is_terse
        self.reactor = Reactor()
        self.put_off = PutOff()
        self._lock = io.lock
        self._leader = 0
        """Number of the thread of the caller who drives; 0 if none does."""
        self._awaited: Awaited[Any] | None = None
        """By the leader."""
        self._is_resting = self._is_masked = False
        """Of the leader: it has laid down the lock and sleeps; the I/O thread does not hear of descriptors."""
        self._is_working = False
        """Of the caller who holds the lock, as ``reactor.is_driven``: false whenever none does. The latter is cleared
        without a call: a signal that comes at the first line of ``_leave`` leaves no more behind than the lock."""
        self._followers: dict[int, tuple[Awaited[Any], Bell]] = {}
        self._io_driver: IoDriver = io.run(IoDriver, self, io)
        io.listen = self._io_driver.wake
        self.reactor.woken = self._wake

    def shown(self, error: KfcommError) -> KfcommError:
        """An error as the caller of a blocking verb sees it."""
        return terse(error) if self.is_terse and error is not self.signals.raised else error

    @property
    def is_led(self) -> bool:
        """Whether a caller drives."""
        return self._leader != 0

    # ---------------------------------------------------------------- for callers

    def run(self, function: Callable[[], T], session: Session) -> T:
        """Call something of the engine that does not wait, at once, on the caller's thread, which holds ``signals``.

        Raises:
            SessionClosed: the communicator belongs to the parent process.
        """
        if self._lock.is_mine() or session.engine.unusual:  # as in ``call``
            if self.io.is_current:
                return _run(function, session)
            self.io.may_block()
        try:
            self._enter(session)
            return _run(function, session)
        except BaseException as error:
            self._ended(error, None, session, is_over=True)
            raise
        finally:
            self.reactor.is_driven = False
            self._leave()

    def call(self, begin: Callable[..., Awaited[T] | None], session: Session, *arguments: Any) -> T:
        """Begin a collective and wait for its result; ``NOT_ALIKE`` if ``begin`` gives None, and has begun nothing.

        The verb that calls it holds ``signals``.

        Raises:
            WouldDeadlock: the caller is the I/O thread.
            SessionClosed: the communicator belongs to the parent process.
        """
        lock, reactor = self._lock, self.reactor
        is_mine = lock.is_mine()
        if is_mine or session.engine.unusual:  # in a callback on the I/O thread, perhaps, or in a forked child
            self.io.may_block()
        handle: Awaited[T] | None = None
        is_over = False
        try:
            if is_mine:
                self._found_taken(session)
            else:
                with lock.gate:
                    lock.acquire()
            reactor.is_driven = self._is_working = True
            handle = begin(*arguments)
            if type(handle) is Over:
                self._is_working = reactor.is_driven = False  # as it was found: nothing of the engine's has moved
                lock.release()
                return handle[0]  # type: ignore[no-any-return]
            if type(handle) is SlotUse:
                if self._is_over_soon(handle, session) and handle.is_over:
                    self._is_working = reactor.is_driven = False
                    lock.release()
                    return handle.value  # type: ignore[no-any-return]
                handle = cast("Awaited[T]", handle.enter())
            outcome: T = NOT_ALIKE  # type: ignore[assignment]
            if handle is not None:
                self._see_through(handle, session)
                is_over = True
                outcome = handle.result()
                if self.signals.is_here():
                    self.signals.undo = partial(self._undo, handle, session)
        except BaseException as error:
            try:
                self._ended(error, handle, session, is_over=is_over or handle is None)
            finally:
                reactor.is_driven = False
                self._leave()
            raise
        reactor.is_driven = False
        self._leave()
        return outcome

    def _see_through(self, handle: Awaited[Any], session: Session) -> None:
        """Lead or wait until it is over."""
        if session.engine.links.dirty:  # first: it is over with that, if the others have been here before
            session.engine.links.flush()
        if not handle.done():
            if not self._leader:
                self._lead(handle, math.inf)
            if not handle.done():  # another leads, or the handlers of signals have run
                self._wait(handle, math.inf)

    def _is_over_soon(self, use: SlotUse, session: Session) -> bool:
        """Look a few times more whether it is over."""
        slot, word = use.slot, use.word
        if slot is None:
            return False
        is_wanted, posted = self._lock.is_wanted, slot.posted
        self._is_working = False
        for look in range(SLOT_LOOKS):
            if is_wanted():
                break
            if look == NAP_AFTER and session.is_crowded:
                time.sleep(NAP_S)
            else:
                sched_yield()
            words = posted()
            if min(words) < word:
                slot.late = words
                continue
            self._is_working = True
            if use.look():
                return True
            self._is_working = False
        self._is_working = True
        return False

    def wait(self, handle: Awaited[T], timeout_s: float | None, session: Session) -> bool:
        """Wait until a collective is over; False if it is not after so many seconds. The caller holds ``signals``."""
        self.io.may_block()
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._enter(session)
            if not handle.done() and time.monotonic() < deadline_s:
                self._wait(handle, deadline_s)
            return handle.done()
        except BaseException as error:
            self._interrupted(error, handle, session)
            raise
        finally:
            self.reactor.is_driven = False
            self._leave()

    def heal(self, session: Session) -> None:
        """Clear up what an interrupt of an earlier call of this thread may have left."""
        if not self.io.is_current:
            try:
                self._enter(session)
            finally:
                self.reactor.is_driven = False
                self._leave()

    def stop(self) -> None:
        """Drive no more, and end the I/O thread. May be called again.

        Raises:
            WouldDeadlock: the caller is the I/O thread.
        """
        with contextlib.suppress(SessionClosed):  # another thread stops it too, and was faster
            self.io.wait_for(self._close)
        self.io.stop()

    async def _close(self) -> None:
        while self.is_led:  # what it waits for has ended with the sessions, but it has yet to wake up
            self.reactor.ring()
            await asyncio.sleep(0)
        for _, bell in list(self._followers.values()):
            bell.ring()
        self._io_driver.close()

    # ---------------------------------------------------------------- inside the lock

    def _enter(self, session: Session) -> None:
        if not self._lock.take():
            self._found_taken(session)
        self.reactor.is_driven = self._is_working = True

    def _found_taken(self, session: Session) -> None:
        """Recover the lock of an interrupted call of this thread, or enter from a signal handler during a call."""
        if self._leader == threading.get_ident():
            self._leader = 0
        if self.reactor.is_driven:
            self._give_up(session, KeyboardInterrupt())

    def _leave(self) -> None:
        """Hand over to the next leader, and release the lock."""
        if self._leader and self._leader == threading.get_ident():
            self._leader, self._awaited = 0, None
        if self._followers:
            self._followers.pop(threading.get_ident(), None)
        if not self._lock.is_mine():  # it was interrupted while it waited for it
            return
        self.reactor.is_driven = self._is_working = False
        try:
            self._hand_over()
        except BaseException:  # an interrupt; all of it may be done twice
            self._hand_over()
            raise
        finally:
            self._lock.release()

    def _hand_over(self) -> None:
        if self._followers or self._leader:
            self._tell_others()
            return
        reactor, io_driver = self.reactor, self._io_driver
        if self._is_masked and (self.io.is_busy or reactor.pollers):
            self.mask(is_masked=False)
        is_unheard = self._is_masked
        for poller in reactor.pollers:
            if poller.is_needed:
                io_driver.wake()
                return
            is_unheard = poller.is_awake
        if reactor.deferred or reactor.due_s < io_driver.timer_s:
            io_driver.wake()
        elif is_unheard:
            io_driver.calls += 1
            if not io_driver.has_lull:
                io_driver.lull()

    def _tell_others(self) -> None:
        """Let the leader go on; without one, make a follower the next leader."""
        self.tell_followers()
        if self._leader:
            if self._is_resting and (self.reactor.deferred or self._awaited is None or self._awaited.done()):
                self.reactor.ring()
        else:
            for _, bell in list(self._followers.values())[:1]:  # none may be left: they go without the lock
                bell.ring()

    def _wait(self, handle: Awaited[T], deadline_s: float) -> None:
        while True:
            if not self._leader or self._leader == threading.get_ident():
                if not self.reactor.is_awake:
                    self.reactor.unpark()
                self._lead(handle, deadline_s)
            else:
                self._follow(handle, deadline_s)
            if handle.done() or time.monotonic() >= deadline_s:
                return

    def _lead(self, handle: Awaited[T], deadline_s: float) -> None:
        """Look at what comes until it is over, or it is time; rest when nothing comes."""
        reactor, is_done = self.reactor, handle.done
        look, most_looks = (reactor.glance, reactor.looks) if reactor.pollers else (reactor.progress, SOCKET_LOOKS)
        self._is_resting = False  # an interrupted leader may have left it
        self._leader, self._awaited = threading.get_ident(), handle
        looks = 0
        quiet_since_s = 0.0
        is_here = self.signals.is_here()
        while True:
            if look():
                looks, quiet_since_s = 0, 0.0
            elif looks < most_looks:
                looks += 1
                if not self._lock.is_wanted():
                    self._is_working = False
                    if reactor.pollers:
                        sched_yield()
                    elif _yields_late():
                        looks = most_looks
                    self._is_working = True
                    continue
                self._give_way()
            else:
                looks = 0
                quiet_since_s = self._pause(quiet_since_s, deadline_s)
            if self._followers:
                self.tell_followers()
            if is_done() or quiet_since_s == math.inf:
                return
            if is_here and self.signals.noted:
                self._answer()
                return

    def _answer(self) -> None:
        """Run the handlers of signals, between two looks; they may make calls, after which others may lead."""
        self._leader, self._awaited = 0, None
        self.reactor.is_driven = self._is_working = False
        try:
            self.signals.answer()
        finally:
            self._lock.take()
        self.reactor.is_driven = self._is_working = True

    def _pause(self, quiet_since_s: float, deadline_s: float) -> float:
        """After many looks: look at descriptors and the clock, and rest if it is quiet for long.

        Without pollers it rests now: a rest ends at once if there is something, and what it finds is known then.

        Returns:
            Since when it is quiet; 0 if it is not, infinity if the time is up.
        """
        reactor = self.reactor
        if self._lock.is_wanted():
            self._give_way()
            if self._awaited is None or self._awaited.done():  # who had the lock has ended it, and rings nobody awake
                return 0.0
        if reactor.pollers and reactor.progress():
            return 0.0
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return math.inf
        if reactor.pollers and now_s - (quiet_since_s or now_s) <= QUIET_S:
            return quiet_since_s or now_s
        self._rest(min(deadline_s, now_s + LOOK_EVERY_S, reactor.next_deadline_s) - now_s)
        if not reactor.pollers:
            reactor.progress()
        return 0.0

    def _rest(self, timeout_s: float) -> None:
        """Sleep until there is something to do, without the lock."""
        reactor = self.reactor
        if not reactor.park():
            return
        self.mask(is_masked=True)
        try:
            self._is_resting = True
            self._step_out()
            self.signals.sleep(lambda: reactor.wait(timeout_s), reactor.ring)
        finally:
            self._lock.take()
            self._is_resting = False
        reactor.is_driven = self._is_working = True
        if reactor.pollers and not reactor.is_awake and reactor.is_needed:
            reactor.unpark()

    def _follow(self, handle: Awaited[T], deadline_s: float) -> None:
        """Sleep until the leader has brought the result, or goes."""
        me, bell = threading.get_ident(), Bell()
        try:
            self._followers[me] = handle, bell
            if self._is_resting and self.reactor.deferred:
                self.reactor.ring()
            self._step_out()
            left_s = min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))
            self.signals.sleep(lambda: bell.wait(left_s), bell.ring)
        finally:
            self._followers.pop(me, None)  # first, and without the lock: taking it may be interrupted
            self._lock.take()
        self.reactor.is_driven = self._is_working = True
        if self.signals.is_here() and self.signals.noted and not handle.done():
            self._answer()

    def tell_followers(self) -> None:
        """Wake those whose call is over."""
        for handle, bell in list(self._followers.values()):
            if handle.done():
                bell.ring()

    def _give_way(self) -> None:
        """Let waiting threads have the lock, and take it again after them."""
        self._step_out()
        self._lock.take()
        self.reactor.is_driven = self._is_working = True

    def _step_out(self) -> None:
        self.reactor.is_driven = self._is_working = False
        self._lock.lay_down()

    def mask(self, *, is_masked: bool) -> None:
        """While a caller leads, what comes to the engine's descriptor does not wake the I/O thread as well."""
        if is_masked != self._is_masked:
            for descriptor in self.reactor.descriptors():
                self.io.loop.watch(descriptor, is_wanted=not is_masked)
            self._is_masked = is_masked

    def _wake(self) -> None:
        """Wake a thread that can drive the reactor, in which something is due."""
        if not self._leader:
            self._io_driver.wake()
        elif self._is_resting:
            self.reactor.ring()

    def _undo(self, handle: Awaited[T], session: Session) -> None:
        """Take back the result of a call, which does not reach its caller: see ``Signals.undo``."""
        try:
            self._enter(session)
            self._is_working = False
            self._interrupted(KeyboardInterrupt(), handle, session)
        finally:
            self._leave()

    def _ended(self, error: BaseException, handle: Awaited[T] | None, session: Session, *, is_over: bool) -> None:
        """A call has raised: its own error, if there was one to raise, or what has interrupted it."""
        if not (is_over and isinstance(error, (Exception, asyncio.CancelledError))):
            self._interrupted(error, handle, session)

    def _interrupted(self, error: BaseException, handle: Awaited[T] | None, session: Session) -> None:
        """End the call only, on an interrupt between two polls; within the engine's work its state is unknown."""
        if not self._lock.is_mine():  # it came while this thread waited for the lock: nothing is left undone
            if handle is None:
                return
            self._lock.take()
        if not self._is_working and handle is not None:
            self.reactor.is_driven = self._is_working = True
            try:
                handle.give_up()
            except BaseException:  # a second one
                self._give_up(session, error)
                raise
        elif self._is_working:
            self._give_up(session, error)
            if handle is not None and handle.done():
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    handle.result()  # the caller has the interrupt instead

    def _give_up(self, session: Session, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # what was left undone may stand in the way; then peers hear of the close
            session.give_up(f"the communicator was interrupted at its work by {type(error).__name__}")


def _yields_late() -> bool:
    """Let others run; whether one took the processor for long: then who sleeps is woken sooner than who yields."""
    begun_s = time.monotonic()
    sched_yield()
    return time.monotonic() - begun_s > LATE_S


def _run(function: Callable[[], T], session: Session) -> T:
    result = function()
    if session.engine.links.dirty:  # of an operation without a future, which nobody has scheduled to be moved
        session.engine.links.flush_soon()
    return result
