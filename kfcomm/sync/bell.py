"""A bell that wakes one sleeping thread."""

from __future__ import annotations

import contextlib
from threading import Lock


class Bell:
    """Rung once, on any thread or in a signal handler: unlike an event it takes no lock that the sleeper may have."""

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the sleeper, or the next one."""
        with contextlib.suppress(RuntimeError):  # it was rung already
            self._silent.release()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it is rung, and silence it; whether it was."""
        return self._silent.acquire(timeout=timeout_s)
