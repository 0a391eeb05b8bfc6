"""Turns of blocking callers at driving the engine, and of the I/O thread while no caller waits.

One caller leads at a time; others follow: they sleep until their result is there or the leader has gone (Leader/
Followers: Schmidt et al., 2000). A leader spins while peers of the same host may bring news any moment, then rests on
the engine's descriptor without the lock. While no caller waits, the I/O thread drives what is in flight; it gives way
to a caller at once.
"""

from __future__ import annotations

import math
import threading
import time
from os import sched_yield
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kfcomm.collectives.slot_use import Over, SlotUse
from kfcomm.engine.executors import LATE_S
from kfcomm.sync.thread import LOOK_EVERY_S, IoThread, WakeBell
from kfcomm.transports.loop_driver import LINGER_S, LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.engine.session import Session

T_co = TypeVar("T_co", covariant=True)

QUIET_S = 2e-3  # of fruitless looking until a leader rests
# At descriptors, before the kernel is to wake this thread: that takes as long, and the answer is often on its way.
SOCKET_LOOKS = 16
SLOT_LOOKS = 64  # at a slot alone, until it is looked at with all the rest
# Time after a call, with nothing in flight and no caller, until the I/O thread parks. Long, since waking it takes the
# caller's time (1 ms with more ranks than cores); a peer that cannot wait rings when it parks.
LULL_S = 0.1
# The same where no memory is shared: so long what comes stays in the kernel, for the next call of a program that makes
# one after the other. Else the I/O thread would wake up for what peers send for that call, and take the caller's time.
MASKED_S = 20e-3


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
    """Drives the engine on the I/O thread, except while a caller leads."""

    def __init__(self, turns: Turns, io: IoThread) -> None:
        self._turns = turns
        self._io = io
        self.calls = self._calls_then = 0  # calls after which nothing was in flight
        # has_lull: this looks by itself, later, whether to park. is_masked: descriptors do not wake the thread.
        self.has_lull = self.is_masked = False
        super().__init__(turns.reactor, io.loop)

    def mask(self, *, is_masked: bool) -> None:
        """Hear of the engine's descriptors no more, or again."""
        if is_masked != self.is_masked:
            for descriptor in self._reactor.descriptors():
                self._io.loop.watch(descriptor, is_wanted=not is_masked)
            self.is_masked = is_masked

    def take_over(self) -> None:
        """No caller is left: drive what is due now, and the rest if no call follows soon."""
        reactor = self._reactor
        if self.is_masked and (self._io.pending or reactor.pollers):
            self.mask(is_masked=False)
        is_unheard = self.is_masked and not reactor.pollers
        for poller in reactor.pollers:
            if poller.is_needed:
                self.wake()
                return
            is_unheard = is_unheard or poller.is_awake
        if reactor.deferred or reactor.due_s < self.timer_s:
            self.wake()
        elif is_unheard:
            self.calls += 1
            if not self.has_lull and not self._is_closed:
                # in this order: an interrupt in between does it twice, not never
                self._loop.call_soon(self._begin_lull)
                self.has_lull = True

    def _begin_lull(self) -> None:
        self._calls_then = self.calls
        self._loop.call_later(LULL_S if self._reactor.pollers else MASKED_S, self._after_lull)

    def _after_lull(self) -> None:
        if self._is_closed:
            return
        if self._turns.leader:  # whoever leads tells when it ends
            self.has_lull = False
        elif self.calls != self._calls_then:
            self._begin_lull()
        else:
            self.has_lull = False
            self.wake()

    def _turn(self, *, is_told: bool = False) -> None:
        if self._turns.leader:
            # The leader looks, too: else this thread would be woken again and again, by descriptors and for timers.
            self.mask(is_masked=True)
            if self._reactor.next_deadline_s > self._reactor.time():  # one that is due is the leader's
                self._set_timer()
        else:
            self.mask(is_masked=False)
            super()._turn(is_told=is_told)
            self._turns.tell_followers()

    # While no caller waits all programs compute. Where ranks outnumber processors, looking takes the time of another's.

    @override
    def _look(self) -> bool:
        """Between two looks a caller may take over."""
        if self._io.lock.is_wanted():
            return True
        if self._reactor.is_full:
            sched_yield()
            return False
        return super()._look()

    @override
    def _spin_s(self) -> float:
        return LINGER_S if self._reactor.is_full else super()._spin_s()


