"""Rate-limited logging, for records that remote processes can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kfcomm.types import override

EVERY_S = 1.0


class RateLimitFilter(logging.Filter):
    """At most one log record per second, with the number left out since, and without a traceback."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_s = 0.0
        self._left_out = 0

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s < self._next_s:
            self._left_out += 1
            return False
        self._next_s = now_s + EVERY_S
        more = f" (and {self._left_out} such lines before)" if self._left_out else ""
        cause = f": {record.exc_info[1]!r:.200}" if record.exc_info and record.exc_info[1] is not None else ""
        record.msg, record.args = f"{record.getMessage()}{cause}{more}", ()
        # A traceback would multiply what a remote process can write into the log.
        record.exc_info = record.exc_text = None
        self._left_out = 0
        return True
