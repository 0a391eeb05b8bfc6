"""Bounded log of a rank's latest events, for error messages, dumps and stall reports.

A collective is noted once, when it is complete, with the time of its post; of those in flight the post is known from
themselves. What has ended is settled in batches: then the meter tallies it, too. Reading is for diagnosis only, and may
happen on any thread. Times are kept by the monotonic clock, and told by the wall clock as it is when they are read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.core.collective import shown
from kfcomm.engine.observer import Observer
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView, Series
    from kfcomm.engine.meter import Meter
    from kfcomm.engine.operation import Operation

MAX_EVENTS = 2000
BATCH = 256
"""Collectives that are settled at a time, unless somebody asks before there are so many."""

Event: TypeAlias = tuple[float, str, str, int, str]
"""Seconds of the monotonic clock, what happened, name, number of the use, detail."""
Ended: TypeAlias = "tuple[Series, int, float, float, int]"
"""A collective that is complete: its series, number of the use, when posted, when complete, bytes: see
``Operation.nbytes``."""


class Recorder(Observer):
    """The last events of a process.

    Args:
        in_flight: what is posted and not over; on any thread.
        meter: tallies what has ended, if anything does.

    Attributes:
        ended: what is complete and to be settled, once there are ``BATCH`` of them: to tally one of hundreds of names
            when it ends would cost three times as much, for memory that is in no cache.
    """

    __slots__ = ("_in_flight", "_kept", "_lock", "_meter", "_notes", "ended")

    def __init__(self, in_flight: Callable[[], list[Operation]], meter: Meter | None = None) -> None:
        self.ended: deque[Ended] = deque()
        self._kept: deque[Ended] = deque(maxlen=MAX_EVENTS)
        self._notes: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._in_flight = in_flight
        self._meter = meter
        self._lock = Lock()
        if meter is not None:
            meter.settle = self.settle

    def settle(self, patience_s: float = 0.0) -> None:
        """Tally what has ended, unless another thread is at it for longer than this many seconds.

        A forked child may find the lock taken for good.
        """
        if not self._lock.acquire(timeout=patience_s):
            return
        ended, meter = self.ended, self._meter
        try:
            for _ in range(len(ended)):
                one = ended.popleft()
                self._kept.append(one)
                if meter is not None:
                    meter.completed(one[0].key, one[3] - one[2], one[4])
        finally:
            self._lock.release()

    def note(self, event: str, name: str, seq: int, detail: str = "") -> None:
        """Something else happened, now, to use ``seq`` of ``name``."""
        self._notes.append((monotonic(), event, name, seq, detail))

    @override
    def failed(self, operation: Operation, reason: str, *, is_last: bool) -> None:
        self._notes.append(_posted(operation.collective.series, operation.seq, operation.posted_s))
        self.note("failed", operation.collective.name, operation.seq, reason)

    @override
    def refused(self, group: GroupView, name: str, reason: str, *, is_local: bool) -> None:
        if not is_local:  # the caller's own mistake is in the error that it gets
            self.note("rejected", name, -1, reason)

    @override
    def lost(self, rank: int, reason: str) -> None:
        self.note("lost", f"rank {rank}", -1, reason)

    def last(self) -> str:
        """The latest event in words."""
        events = self._events(1)
        if not events:
            return "has not posted anything yet"
        when, event, name, seq, detail = events[-1]
        number = f" #{seq}" if seq >= 0 else ""
        return f"{event} {shown(name)}{number}{detail and ', '}{detail} {monotonic() - when:.1f} s ago"

    def story(self, name: str) -> tuple[str, ...]:
        """The latest events of one name, oldest first."""
        mine = [one for one in self._events() if one[2] == name]
        wall_s = _wall_s()
        return tuple(
            f"{wall_s + when:.6f} {event} #{seq} {detail}".rstrip() for when, event, _, seq, detail in mine[-20:]
        )

    def as_list(self) -> list[dict[str, Any]]:
        """The latest events, oldest first, as JSON-able records."""
        wall = _wall_s()
        fields = ("time_s", "event", "name", "seq", "detail")
        return [dict(zip(fields, (wall + when, *rest), strict=True)) for when, *rest in self._events()]

    def _events(self, limit: int = MAX_EVENTS) -> list[Event]:
        """So many of the latest events, oldest first."""
        events = list(self._notes)
        for series, seq, posted_s, ended_s, _ in [*self._kept, *self.ended][-limit:]:
            events += (_posted(series, seq, posted_s), (ended_s, "completed", series.key.name, seq, ""))
        events += [_posted(one.collective.series, one.seq, one.posted_s) for one in self._in_flight()[-limit:]]
        return sorted(events, key=itemgetter(0))[-limit:]


def _posted(series: Series, seq: int, when_s: float) -> Event:
    return when_s, "posted", series.key.name, seq, series.signature[0] if series.signature else ""


def _wall_s() -> float:
    """Difference of the wall clock to the monotonic one."""
    return time.time() - monotonic()
