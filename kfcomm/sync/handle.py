"""Results of the ``*_async`` and ``*_init`` forms of blocking verbs: handles and persistent collectives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from kfcomm.collectives.handle import Handle as Inner
from kfcomm.collectives.handle import Unawaited
from kfcomm.collectives.slot_use import SlotUse
from kfcomm.common.sizes import seconds_of
from kfcomm.errors import CollectiveAborted, KfcommError, SessionClosed
from kfcomm.sync.driver import outermost
from kfcomm.sync.signals import NUMBERS, getsignal
from kfcomm.sync.thread import IoThread, copy_end

if TYPE_CHECKING:
    from kfcomm.collectives.persistent import PersistentCollective as InnerPersistent
    from kfcomm.engine.session import Session
    from kfcomm.sync.driver import Driver
    from kfcomm.sync.turns import Awaited
    from kfcomm.types import Seconds

T = TypeVar("T")

logger = logging.getLogger("kfcomm")


class _Unread:
    """Logs an error, when its handle is gone, that the program has never read."""

    # Not a ``__del__`` of every handle: Python swallows a Ctrl-C that comes in there.
    __slots__ = ("error", "rank")

    def __init__(self, rank: int, error: BaseException | None) -> None:
        self.rank = rank
        self.error = error

    def __del__(self) -> None:
        if (error := self.error) is not None:
            logger.error("rank %d: error was never retrieved: %s: %s", self.rank, type(error).__name__, error)


class _Callback:
    """Calls ``fn(handle)`` on the I/O thread, and lets go of it.

    A future keeps its callbacks, which often know the future: results would live until the next garbage collection.
    """

    __slots__ = ("_fn", "_tell")

    def __init__(self, tell: Callable[..., object], fn: Callable[..., object]) -> None:
        self._tell = tell
        self._fn: Callable[..., object] | None = fn

    def __call__(self, handle: concurrent.futures.Future[Any]) -> None:
        fn, self._fn = self._fn, None
        self._tell(fn, handle)


class Handle(Unawaited, concurrent.futures.Future[T]):
    """A collective under way: wait for it, look at ``done()``, or ``cancel()`` it; on any thread.

    It is a ``concurrent.futures.Future``, so that ``concurrent.futures.wait``, ``as_completed`` and
    ``asyncio.wrap_future`` take it. Callbacks run on the I/O thread, where nothing may block.
    """

    _unread: _Unread | None = None
    verb = ""
    """Verb of the call."""

    def __init__(self, driver: Driver, session: Session) -> None:
        super().__init__()
        self._driver = driver
        self._io: IoThread = driver.io
        self._session = session
        self._inner: asyncio.Future[T] | None = None
        self._is_unwanted = False

    def _remedy(self) -> str:
        return f"write y = handle.wait() first, or call {self.verb or 'the verb'}, which returns the result"

    @property
    def contributors(self) -> tuple[int, ...] | None:
        """Ranks whose contributions the result holds; see ``kfcomm.Handle.contributors``."""
        found: tuple[int, ...] | None = getattr(self._inner, "contributors", None)
        return found

    def wait(self, timeout: Seconds | None = None) -> T:
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
        is_held = False
        try:
            if timeout is not None or not self.done():
                # Nothing is lost of a handle that is done: of hundreds, most are when they are waited for.
                is_held = self._driver.signals.hold()
                self._wait_for_the_end(timeout)
            if self._unread is not None:
                self._unread.error = None
            return super().result(0)
        except KfcommError as error:
            raise self._driver.shown(error)
        finally:
            if is_held:
                self._driver.signals.let_go()

    result = wait
    """The same as ``wait``."""

    @outermost
    def exception(self, timeout: Seconds | None = None) -> BaseException | None:
        """Wait for the end; the error, or None if there is a result. See ``wait``."""
        self._wait_for_the_end(timeout)
        if self._unread is not None:
            self._unread.error = None
        return super().exception(0)

    def set_exception(self, exception: BaseException | None) -> None:
        """Fail the future. An error that the program never reads is logged, unless the communicator was closed."""
        if not self._session.is_closed:
            self._unread = _Unread(self._session.rank, exception)
        super().set_exception(exception)

    @outermost
    def cancel(self) -> bool:
        """End the collective everywhere; False if it is complete already. Returns once nothing reads its arrays."""
        if self.done():
            return False
        try:
            if isinstance(self._inner, Inner):
                return self._driver.run(self._cancel_here, self._session)
            return self._io.run(self._cancel_here)
        except SessionClosed:
            return False

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call ``fn(handle)`` on the I/O thread when it is over."""
        super().add_done_callback(_Callback(self._io.tell, fn))

    def begin(self, verb: Callable[[], Inner[T] | None]) -> bool:
        """Begin a collective that is posted at once, with the lock held; False if ``verb`` has begun nothing."""
        try:
            inner = verb()
        except Exception as error:  # noqa: BLE001  of the arguments: it belongs to whoever waits
            self.set_exception(error)
            return True
        if inner is None:
            return False
        self._inner = inner
        if inner.done():
            self._settle(inner)
        else:
            self._io.pending.add(self)
            inner.when_done(self._driver.reactor, self._settle)
        return True

    def start(self, call: Callable[[], Awaitable[T]]) -> None:
        """Begin something of several steps, on the I/O thread."""
        self._io.start(call, self._started)

    def _started(self, inner: asyncio.Future[T]) -> None:
        self._inner = inner
        self._io.pending.add(self)
        inner.add_done_callback(self._settle)

    def _wait_for_the_end(self, timeout: Seconds | None) -> None:
        timeout_s = seconds_of(timeout)
        if self.done():
            return
        # A collective: this thread drives the engine while it waits. A coroutine runs on the I/O thread alone.
        if isinstance(self._inner, Inner):
            if not self._driver.wait(self._inner, timeout_s, self._session):
                raise TimeoutError(f"not done within {timeout_s} s; the call continues")
            self._settle(self._inner)
            return
        self._io.may_block()
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self._io.await_end(self, self._is_over, deadline_s, self._cancel_here)
        except BaseException as error:
            if error is not self._io.signals.raised:  # Ctrl-C
                with contextlib.suppress(KfcommError):  # the caller has the interrupt instead
                    self.cancel()
            raise
        if not self.done():
            raise TimeoutError(f"not done within {timeout_s} s; the call continues")

    def _is_over(self) -> bool:
        return self._inner is None or self._inner.done()

    def _cancel_here(self) -> bool:
        inner = self._inner
        if self.done() or inner is None:
            return False
        self._is_unwanted = True
        was_cancelled = inner.cancel()
        if inner.cancelled():  # a task ends by and by; a collective has ended now
            self._settle(inner)
        return was_cancelled

    def _settle(self, inner: asyncio.Future[Any]) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread has been faster
            if self.done():
                return
            self._io.pending.discard(self)
            if not isinstance(inner, Inner):
                self._inner = None  # the last reference to a task is not the program's: see ``IoThread.wait_for``
            if inner.cancelled() and (self._is_unwanted or isinstance(inner, Inner)):  # a task's end may be the loop's
                super().cancel()
                self.set_running_or_notify_cancel()
            else:
                copy_end(inner, self)


