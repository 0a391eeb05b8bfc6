"""Messages that are copied when they are sent, so that their senders need not wait for the receivers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from kfcomm.collectives.handle import Handle
from kfcomm.core.collective import GroupView
from kfcomm.engine.engine import Engine

logger = logging.getLogger("kfcomm")

EAGER_NBYTES = 1 << 16
"""The largest message that is copied."""
ROOM_NBYTES = 1 << 20
ROOM_MESSAGES = 256
"""Limits of what is under way to one receiver."""


class Eager:
    """Copied messages of one group. Used on the engine's loop."""

    def __init__(self, engine: Engine, view: GroupView) -> None:
        self._engine = engine
        self._view = view
        self._nbytes: Counter[int] = Counter()
        self._count: Counter[int] = Counter()
        self._under_way: dict[Handle[None], tuple[int, str]] = {}
        self._drained: asyncio.Future[None] | None = None

    def has_room(self, to: int, nbytes: int) -> bool:
        """Whether a message to this rank is to be copied."""
        fits = self._nbytes[to] + nbytes <= ROOM_NBYTES and self._count[to] < ROOM_MESSAGES
        return nbytes <= EAGER_NBYTES and fits

    def sent(self, handle: Handle[None], to: int, tag: str, nbytes: int) -> Handle[None]:
        """Add a copy that is under way; return the handle of its sender, done unless it has failed already."""
        if handle.done():
            return handle
        self._nbytes[to] += nbytes
        self._count[to] += 1
        self._under_way[handle] = to, tag
        handle.when_done(self._engine.reactor, lambda done: self._over(done, to, nbytes))
        told: Handle[None] = Handle(loop=self._engine.loop)
        told.seq = handle.seq
        told.set_result(None)
        return told

    def drained(self) -> asyncio.Future[None] | None:
        """Future done when all have been received, or have failed; None if they have."""
        if not self._under_way:
            return None
        if self._drained is None:
            self._drained = self._engine.loop.create_future()
        return self._drained

    def awaited(self) -> str:
        """Text for the rank that a close waits for."""
        to, tag = next(iter(self._under_way.values()), (-1, ""))
        return f"for {self._view.called(to)} to receive a message with {tag}"

    def _over(self, done: Handle[None], to: int, nbytes: int) -> None:
        _, tag = self._under_way.pop(done)
        self._nbytes[to] -= nbytes
        self._count[to] -= 1
        error = None if done.cancelled() else done.exception()
        if error is not None:
            logger.warning("a message with %s to %s was sent and not received: %s", tag, self._view.called(to), error)
        if not self._under_way and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
            self._drained = None
