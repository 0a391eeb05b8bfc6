"""Log lines that others can cause, one a second at the most: a flood of connections must not become one of lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

EVERY_S = 1.0


class Seldom(logging.Filter):
    """Lets a record pass if the one before is a second ago, and says how many were left out; without tracebacks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_s = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        now_s = self._clock()
        if now_s < self._next_s:
            self._left_out += 1
            return False
        self._next_s = now_s + EVERY_S
        more = f" (and {self._left_out} such lines before)" if self._left_out else ""
        cause = f": {record.exc_info[1]!r:.200}" if record.exc_info and record.exc_info[1] is not None else ""
        record.msg, record.args = f"{record.getMessage()}{cause}{more}", ()
        record.exc_info = record.exc_text = None
        self._left_out = 0
        return True
