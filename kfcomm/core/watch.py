"""Deadlines of collectives: which wait too long, given the time. The clock is its caller's.

Each collective is due up to four times: ``QUIET`` when it has waited a little (so that ranks which disagree find
out, see ``Router.announce``), ``STALLED`` once after the stall time, ``ASK`` shortly before its deadline (so that
the error can say who is missing), and ``EXPIRED`` at the deadline.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")
QUIET_AFTER_S = 0.5
"""Seconds, up to a quarter of one more: those that were posted together are due together."""
ASK_BEFORE_S = 1.0
"""Seconds before a deadline at which the others are asked; for short timeouts, a quarter of them."""


class Due(Enum):
    """Why a collective is due."""

    QUIET = "quiet"
    STALLED = "stalled"
    ASK = "ask"
    EXPIRED = "expired"


STAGES = tuple(Due)


class Watch(Generic[T]):
    """Deadlines of any hashable things. Adding and dropping cost O(1); a look costs the number of things.

    ``next_s`` is when to look again at the latest; looking earlier does no harm.
    """

    __slots__ = ("_entries", "_last", "_last_times", "next_s")

    def __init__(self) -> None:
        # Times only, -1 when they have passed: a tuple of numbers costs the garbage collector nothing.
        self._entries: dict[T, tuple[float, float, float, float]] = {}
        self._last: tuple[float, float, float] = (-1.0, -1.0, -1.0)
        self._last_times = (0.0, 0.0, 0.0, 0.0)
        self.next_s = float("inf")

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, what: T, now_s: float, timeout_s: float, stall_after_s: float) -> bool:
        """Begin to watch; True if ``next_s`` came nearer."""
        given = (now_s, timeout_s, stall_after_s)
        if given == self._last:  # the usual: many are posted in one turn of the loop, whose clock stands still
            self._entries[what] = self._last_times
            return self._note(self._last_times)
        self._last = given
        expired_s = now_s + timeout_s
        stalled_s = now_s + stall_after_s if stall_after_s < timeout_s else -1.0
        ask_s = expired_s - min(ASK_BEFORE_S, timeout_s / 4)
        quiet_s = min((now_s * 4 // 1 + 1) / 4 + QUIET_AFTER_S, ask_s)
        self._entries[what] = self._last_times = (quiet_s, stalled_s, ask_s, expired_s)
        return self._note(self._last_times)

    def _note(self, times: tuple[float, float, float, float]) -> bool:
        quiet_s, stalled_s, _, _ = times
        first_s = stalled_s if 0 <= stalled_s < quiet_s else quiet_s
        if first_s < self.next_s:
            self.next_s = first_s
            return True
        return False

    def drop(self, what: T) -> None:
        """Watch no longer; unknown things are ignored."""
        self._entries.pop(what, None)

    def look(self, now_s: float) -> list[tuple[T, Due]]:
        """What is due by now, each stage once, in the order of its times; ``next_s`` is set anew."""
        due: list[tuple[float, int, T, Due]] = []
        next_s = float("inf")
        for what, times in list(self._entries.items()):
            for time_s, stage in zip(times, STAGES, strict=True):
                if 0 <= time_s <= now_s:
                    due.append((time_s, len(due), what, stage))
                elif time_s >= 0:
                    next_s = min(next_s, time_s)
            if min(times) <= now_s:
                left = tuple(time_s if time_s > now_s else -1.0 for time_s in times)
                self._entries[what] = (left[0], left[1], left[2], left[3])
        self.next_s = next_s
        return [(what, stage) for _, _, what, stage in sorted(due, key=lambda one: one[:2])]
