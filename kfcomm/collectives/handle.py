"""Handle of a collective under way, as asynchronous verbs return it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from kfcomm.collectives.unawaited import Unawaited
from kfcomm.errors import ConfigError, EpochChanged, PeerLost
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from kfcomm.collectives.receives import Receive
    from kfcomm.collectives.slot_use import SlotUse
    from kfcomm.engine.operation import Operation
    from kfcomm.transports.reactor import Reactor

T = TypeVar("T")


class Handle(Unawaited, asyncio.Future[T]):
    """A collective under way: ``await`` it, look at ``done()``, or ``cancel()`` it.

    Cancelling ends the collective on every rank where it is not complete yet; there it raises
    ``CollectiveAborted``. A receive ends on this rank alone, and leaves its message to the next one. Cancelling the
    task that awaits a handle cancels the handle.

    Attributes:
        operation: what is under way, for as long as there is something to cancel.
    """

    # Neither is set from the start: an ``__init__`` of its own would double the time it takes to make a future.
    __slots__ = ("_seq", "operation")

    operation: Operation | SlotUse | Receive | None
    _listeners: list[Callable[[Any], object]] | None = None

    contributors: tuple[int, ...] | None = None
    """Uids of the ranks whose contributions are in the result; known where calls outlive a rank (``Elastic``)."""

    @property
    def seq(self) -> int:
        """Sequence number of this use of its name; -1 until it has begun or was refused."""
        return getattr(self, "_seq", -1)

    @seq.setter
    def seq(self, seq: int) -> None:
        self._seq = seq

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            operation = getattr(self, "operation", None)
            if operation is not None:
                operation.look_at_once()
        return super().__await__()

    def cancel(self, msg: Any | None = None) -> bool:
        """End the collective everywhere, a receive here alone; False if it is complete already."""
        if not super().cancel(msg):
            return False
        operation = getattr(self, "operation", None)
        if operation is not None:
            operation.cancel()
        self._tell_listeners()
        return True

    def give_up(self) -> None:
        """Cancel it after an interrupt of its caller; a message that it already holds goes to the next receive."""
        self.cancel()

    @override
    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        if self._listeners:
            self._tell_listeners()

    @override
    def set_exception(self, error: type[BaseException] | BaseException, /) -> None:
        super().set_exception(error)
        if self._listeners:
            self._tell_listeners()

    def wait(self, timeout: Any = None) -> NoReturn:
        """Nothing can wait on an event loop without stopping it.

        Raises:
            ConfigError: always; it says what to write instead.
        """
        raise ConfigError(
            "an asynchronous handle is awaited: write await handle, or await asyncio.wait_for(handle, seconds); "
            "what the *_async verbs of kfcomm.sync return has a wait()"
        )

    def when_done(self, reactor: Reactor, callback: Callable[[Handle[T]], object]) -> None:
        """Call back from the reactor when it is over, in the thread that drives the engine, with or without a loop."""
        if self.done():
            reactor.call_soon(callback, self)
            return
        if self._listeners is None:
            self._listeners = []
        self._listeners.append(lambda done: reactor.call_soon(callback, done))

    def _tell_listeners(self) -> None:
        listeners, self._listeners = self._listeners, None
        for listener in listeners or ():
            listener(self)


def named(handle: Handle[T], operation: Operation | SlotUse) -> Handle[T]:
    """The handle of an operation that was posted under it."""
    handle._seq = operation.seq
    if not operation.is_over:
        handle.operation = operation
    return handle


def join(reactor: Reactor, handles: Sequence[Handle[Any]], whole: Handle[T], result: Callable[[], T]) -> None:
    """``whole`` is done when all of them are, with ``result()``.

    If one fails, or ``whole`` is cancelled, the others are given up; the first error is raised once all have ended.
    The loss of a rank, or the end of an epoch, ends all of them by itself, on every rank.
    """
    left = len(handles)
    errors: list[BaseException] = []

    def one_done(done: Handle[Any]) -> None:
        nonlocal left
        left -= 1
        error = None if done.cancelled() else done.exception()
        if error is not None:
            errors.append(error)
            if not isinstance(error, (PeerLost, EpochChanged)):
                give_up()
        if left or whole.done():
            return
        if errors:
            whole.set_exception(errors[0])
        elif any(handle.cancelled() for handle in handles):
            whole.cancel()
        else:
            whole.set_result(result())

    def give_up() -> None:
        for handle in handles:
            handle.cancel()

    whole.when_done(reactor, lambda done: give_up() if done.cancelled() else None)
    for handle in handles:
        handle.when_done(reactor, one_done)


def looked_at(done: asyncio.Future[Any]) -> None:
    """Retrieve the error, so that asyncio does not report it as never retrieved."""
    if not done.cancelled():
        done.exception()
