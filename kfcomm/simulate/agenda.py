"""Virtual time: what will happen, in its order.

Events at the same time happen in the order in which they were put down, and ranks begin in their order: so the same
input always gives the same result, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Agenda:
    """A clock that jumps from one event to the next.

    Attributes:
        now_s: virtual time, from 0.
        num_events: how many have been put down; their order among those at the same time.
        events: a heap of time, order, what to call, and with what. ``ports`` pushes by itself what ``at`` would push: a
            tenth of a simulation's time was the calls.
    """

    __slots__ = ("events", "now_s", "num_events")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time_s: float, do: Callable[[Any], None], what: Any) -> None:
        """Call ``do(what)`` at ``time_s``, which is not over."""
        self.num_events += 1
        heappush(self.events, (time_s, self.num_events, do, what))

    def run(self) -> None:
        """Let time pass until nothing is left to happen."""
        events = self.events
        while events:
            self.now_s, _, do, what = heappop(events)
            do(what)
