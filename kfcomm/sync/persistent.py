"""Persistent collectives for programs without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import NoneType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from kfcomm.collectives.slot_use import SlotUse
from kfcomm.common.sizes import seconds_of
from kfcomm.errors import CollectiveAborted, KfcommError
from kfcomm.sync.driver import outermost
from kfcomm.sync.signals import NUMBERS, getsignal

if TYPE_CHECKING:
    from kfcomm.collectives.persistent import PersistentCollective as Inner
    from kfcomm.engine.session import Session
    from kfcomm.sync.driver import Driver
    from kfcomm.sync.turns import Awaited
    from kfcomm.types import Seconds

T = TypeVar("T")


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

    def __init__(self, driver: Driver, session: Session, inner: Inner[T]) -> None:
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
                raise TimeoutError(f"not done within {timeout_s} s; it goes on")
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
        """An error as the caller sees it: what was cancelled here has not failed, though without a handle it looks so.

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