class Turns:
    """The callers of one engine, or of several that share a reactor, who wait; called with the lock held."""

    def __init__(self, io: IoThread) -> None:
        self.reactor = Reactor()
        self.lock = io.lock
        self.leader = 0  # number of the thread of the caller who drives; 0 if none does
        self.is_resting = False  # the leader has laid down the lock and sleeps
        self.followers: dict[int, tuple[Awaited[Any], WakeBell]] = {}  # by the number of their thread
        self._io = io
        self._signals = io.signals
        self._awaited: Awaited[Any] | None = None  # by the leader
        self.io_driver: IoDriver = io.run(IoDriver, self, io)
        io.listen = self.io_driver.wake
        self.reactor.woken = self._wake

    def see_through(self, handle: Awaited[Any], session: Session) -> None:
        """Lead or follow until it is over."""
        if session.engine.links.dirty:  # first: it is over with that, if the others have been here before
            session.engine.links.flush()
        if not handle.done():
            if not self.leader:
                self._lead(handle, math.inf)
            if not handle.done():  # another leads, or the handlers of signals have run
                self.wait(handle, math.inf)

    def look_at_slot(self, use: SlotUse) -> Awaited[Any]:
        """Look a few times more at a slot alone; return what is over, or an operation that needs all the rest."""
        slot, word, lock = use.slot, use.word, self.lock
        if slot is None:
            return use.enter()
        is_wanted, posted = lock.is_wanted, slot.posted
        lock.is_working = False
        for _ in range(SLOT_LOOKS):
            if is_wanted():
                break
            sched_yield()
            words = posted()
            if min(words) < word:
                slot.late = words
                continue
            lock.is_working = True
            if use.look():
                break
            lock.is_working = False
        lock.is_working = True
        return Over((use.value,)) if use.is_over else use.enter()

    def wait(self, handle: Awaited[Any], deadline_s: float) -> None:
        """Lead or follow until it is over, or it is time."""
        while True:
            if self.leader in (0, threading.get_ident()):
                if not self.reactor.is_awake:
                    self.reactor.unpark()
                self._lead(handle, deadline_s)
            else:
                self._follow(handle, deadline_s)
            if handle.done() or time.monotonic() >= deadline_s:
                return

    def _lead(self, handle: Awaited[Any], deadline_s: float) -> None:
        """Look at what comes until it is over, or it is time; rest when nothing comes."""
        reactor, is_done = self.reactor, handle.done
        look, most_looks = (reactor.glance, reactor.looks) if reactor.pollers else (reactor.progress, SOCKET_LOOKS)
        self.is_resting = False  # an interrupted leader may have left it
        self.leader, self._awaited = threading.get_ident(), handle
        looks = 0
        quiet_since_s = 0.0
        is_here = self._signals.is_here()
        while True:
            if look():
                looks, quiet_since_s = 0, 0.0
            elif looks < most_looks:
                looks += 1
                if not self.lock.is_wanted():
                    self.lock.is_working = False
                    if reactor.pollers:
                        sched_yield()
                    elif _yields_late():
                        looks = most_looks
                    self.lock.is_working = True
                    continue
                self._give_way()
            else:
                looks = 0
                quiet_since_s = self._pause(quiet_since_s, deadline_s)
            if self.followers:
                self.tell_followers()
            if is_done() or quiet_since_s == math.inf:
                return
            if is_here and self._signals.noted:
                self._answer()
                return
            if not looks and self.lock.is_wanted():
                # News without a pause: the I/O thread may be opening the link on which the call waits next.
                self._give_way()
                if is_done():  # who had the lock has ended it
                    return

    def _answer(self) -> None:
        """Run the handlers of signals, between two looks; they may make calls, after which others may lead."""
        self.leader, self._awaited = 0, None
        self.reactor.is_driven = self.lock.is_working = False
        try:
            self._signals.answer()
        finally:
            self.lock.take()
        self.reactor.is_driven = self.lock.is_working = True

    def _pause(self, quiet_since_s: float, deadline_s: float) -> float:
        """After many looks: look at descriptors and the clock, and rest if it is quiet for long.

        Returns since when it is quiet; 0 if it is not, infinity if the time is up.
        """
        reactor = self.reactor
        if self.lock.is_wanted():
            self._give_way()
            if self._awaited is None or self._awaited.done():  # who had the lock has ended it, and rings nobody awake
                return 0.0
        if reactor.pollers and reactor.progress():
            return 0.0
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return math.inf
        quiet_s = LINGER_S if reactor.is_crowded else QUIET_S
        if reactor.pollers and now_s - (quiet_since_s or now_s) <= quiet_s:
            return quiet_since_s or now_s
        # Without pollers it rests at once: a rest ends if there is something, and what it has found is known then.
        self._rest(min(deadline_s, now_s + LOOK_EVERY_S, reactor.next_deadline_s) - now_s)
        if not reactor.pollers:
            reactor.progress()
        return 0.0

    def _rest(self, timeout_s: float) -> None:
        """Sleep until there is something to do, without the lock."""
        reactor = self.reactor
        if not reactor.park():
            return
        # Else each arrival would wake two threads, of which one finds nothing.
        self.io_driver.mask(is_masked=True)
        try:
            # Before the lock is laid down: a thread that gets it must know to ring.
            self.is_resting = True
            self._step_out()
            self._signals.sleep(lambda: reactor.wait(timeout_s), reactor.ring)
        finally:
            self.lock.take()
            self.is_resting = False
        reactor.is_driven = self.lock.is_working = True
        if reactor.pollers and not reactor.is_awake and reactor.is_needed:
            reactor.unpark()

    def _follow(self, handle: Awaited[Any], deadline_s: float) -> None:
        """Sleep until the leader has brought the result, or goes."""
        me, bell = threading.get_ident(), WakeBell()
        try:
            # With the lock held: the leader may end the call as soon as it is laid down, and must find the bell.
            self.followers[me] = handle, bell
            if self.is_resting and self.reactor.deferred:
                self.reactor.ring()
            self._step_out()
            left_s = min(LOOK_EVERY_S, max(0.0, deadline_s - time.monotonic()))
            self._signals.sleep(lambda: bell.wait(left_s), bell.ring)
        finally:
            self.followers.pop(me, None)  # first, and without the lock: taking it may be interrupted
            self.lock.take()
        self.reactor.is_driven = self.lock.is_working = True
        if self._signals.is_here() and self._signals.noted and not handle.done():
            self._answer()

    def leave(self) -> None:
        """Hand over to the next leader, and release the lock."""
        if self.leader and self.leader == threading.get_ident():
            self.leader, self._awaited = 0, None
        if self.followers:
            self.followers.pop(threading.get_ident(), None)
        if not self.lock.is_mine():  # it was interrupted while it waited for it
            return
        self.reactor.is_driven = self.lock.is_working = False
        try:
            self._hand_over()
        except BaseException:  # an interrupt; all of it may be done twice
            self._hand_over()
            raise
        finally:
            self.lock.release()

    def _hand_over(self) -> None:
        if self.followers or self.leader:
            self._tell_others()
        else:
            self.io_driver.take_over()

    def _tell_others(self) -> None:
        """Let the leader continue; without one, make a follower the next leader."""
        self.tell_followers()
        if self.leader:
            if self.is_resting and (self.reactor.deferred or self._awaited is None or self._awaited.done()):
                self.reactor.ring()
        else:
            for _, bell in list(self.followers.values())[:1]:  # none may be left: they go without the lock
                bell.ring()

    def tell_followers(self) -> None:
        """Wake those whose call is over."""
        for handle, bell in list(self.followers.values()):
            if handle.done():
                bell.ring()

    def _give_way(self) -> None:
        """Let waiting threads have the lock, and take it again after them."""
        self._step_out()
        self.lock.take()
        self.reactor.is_driven = self.lock.is_working = True

    def _step_out(self) -> None:
        self.reactor.is_driven = self.lock.is_working = False
        self.lock.lay_down()

    def _wake(self) -> None:
        """Wake a thread that can drive the reactor, in which something is due."""
        if not self.leader:
            self.io_driver.wake()
        elif self.is_resting:
            self.reactor.ring()


def _yields_late() -> bool:
    """Let others run; whether one took the processor for long: then who sleeps is woken sooner than who yields."""
    begun_s = time.monotonic()
    sched_yield()
    return time.monotonic() - begun_s > LATE_S