class PersistentCollective(Generic[T]):
    """A collective, or a message, to be begun again and again with the same arrays: what ``*_init`` methods return.

    ::

        exchange = comm.all_reduce_init(gradient, name="grad", out=gradient)
        for step in range(1000):
            ...                      # fill the gradient
            exchange.start()
            ...                      # compute
            exchange.wait()

    As ``kfcomm.PersistentCollective``, from any thread. After ``start`` the I/O thread drives what is in flight, until
    somebody waits; ``run`` starts and waits in one, without it.
    """

    __slots__ = ("_driver", "_inner", "_session", "_unwanted")

    def __init__(self, driver: Driver, session: Session, inner: InnerPersistent[T]) -> None:
        self._driver = driver
        self._session = session
        self._inner = inner
        inner._new_handle = NoneType  # whoever waits looks at the operation itself
        self._unwanted: Awaited[T] | None = None

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def name(self) -> str | None:
        """Of the collective; None for one that takes the group's next number at each start, and for messages."""
        return self._inner.name

    @outermost
    def start(self) -> Self:
        """Begin the next use, at this place in the program; returns itself, to be waited for.

        Raises:
            ConfigError: the latest start is still in flight, and goes on: the other ranks notice nothing. Or the
                arguments cannot work: it fails on the other ranks, too, as a call of the verb does.
            SessionClosed: the communicator is closed, or belongs to the parent process.
        """
        self._driver.run(self._start_here, self._session)
        return self

    def run(self) -> T:
        """Start the next use, wait for its result and return it, as a blocking verb does.

        Raises:
            ConfigError, SessionClosed: see ``start``.
            WouldDeadlock, concurrent.futures.CancelledError, CollectiveError: see ``wait``.

        Cost: less than ``start`` and ``wait`` one after the other: the I/O thread is not woken in between.
        """
        signals = self._driver.signals
        is_held = [*map(getsignal, NUMBERS)] != signals.harmless and signals.hold()
        try:
            return self._driver.call(self._begin, self._session)
        except (KfcommError, asyncio.CancelledError) as error:
            raise self._shown(error)
        finally:
            if is_held:
                signals.let_go()

    def wait(self, timeout: Seconds | None = None) -> T:
        """Wait for the result of the latest start and return it; an interruption (Ctrl-C) cancels that one.

        Args:
            timeout: seconds to wait here; the collective goes on after them. None: as long as the collective's
                own timeout lets it.

        Raises:
            ConfigError: it was never started.
            TimeoutError: it is not done yet, and has not failed.
            WouldDeadlock: it is not done, and the caller is the I/O thread.
            concurrent.futures.CancelledError: it was cancelled by ``cancel()`` here.
            CollectiveError: it failed; as from the async verb.
        """
        signals = self._driver.signals
        is_held = [*map(getsignal, NUMBERS)] != signals.harmless and signals.hold()
        try:
            latest: Awaited[T] = self._inner._latest
            timeout_s = seconds_of(timeout)
            if not latest.done() and not self._driver.wait(latest, timeout_s, self._session):
                raise TimeoutError(f"not done within {timeout_s} s; the call continues")
            return latest.result()
        except (KfcommError, asyncio.CancelledError) as error:
            raise self._shown(error)
        finally:
            if is_held:
                signals.let_go()

    def result(self, timeout: Seconds | None = None) -> T:
        """The same as ``wait``."""
        return self.wait(timeout)

    def done(self) -> bool:
        """Whether nothing is in flight: the latest start is over, or there was none."""
        return self._inner.done()

    @outermost
    def cancel(self) -> bool:
        """End the latest start on every rank where it is not complete; False if nothing is in flight.

        Returns once nothing reads its arrays.
        """
        return self._driver.run(self._cancel_here, self._session)

    def _start_here(self) -> None:
        latest = self._begin()
        if type(latest) is SlotUse:
            latest.begin()

    def _begin(self) -> Awaited[T]:
        return self._inner.start()._latest

    def _cancel_here(self) -> bool:
        was_cancelled = self._inner.cancel()
        if was_cancelled:
            self._unwanted = self._inner._latest
        return was_cancelled

    def _shown(self, error: BaseException) -> BaseException:
        """Return an error as the caller sees it: a cancellation here is not a failure.

        Cancelled here: by ``cancel``, or by an interruption.
        """
        if error is self._driver.signals.raised:
            return error
        is_unwanted = isinstance(error, CollectiveAborted) and self._inner._latest is self._unwanted
        if is_unwanted or not isinstance(error, KfcommError):
            error = concurrent.futures.CancelledError()
            error.__suppress_context__ = True
            return error
        return self._driver.shown(error)
