"""The engine lock: whoever holds it may use everything that lives in the engine, and nobody else does meanwhile.

Invariants:

- A thread that waits for the lock gets it before the thread that releases it can take it again.
- The lock always knows its owner. A signal handler (Ctrl-C) can raise between any two instructions, so a thread may
  leave the lock taken. It finds out when it asks for the lock again.
"""

from __future__ import annotations

import threading


class EngineLock:
    """Two locks, the first of which is held while waiting for the second."""

    __slots__ = ("_gate", "_lock")

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.RLock()  # never taken twice: it knows its owner, without a moment in between

    def is_wanted(self) -> bool:
        """Whether somebody waits for it."""
        return self._gate.locked()

    def is_mine(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks it

    def take(self) -> bool:
        """Wait for it; False if this thread has had it all the time: it was left taken by an interrupt."""
        if self.is_mine():
            return False
        with self._gate:
            self._lock.acquire()
        return True

    def lay_down(self) -> None:
        """Let others have it; nothing if it is not this thread's."""
        if self.is_mine():
            self._lock.release()
