"""Event loop and reactor in virtual time, which advances when every task waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from kfcomm.transports.reactor import Callback, Reactor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BEGIN_S = 1.0
"""First reading of a clock: some code takes 0 for never."""


class Stuck(AssertionError):
    """All ranks wait, or the time is up, and some ranks have not ended."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Descriptors are not watched, and nothing runs beside it.

    Attributes:
        now_s: its clock.
    """

    def __init__(self) -> None:
        self.now_s = BEGIN_S
        super().__init__(_NoDescriptors(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """It is done when this returns."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  it is the caller's
            future.set_exception(error)
        return future


class _NoDescriptors(selectors.SelectSelector):
    """Instead of waiting for a time it makes it now."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing is ready.

        Raises:
            Stuck: nor ever will be.
        """
        if timeout is None:
            raise Stuck("all ranks wait, and some have not ended")
        if timeout > 0:
            self._loop.now_s += timeout
        return []


class VirtualReactor(Reactor):
    """For one thread."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(clock=loop.time)

    def call_soon_threadsafe(self, callback: Callback, *arguments: Any) -> None:
        """Call soon; all threads of a virtual world are this one.

        Raises:
            RuntimeError: the reactor is closed.
        """
        if not self.descriptors():
            raise RuntimeError("this reactor is closed")
        self.call_soon(callback, *arguments)
