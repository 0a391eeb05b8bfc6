"""What an asynchronous verb returns: a collective that is already under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfcomm.runtime.operation import Operation

T = TypeVar("T")


class Handle(asyncio.Future[T]):
    """A collective under way: ``await`` it, look at ``done()``, or ``cancel()`` it.

    Cancelling ends the collective on every rank where it is not complete yet; there it raises
    ``CollectiveAborted``. Cancelling the task that awaits a handle cancels the handle.

    Attributes:
        operation: what is under way, for as long as there is something to cancel.
    """

    # Neither is set from the start: an ``__init__`` of its own would double the time it takes to make a future.
    __slots__ = ("_seq", "operation")

    operation: Operation | None

    @property
    def seq(self) -> int:
        """Which use of its name it is, once it has begun or was refused; before that, -1."""
        return getattr(self, "_seq", -1)

    @seq.setter
    def seq(self, seq: int) -> None:
        self._seq = seq

    def cancel(self, msg: Any | None = None) -> bool:
        """End the collective everywhere; False if it is complete already."""
        if not super().cancel(msg):
            return False
        operation = getattr(self, "operation", None)
        if operation is not None:
            operation.engine.cancel(operation)
        return True


def join(handles: Sequence[Handle[Any]], whole: Handle[T], result: Callable[[], T]) -> None:
    """``whole`` is done when all of them are, with ``result()``.

    If one fails, or ``whole`` is cancelled, the others are given up; the first error is raised once all have ended.
    """
    left = len(handles)
    errors: list[BaseException] = []

    def one_done(done: asyncio.Future[Any]) -> None:
        nonlocal left
        left -= 1
        error = None if done.cancelled() else done.exception()
        if error is not None:
            errors.append(error)
            give_up()
        if not left and not whole.done():
            finish()

    def finish() -> None:
        if errors:
            whole.set_exception(errors[0])
        elif any(handle.cancelled() for handle in handles):
            whole.cancel()
        else:
            whole.set_result(result())

    def give_up() -> None:
        for handle in handles:
            handle.cancel()

    whole.add_done_callback(lambda done: give_up() if done.cancelled() else None)
    for handle in handles:
        handle.add_done_callback(one_done)


def looked_at(done: asyncio.Future[Any]) -> None:
    """No complaint by asyncio that nobody looked at the error."""
    if not done.cancelled():
        done.exception()
