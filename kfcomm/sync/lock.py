"""Engine lock, whose holder may use everything in the engine, and the bell that wakes a waiting caller.

Invariants:

- A thread that waits for the lock gets it before the thread that releases it can take it again.
- The lock always knows its owner. A signal handler (Ctrl-C) can raise between any two instructions, so a thread may
  leave the lock taken. It finds out when it asks for the lock again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any


class EngineLock:
    """Two locks; a thread holds the first one, the gate, while it waits for the second.

    What is called at every collective is an attribute, and nothing of Python's runs in it.

    Attributes:
        gate: held while waiting for the lock.
        acquire: waits for it; to be called with the gate held, by a thread that has not got the lock: see ``take``.
        release: releases it; to be called by its holder.
        is_wanted: whether a thread waits for it.
        is_mine: whether this thread holds it.
        is_working: its holder, a caller, is inside the engine's work, where an interrupt leaves unknown state behind;
            false whenever no caller holds it.
    """

    __slots__ = ("acquire", "gate", "is_mine", "is_wanted", "is_working", "release")

    def __init__(self) -> None:
        self.is_working = False
        self.gate = threading.Lock()
        lock: Any = threading.RLock()  # never taken twice: it knows its owner, without a moment in between
        self.acquire: Callable[[], bool] = lock.acquire
        self.release: Callable[[], None] = lock.release
        self.is_wanted: Callable[[], bool] = self.gate.locked
        self.is_mine: Callable[[], bool] = lock._is_owned  # as threading.Condition asks it

    def take(self) -> bool:
        """Wait for it; False if this thread has had it all the time: it was left taken by an interrupt."""
        if self.is_mine():
            return False
        with self.gate:
            self.acquire()
        return True

    def lay_down(self) -> None:
        """Let others have it; nothing if it is not this thread's."""
        if self.is_mine():
            self.release()


class Bell:
    """Wakes one sleeping thread. Safe in a signal handler, unlike an event: it takes no lock that a sleeper holds."""

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the sleeper, or the next one."""
        with contextlib.suppress(RuntimeError):  # it was rung already
            self._silent.release()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it is rung, and reset it. Return whether it was rung."""
        return self._silent.acquire(timeout=timeout_s)
