"""What an asynchronous verb returns: a collective that is already under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from kfcomm.runtime.engine import Engine
    from kfcomm.runtime.operation import Operation

T = TypeVar("T")


class Handle(asyncio.Future[T]):
    """A collective under way: ``await`` it, look at ``done()``, or ``cancel()`` it.

    Cancelling ends the collective on every rank where it is not complete yet; there it raises
    ``CollectiveAborted``. Cancelling the task that awaits a handle cancels the handle.

    Attributes:
        seq: which use of its name it is, once it has begun or was refused; before that, -1.
    """

    __slots__ = ("_engine", "_operation", "seq")

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.seq = -1
        self._operation: Operation | None = None
        self._engine: Engine | None = None

    def posted(self, engine: Engine, operation: Operation, seq: int) -> None:
        """The collective has begun: from now on there is something to cancel."""
        self.seq = seq
        self._engine = engine
        self._operation = operation

    def cancel(self, msg: Any | None = None) -> bool:
        """End the collective everywhere; False if it is complete already."""
        if not super().cancel(msg):
            return False
        if self._operation is not None and self._engine is not None:
            self._engine.cancel(self._operation)
        return True
