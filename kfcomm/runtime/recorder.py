"""What a process did last: a bounded record, for error messages, dumps and the question what a rank is doing.

Noting costs about 0.2 µs; reading is for diagnosis only, and may happen on any thread.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

MAX_EVENTS = 2000


class Recorder:
    """The last events of a process: ``(seconds since the epoch of the wall clock, event, name, seq, detail)``."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: deque[tuple[float, str, str, int, str]] = deque(maxlen=MAX_EVENTS)

    def note(self, event: str, name: str, seq: int, detail: str = "") -> None:
        """Something happened to use ``seq`` of ``name``."""
        self._events.append((time.time(), event, name, seq, detail))

    def last(self) -> str:
        """The latest event in words."""
        try:
            when, event, name, seq, detail = self._events[-1]
        except IndexError:
            return "has not posted anything yet"
        return f"{event} {name!r} #{seq}{detail and ', '}{detail} {time.time() - when:.1f} s ago"

    def story(self, name: str) -> tuple[str, ...]:
        """The latest events of one name, oldest first."""
        mine = [one for one in list(self._events) if one[2] == name]
        return tuple(f"{when:.6f} {event} #{seq} {detail}".rstrip() for when, event, _, seq, detail in mine[-20:])

    def as_list(self) -> list[dict[str, Any]]:
        """All events kept, oldest first, as JSON-able records."""
        fields = ("time_s", "event", "name", "seq", "detail")
        return [dict(zip(fields, one, strict=True)) for one in list(self._events)]
