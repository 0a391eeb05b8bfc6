"""I/O thread of blocking communicators: an event loop for slow work, which drives the engine when no caller does.

It opens links, answers requests, runs the verbs that take several steps of their own (``group``, ``probe``), and while
the program computes it drives what is in flight. It holds the engine lock while it runs callbacks and lays it down to
wait for events, so that all of its callbacks may use the engine.

Invariants: each posted function is begun before the thread ends, and each waiting caller is notified of the end. This
module knows nothing of communicators.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import select
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, Unpack

from kfcomm.common import do_nothing
from kfcomm.errors import SessionClosed, WouldDeadlock
from kfcomm.sync.signals import Signals
from kfcomm.types import override

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A signal that comes just before a thread falls asleep does not wake it: no wait is longer than this at a time.
LOOK_EVERY_S = 0.5

CLOSED_MEANWHILE = "the communicator was closed while this was under way"


class EngineLock:
    """Two locks; a thread holds the first one, ``queue``, while it waits for the second."""

    __slots__ = ("acquire", "is_mine", "is_wanted", "is_working", "queue", "release")

    def __init__(self) -> None:
        # Its holder, a caller, is inside the engine's work, where an interrupt leaves unknown state behind; false
        # whenever no caller holds it.
        self.is_working = False
        self.queue = threading.Lock()  # held while waiting for the lock
        lock: Any = threading.RLock()  # never taken twice: it knows its owner, without a moment in between
        # Attributes, as each collective calls them: nothing of Python's runs in them.
        self.acquire: Callable[..., bool] = lock.acquire  # with ``queue`` held, or to try once; else see ``take``
        self.release: Callable[[], None] = lock.release
        self.is_wanted: Callable[[], bool] = self.queue.locked  # a thread waits for it
        # this thread holds it
        self.is_mine: Callable[[], bool] = lock._is_owned  # as threading.Condition asks it

    def take(self) -> bool:
        """Wait for it; False if this thread has had it all the time: it was left taken by an interrupt."""
        if self.is_mine():
            return False
        with self.queue:
            self.acquire()
        return True

    def lay_down(self) -> None:
        """Let others have it; nothing if it is not this thread's."""
        if self.is_mine():
            self.release()


class WakeBell:
    """Wakes one sleeping thread. Safe in a signal handler, unlike an event: it takes no lock that a sleeper holds."""

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the sleeper, or the next one."""
        with contextlib.suppress(RuntimeError):  # it was rung already
            self._silent.release()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it is rung, and reset it. Return whether it was rung."""
        return self._silent.acquire(timeout=timeout_s)


class _Selector(selectors.DefaultSelector):
    def __init__(self, lock: EngineLock) -> None:
        super().__init__()
        self._lock = lock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._lock.lay_down()
        try:
            return super().select(timeout)
        finally:
            self._lock.take()


class IoLoop(asyncio.SelectorEventLoop):
    """Runs with the engine lock held. Who holds it instead may complete futures of this loop, on any thread."""

    def __init__(self, lock: EngineLock) -> None:
        self.lock = lock
        chosen = _Selector(lock)
        self._epoll = select.epoll.fromfd(os.dup(chosen.fileno()))
        self._thread = 0
        super().__init__(chosen)

    @override
    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        # the base class checks no thread: from others it would not wake the selector
        if self._thread in (0, threading.get_ident()):
            return super().call_soon(callback, *args, context=context)
        return self.call_soon_threadsafe(callback, *args, context=context)

    @override
    def run_forever(self) -> None:
        self._thread = threading.get_ident()
        super().run_forever()

    def watch(self, descriptor: int, *, is_wanted: bool) -> None:
        """Hear of this descriptor, or do not, for a while. From any thread that holds the lock; costs 0.5 µs."""
        self._epoll.modify(descriptor, select.EPOLLIN if is_wanted else 0)

    @override
    def close(self) -> None:
        super().close()
        self._epoll.close()


