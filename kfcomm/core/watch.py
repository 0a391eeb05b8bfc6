"""Deadlines of collectives: which wait too long, given the time. The clock is its caller's.

Each collective is due up to four times: ``QUIET`` when it has waited a little (so that ranks which disagree find
out, see ``Router.announce``), ``STALLED`` once after the stall time, ``ASK`` shortly before its deadline (so that
the error can say who is missing), and ``EXPIRED`` at the deadline.

Of many that have waited a little, few are ``QUIET`` at a time, those that wait longest first: where there is only much
to do, messages about all of it would double that.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")
QUIET_AFTER_S = 0.5
"""Seconds, up to a quarter of one more: those that were posted together are due together."""
QUIET_AT_ONCE = 64
QUIET_AGAIN_S = 0.25
"""Seconds until more than ``QUIET_AT_ONCE`` are ``QUIET``."""
ASK_BEFORE_S = 1.0
"""Seconds before a deadline at which the others are asked; for short timeouts, a quarter of them."""


class Due(Enum):
    """Why a collective is due."""

    QUIET = "quiet"
    STALLED = "stalled"
    ASK = "ask"
    EXPIRED = "expired"


STAGES = tuple(Due)
NEVER = float("inf")

Times = tuple[float, float, float, float, float]
"""The first of the others, and when each stage is due; ``NEVER`` once it has been."""


class Watch(Generic[T]):
    """Deadlines of any hashable things. Adding and dropping cost O(1); a look costs the number of things.

    ``next_s`` is when to look again at the latest; looking earlier does no harm.
    """

    __slots__ = ("_entries", "_last", "_last_times", "next_s")

    def __init__(self) -> None:
        # Times only: a tuple of numbers costs the garbage collector nothing.
        self._entries: dict[T, Times] = {}
        self._last: tuple[float, float, float] = (-1.0, -1.0, -1.0)
        self._last_times: Times = (NEVER,) * 5
        self.next_s = NEVER

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, what: T, now_s: float, timeout_s: float, stall_after_s: float) -> bool:
        """Begin to watch; True if ``next_s`` came nearer."""
        given = (now_s, timeout_s, stall_after_s)
        if given != self._last:  # often they are: many are posted in one turn of the loop, whose clock stands still
            self._last = given
            expired_s = now_s + timeout_s
            stalled_s = now_s + stall_after_s if stall_after_s < timeout_s else NEVER
            ask_s = expired_s - min(ASK_BEFORE_S, timeout_s / 4)
            quiet_s = min((now_s * 4 // 1 + 1) / 4 + QUIET_AFTER_S, ask_s)
            self._last_times = (min(quiet_s, stalled_s), quiet_s, stalled_s, ask_s, expired_s)
        times = self._entries[what] = self._last_times
        if times[0] < self.next_s:
            self.next_s = times[0]
            return True
        return False

    def drop(self, what: T) -> None:
        """Watch no longer; unknown things are ignored."""
        self._entries.pop(what, None)

    def look(self, now_s: float) -> list[tuple[T, Due]]:
        """What is due by now, each stage once, in the order of its times; ``next_s`` is set anew.

        Cost: 0.1 µs for each thing of which nothing is due.
        """
        due: list[tuple[float, int, T, Due]] = []
        next_s = NEVER
        num_quiet, again_s = 0, now_s + QUIET_AGAIN_S
        alike = put_off = (NEVER,) * 5  # those that were posted together share their times
        for what, times in list(self._entries.items()):
            if times[1] <= now_s and again_s < times[3]:
                num_quiet += 1
                if num_quiet > QUIET_AT_ONCE:
                    if times is not alike:
                        alike, put_off = times, _first(again_s, *times[2:])
                    times = self._entries[what] = put_off
            if times[0] <= now_s:
                for time_s, stage in zip(times[1:], STAGES, strict=True):
                    if time_s <= now_s:
                        due.append((time_s, len(due), what, stage))
                times = self._entries[what] = _first(*(time_s if time_s > now_s else NEVER for time_s in times[1:]))
            if times[0] < next_s:
                next_s = times[0]
        self.next_s = next_s
        return [(what, stage) for _, _, what, stage in sorted(due, key=lambda one: one[:2])]


def _first(quiet_s: float, stalled_s: float, ask_s: float, expired_s: float) -> Times:
    return min(quiet_s, stalled_s, ask_s, expired_s), quiet_s, stalled_s, ask_s, expired_s
