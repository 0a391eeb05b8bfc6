"""What a process did last: a bounded record, for error messages, dumps and the question what a rank is doing.

Noting costs about 0.2 µs, half of that where the time is known; reading is for diagnosis only, and may happen on any
thread. Times are kept by the monotonic clock, and told by the wall clock as it is when they are read.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

MAX_EVENTS = 2000


class Recorder:
    """The last events of a process: ``(seconds of the monotonic clock, event, name, seq, detail)``.

    Attributes:
        append: notes such an event as it is, in half the time of ``note``.
    """

    __slots__ = ("_events", "append")

    def __init__(self) -> None:
        self._events: deque[tuple[float, str, str, int, str]] = deque(maxlen=MAX_EVENTS)
        self.append = self._events.append

    def note(self, event: str, name: str, seq: int, detail: str = "", at_s: float = 0.0) -> None:
        """Something happened to use ``seq`` of ``name``, now, or at a time that the caller has just read."""
        self._events.append((at_s or time.monotonic(), event, name, seq, detail))

    def last(self) -> str:
        """The latest event in words."""
        try:
            when, event, name, seq, detail = self._events[-1]
        except IndexError:
            return "has not posted anything yet"
        return f"{event} {name!r} #{seq}{detail and ', '}{detail} {time.monotonic() - when:.1f} s ago"

    def story(self, name: str) -> tuple[str, ...]:
        """The latest events of one name, oldest first."""
        mine = [one for one in list(self._events) if one[2] == name]
        wall_s = _wall_s()
        return tuple(
            f"{wall_s + when:.6f} {event} #{seq} {detail}".rstrip() for when, event, _, seq, detail in mine[-20:]
        )

    def as_list(self) -> list[dict[str, Any]]:
        """All events kept, oldest first, as JSON-able records."""
        wall = _wall_s()
        fields = ("time_s", "event", "name", "seq", "detail")
        return [dict(zip(fields, (wall + when, *rest), strict=True)) for when, *rest in list(self._events)]


def _wall_s() -> float:
    """What the wall clock is ahead of the monotonic one."""
    return time.time() - time.monotonic()