class IoThread:
    """Thread of the event loop that drives an engine; a daemon, so that it keeps no process alive."""

    def __init__(self, signals: Signals | None = None) -> None:
        self.lock = EngineLock()
        self.signals = Signals() if signals is None else signals
        self.loop = IoLoop(self.lock)
        # Called when something begins here that may wait for what peers send; set by the driver.
        self.listen: Callable[[], object] = do_nothing
        self._pid = os.getpid()
        self._stop = asyncio.Event()
        self._ended = False
        self._ending = threading.Lock()
        # Futures of callers that are under way, here or in the engine; changed with the engine lock held.
        self.pending: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kfcomm-io", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        # not by its number, which another thread may have once this one has ended
        return threading.current_thread() is self._thread

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that started the thread: threads are not inherited."""
        return os.getpid() != self._pid

    @property
    def is_stopped(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def may_block(self) -> None:
        """Refuse a wait that could never end: on this thread, and in a forked child."""
        if self.is_current:
            raise WouldDeadlock(
                "a blocking call on kfcomm's own I/O thread would wait for itself: in a callback of a handle, use the "
                "*_async verbs, or hand the work to another thread"
            )
        if self.is_inherited:
            raise SessionClosed("this communicator belongs to the parent process: a forked child has to init() itself")

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a function on this thread, soon; ``SessionClosed`` if that has ended, or is the parent process's."""
        if self.is_inherited:
            self.may_block()
        with self._ending:
            if self._ended:
                raise SessionClosed("the communicator is closed")
            self.loop.call_soon_threadsafe(lambda: function(*args, **kwargs))

    def start(self, call: Callable[[], Awaitable[T]], begun: Callable[[asyncio.Future[T]], object]) -> None:
        """Run what ``call`` gives, here; ``begun`` gets its future, which has failed if ``call`` itself has."""
        # Returns once the first step is done: what begins has its place in the order of the program's calls.
        has_begun = threading.Event()

        def begin() -> None:
            future: asyncio.Future[T]
            try:
                future = asyncio.ensure_future(call(), loop=self.loop)
            except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the caller, not to this loop
                future = self.loop.create_future()
                future.set_exception(error)
            self.loop.call_soon(has_begun.set)  # after the first step of a task that was made just now
            begun(future)
            self.listen()

        if self.is_current:
            begin()
            return
        self.lock.lay_down()  # by a signal handler that runs while a call of this thread waits
        self.post(begin)
        while not has_begun.wait(LOOK_EVERY_S):
            if self.is_stopped:
                raise SessionClosed(CLOSED_MEANWHILE)

    def wait_for(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run what ``call`` gives here and wait for its result; an interruption of the wait cancels it."""
        if self.signals.hold():
            return self.signals.holding(lambda: self.wait_for(call))
        self.may_block()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        # Emptied here: on the caller's thread the last reference to a task would run the callbacks of weak ones, those
        # of asyncio's set of all tasks, in which Python swallows Ctrl-C.
        running: list[asyncio.Future[T]] = []

        def begun(future: asyncio.Future[T]) -> None:
            running.append(future)
            self.pending.add(result)
            future.add_done_callback(ended)

        def ended(future: asyncio.Future[T]) -> None:
            running.clear()
            self.pending.discard(result)
            copy_end(future, result)

        def cancel() -> None:
            if running:
                running[0].cancel()

        try:
            self.start(call, begun)
            self.await_end(result, lambda: not running or running[0].done(), math.inf, cancel)
        except BaseException as error:
            if not result.done() and error is not self.signals.raised:
                with contextlib.suppress(SessionClosed):
                    self.post(cancel)
            raise
        outcome = result.result()
        self.signals.is_kept = self.signals.is_here()
        return outcome

    def await_end(
        self, future: concurrent.futures.Future[Any], is_over: Callable[[], bool], deadline_s: float,
        cancel: Callable[[], object],
    ) -> None:  # fmt: skip
        """Wait until a future is over, which follows one of this thread, or it is time; it raises no error of it.

        ``is_over`` says whether the one of this thread is; if a signal handler raises before, ``cancel`` is called.
        Both are called with the lock held.
        """

        def fall_asleep() -> None:
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                left_s = max(0.0, min(LOOK_EVERY_S, deadline_s - time.monotonic()))
                concurrent.futures.Future.exception(future, left_s)  # a handle's own would wait in here

        def wake() -> None:
            with future._condition:  # one that may be taken twice
                future._condition.notify_all()

        while not future.done() and time.monotonic() < deadline_s:
            self.signals.sleep(fall_asleep, wake)
            if self.signals.is_here() and self.signals.noted:
                self._answer(is_over, cancel)

    def _answer(self, is_over: Callable[[], bool], cancel: Callable[[], object]) -> None:
        """Run the handlers of signals, unless it is over by now; it cannot end meanwhile by itself."""
        self.lock.take()
        try:
            if not is_over():
                self.signals.answer()
        except BaseException:
            self.lock.take()  # a call that a handler made may have laid it down
            cancel()
            raise
        finally:
            self.lock.lay_down()

    def tell(self, callback: Callable[[T], object], what: T) -> None:
        """Call a user's callback on this thread, where nothing may block; at once if it has ended."""
        try:
            if not self.is_current:
                self.post(callback, what)
                return
        except SessionClosed:
            pass
        callback(what)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on this thread and wait for what it returns."""
        if self.is_current:
            return function(*args, **kwargs)

        async def call() -> T:
            return function(*args, **kwargs)

        return self.wait_for(call)

    def stop(self) -> None:
        """End the thread and wait for its end; what is still under way is cancelled. May be called again."""
        if self.is_inherited:
            return
        self.may_block()
        with self._ending:
            if not self._ended:
                self._ended = True
                self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self.lock.take()
        try:
            runner.run(self._stop.wait())
        finally:
            with self._ending:
                self._ended = True
            # When the interpreter is ending, the loop can start no thread to wait for its executor: then that is
            # waited for elsewhere, and the loop is closed nevertheless.
            with contextlib.suppress(RuntimeError):
                runner.close()
            self.lock.lay_down()
            for future in list(self.pending):
                if not future.done():
                    future.set_exception(SessionClosed(CLOSED_MEANWHILE))


def copy_end(inner: asyncio.Future[T], outer: concurrent.futures.Future[T]) -> None:
    """``outer`` ends as ``inner`` has: with its result or its error; a cancellation is the end of the communicator."""
    if outer.done():
        return
    if inner.cancelled():
        outer.set_exception(SessionClosed(CLOSED_MEANWHILE))
    elif (error := inner.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result())
