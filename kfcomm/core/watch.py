"""Deadlines of collectives: which wait too long, given the time. The clock is its caller's.

Each collective is due up to three times: ``STALLED`` once after the stall time, ``ASK`` shortly before its
deadline (so that the error can say who is missing), and ``EXPIRED`` at the deadline.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")
ASK_BEFORE_S = 1.0
"""Seconds before a deadline at which the others are asked; for short timeouts, a quarter of them."""


class Due(Enum):
    """Why a collective is due."""

    STALLED = "stalled"
    ASK = "ask"
    EXPIRED = "expired"


class Watch(Generic[T]):
    """Deadlines of any hashable things. Adding and dropping cost O(1); a look costs the number of things.

    ``next_s`` is when to look again at the latest; looking earlier does no harm.
    """

    __slots__ = ("_entries", "next_s")

    def __init__(self) -> None:
        self._entries: dict[T, list[tuple[float, Due]]] = {}
        self.next_s = float("inf")

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, what: T, now_s: float, timeout_s: float, stall_after_s: float) -> bool:
        """Begin to watch; True if ``next_s`` came nearer."""
        deadline_s = now_s + timeout_s
        stages = [(deadline_s, Due.EXPIRED), (deadline_s - min(ASK_BEFORE_S, timeout_s / 4), Due.ASK)]
        if stall_after_s < timeout_s:
            stages.append((now_s + stall_after_s, Due.STALLED))
            stages.sort(key=lambda stage: -stage[0])
        self._entries[what] = stages
        if stages[-1][0] < self.next_s:
            self.next_s = stages[-1][0]
            return True
        return False

    def drop(self, what: T) -> None:
        """Watch no longer; unknown things are ignored."""
        self._entries.pop(what, None)

    def look(self, now_s: float) -> list[tuple[T, Due]]:
        """What is due by now, each stage once; ``next_s`` is set anew."""
        due = []
        next_s = float("inf")
        for what, stages in self._entries.items():
            while stages and stages[-1][0] <= now_s:
                due.append((what, stages.pop()[1]))
            if stages:
                next_s = min(next_s, stages[-1][0])
        self.next_s = next_s
        return due
