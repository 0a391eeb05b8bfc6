"""The I/O thread: one event loop in a thread of its own, and the way onto it from any other thread.

What always holds: what one thread posts is begun in the order in which that thread posted it, whether it waits or not,
and whatever was posted is begun before the thread ends. Whoever waits for a handle is told of the end. This module knows nothing of
communicators.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kfcomm.errors import KfcommError, SessionClosed, WouldDeadlock
from kfcomm.sync.baton import BatonLoop
from kfcomm.sync.standin import StandIn

if TYPE_CHECKING:
    from kfcomm.session import Session

LOOK_EVERY_S = 0.5
"""A signal that comes just before a thread falls asleep does not wake it: no wait is longer than this at a time."""

P = ParamSpec("P")
T = TypeVar("T")


class IoThread:
    """A running event loop. The thread is a daemon: it keeps no process alive.

    Args:
        may_stand_in: the loop is one that callers can stand in for; else it is uvloop's, where that exists.
    """

    def __init__(self, *, may_stand_in: bool = False) -> None:
        self._pid = os.getpid()
        self._loop = BatonLoop() if may_stand_in else _new_loop()
        self._stop = asyncio.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._pending: set[Handle[Any]] = set()
        self._num_posted = self._num_begun = 0
        self._thread = threading.Thread(target=self._run, name="kfcomm-io", daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        # not by its number, which another thread may have once this one has ended
        return threading.current_thread() is self._thread

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child of the one that started the thread, and so has none."""
        return os.getpid() != self._pid

    @property
    def is_stopped(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def may_block(self) -> None:
        """Refuse to wait where nobody would ever end the wait.

        Raises:
            WouldDeadlock: the caller is this thread.
            SessionClosed: the thread belongs to the parent process.
        """
        if self.is_current:
            raise WouldDeadlock(
                "a blocking call on kfcomm's own I/O thread would wait for itself: in a callback of a handle, use the "
                "*_async verbs, or hand the work to another thread"
            )
        if self.is_inherited:
            raise SessionClosed("this communicator belongs to the parent process: a forked child has to init() itself")

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a function on this thread, soon; at once if the caller is this thread. Costs 2 to 5 µs.

        Raises:
            SessionClosed: the thread has ended, or belongs to the parent process.
        """
        if self.is_current:
            function(*args, **kwargs)
            return
        if self.is_inherited:
            self.may_block()
        with self._lock:
            if self._ended:
                raise SessionClosed("the communicator is closed")
            self._num_posted += 1
            self._loop.call_soon_threadsafe(self._run_posted, lambda: function(*args, **kwargs))

    def _run_posted(self, function: Callable[[], object]) -> None:
        try:
            function()
        finally:
            # after the first step of a task that it has made, which is where a coroutine posts
            self._loop.call_soon(self._has_begun)

    def _has_begun(self) -> None:
        self._num_begun += 1

    def begin(self, call: Callable[[], Awaitable[T]]) -> Handle[T]:
        """Start what ``call`` gives, on this thread; errors of ``call`` itself are the handle's, too."""
        handle: Handle[T] = Handle(self)
        self.post(handle.begin, call)
        return handle

    def wait_for(self, call: Callable[[], Awaitable[T]], session: Session | None = None) -> T:
        """Start what ``call`` gives and wait for its result; an interruption of the wait cancels it.

        Where it can, the caller stands in for the thread and does the work of ``session`` itself.
        """
        self.may_block()
        begun: Awaitable[T] | None = None
        handle: Handle[T] | None = None
        try:
            # What was posted before has to begin before: where some of it has not, this call waits behind it.
            nothing_before = self._num_begun == self._num_posted
            if session is not None and isinstance(self._loop, BatonLoop) and nothing_before:
                begun = StandIn(self._loop, session).run(call)
                if isinstance(begun, asyncio.Future) and begun.done():
                    result: T = begun.result()
                    return result
                call = functools.partial(_itself, begun)
            handle = Handle(self)
            self.post(handle.begin, call)
            return handle.result()
        except BaseException:
            # also where the interruption came between the post and the wait
            if handle is not None:
                handle.give_up()
            if isinstance(begun, asyncio.Future) and not begun.done():
                self.post(begun.cancel)
            raise

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on this thread and wait for what it returns."""
        if self.is_current:
            return function(*args, **kwargs)

        async def call() -> T:
            return function(*args, **kwargs)

        return self.begin(call).result()

    def keep(self, handle: Handle[Any]) -> None:
        """Tell this handle, if nothing else does, when the thread ends; on this thread only."""
        self._pending.add(handle)

    def drop(self, handle: Handle[Any]) -> None:
        """This handle is complete; on this thread only."""
        self._pending.discard(handle)

    def stop(self) -> None:
        """End the thread and wait for its end; what is still under way is cancelled. May be called again.

        Raises:
            WouldDeadlock: the caller is this thread.
        """
        if self.is_inherited:
            return
        self.may_block()
        with self._lock:
            if not self._ended:
                self._ended = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        runner = asyncio.Runner(loop_factory=lambda: self._loop)
        if isinstance(self._loop, BatonLoop):
            self._loop.baton.take()
        try:
            runner.run(self._until_stopped())
        finally:
            with self._lock:
                self._ended = True
            # When the interpreter is ending, the loop can start no thread to wait for its executor: then that is
            # waited for elsewhere, and the loop is closed nevertheless.
            with contextlib.suppress(RuntimeError):
                runner.close()
            if isinstance(self._loop, BatonLoop):
                self._loop.baton.lay_down()
            for handle in list(self._pending):
                handle.abandon()

    async def _until_stopped(self) -> None:
        await self._stop.wait()


class Handle(concurrent.futures.Future[T]):
    """A collective under way: wait for it, look at ``done()``, or ``cancel()`` it; on any thread.

    It is a ``concurrent.futures.Future``, so that ``concurrent.futures.wait``, ``as_completed`` and
    ``asyncio.wrap_future`` take it. Callbacks run on the I/O thread, where nothing may block.
    """

    def __init__(self, io: IoThread) -> None:
        super().__init__()
        self._io = io
        self._inner: asyncio.Future[T] | None = None
        self._is_unwanted = False

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; an interruption (Ctrl-C) cancels the collective.

        Args:
            timeout: seconds to wait here; the collective goes on after them. None: as long as the collective's
                own timeout lets it.

        Raises:
            TimeoutError: it is not done yet, and has not failed.
            WouldDeadlock: it is not done, and the caller is the I/O thread.
            concurrent.futures.CancelledError: it was cancelled by ``cancel()`` here.
            CollectiveError: it failed; as from the async verb.
        """
        return self.result(timeout)

    def result(self, timeout: float | None = None) -> T:
        """The same as ``wait``."""
        self._wait_for_the_end(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; the error, or None if there is a result. See ``wait``."""
        self._wait_for_the_end(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """End the collective everywhere; False if it is complete already. Returns once nothing reads its arrays."""
        if self.done():
            return False
        try:
            return self._io.run(self._cancel_here)
        except SessionClosed:
            return False

    def begin(self, call: Callable[[], Awaitable[T]]) -> None:
        """Start it; on the I/O thread, once."""
        self._io.keep(self)
        try:
            inner = asyncio.ensure_future(call())
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the caller, not to this loop
            self._io.drop(self)
            self.set_exception(error)
            return
        self._inner = inner
        if inner.done():
            self._settle(inner)
            return
        inner.add_done_callback(self._settle)
        if self._is_unwanted:
            inner.cancel()

    def give_up(self) -> None:
        """Cancel it, if it is not complete, without a word if that cannot be."""
        if not self.done():
            with contextlib.suppress(KfcommError):
                self.cancel()

    def abandon(self) -> None:
        """The thread has ended and nothing else will tell."""
        if not self.done():
            self.set_exception(SessionClosed("the communicator was closed while this was under way"))

    def _wait_for_the_end(self, timeout: float | None) -> None:
        if self.done():
            return
        self._io.may_block()
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self.done():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"not done within {timeout} s; it goes on")
                with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                    super().exception(min(left_s, LOOK_EVERY_S))
        except TimeoutError:
            raise
        except BaseException:
            self.give_up()
            raise

    def _cancel_here(self) -> bool:
        if self.done():
            return False
        self._is_unwanted = True
        inner = self._inner
        if inner is None:
            return True
        was_cancelled = inner.cancel()
        if inner.cancelled() and inner.remove_done_callback(self._settle):
            # a task ends by and by; a collective has ended now
            self._settle(inner)
        return was_cancelled

    def _settle(self, done: asyncio.Future[T]) -> None:
        self._io.drop(self)
        if not done.cancelled():
            error = done.exception()
            if error is None:
                self.set_result(done.result())
            else:
                self.set_exception(error)
        elif self._is_unwanted:
            super().cancel()
            self.set_running_or_notify_cancel()
        else:
            self.abandon()


def _itself(begun: Awaitable[T]) -> Awaitable[T]:
    return begun


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
