"""Lag of a rank's event loop, measured ten times a second."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfcomm.engine.engine import Engine

MEASURED_EVERY_S = 0.1


class LoopLag:
    """Lag of one loop; 0 until it was started. Readable on any thread."""

    def __init__(self) -> None:
        self._lag_s = 0.0
        self._seen_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self, engine: Engine) -> None:
        """Measure the loop of this engine from now on, and tell its observers."""
        self._measure(engine, engine.loop.time())

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()

    def blocked_s(self) -> float:
        """For how long the loop has not had a turn, in seconds."""
        return max(0.0, time.monotonic() - self._seen_s - MEASURED_EVERY_S)

    def lag_s(self) -> float:
        """How late the loop is, in seconds: when it was measured last, or by now."""
        return max(self._lag_s, self.blocked_s())

    def _measure(self, engine: Engine, due_s: float) -> None:
        loop = engine.loop
        self._lag_s = max(0.0, loop.time() - due_s)
        self._seen_s = time.monotonic()
        for observer in engine.observers or ():
            observer.counter("loop lag", "ms", self._lag_s * 1e3)
        if engine.meter is not None:
            engine.links.traffic.mark(self._seen_s)
        next_s = loop.time() + MEASURED_EVERY_S
        self._timer = loop.call_at(next_s, self._measure, engine, next_s)
