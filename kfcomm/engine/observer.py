"""Events of one rank, and the protocol of those who observe them.

Statistics (``meter``), the log of recent events (`Recorder`), the load (`EngineLoad`) and timelines
(``kfcomm.monitor.timeline``) are observers. An observer returns nothing and cannot change what the engine does.

Without an observer ``Engine.observers`` is ``None``, and each event costs one test of that. Statistics and the
recorder are not in it: they get completions in batches (see ``Recorder.settle``), at a third of the cost. All of them
get the rarer events. Links and slots count the bytes that they move (see ``traffic``), since an event per chunk would
cost more than the count.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from kfcomm.core.collective import shown
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView, Key, Series
    from kfcomm.engine.executors import InSlot
    from kfcomm.engine.meter import Meter
    from kfcomm.engine.operation import Operation


class Observer:
    """Base of observers: ignores every event. No method may raise, and none but ``close`` may wait."""

    __slots__ = ()
    sees_chunks: ClassVar = False  # needs the chunks of every collective: none may use a slot meanwhile
    outlives_epoch: ClassVar = False  # passes with the process into the next epoch

    # ---------------------------------------------------------------- collectives

    def posted(self, operation: Operation) -> None:
        """Called when a collective begins, before any chunk of it is sent or folded."""

    def sent(self, peer: int, operation: Operation, nbytes: int) -> None:
        """Called when a chunk is given to the link to ``peer`` (world rank), which sends it when it can."""

    def first_byte(self, peer: int) -> None:
        """Called when a large chunk from ``peer`` begins to arrive; ``last_byte`` follows."""

    def last_byte(self, peer: int, key: Key, seq: int, nbytes: int) -> None:
        """Called when a chunk from ``peer`` is complete, of use ``seq`` of ``key``, which may not be posted yet."""

    def done(self, operation: Operation | InSlot, *, is_last: bool) -> None:
        """Called when a collective is complete; ``is_last``: no other is in flight."""

    def failed(self, operation: Operation, reason: str, *, is_last: bool) -> None:
        """Called when a collective has failed; ``is_last``: no other is in flight."""

    def refused(self, group: GroupView, name: str, reason: str, *, is_local: bool) -> None:
        """Called when a call failed before it had a number; ``is_local``: by a check of its own arguments."""

    # ---------------------------------------------------------------- the world

    def lost(self, rank: int, reason: str) -> None:
        """Called when the process of a rank is gone."""

    def left(self, rank: int) -> None:
        """Called when a rank leaves: the last moment at which it can be asked."""

    def swapped(self, strategy: str, generation: int, size: int, error: BaseException | None) -> None:
        """Called when the strategy of a group of ``size`` ranks was changed, or (``error``) was not."""

    def joined(self, epoch: int, rank: int, size: int) -> None:
        """Called when this process has entered the next epoch."""

    # ---------------------------------------------------------------- what the program says

    def instant(self, name: str, /, **details: Any) -> None:
        """Record a momentary event, such as a decision of a policy. Any thread may call it.

        Args:
            name: a word or two; the same for the same kind of event.
            **details: values that are not changed any more; what JSON does not know is shown in words.
        """

    def counter(self, name: str, unit: str, value: float) -> None:
        """Record the value of a gauge. Any thread may call it."""

    def span(self, name: str, since_ns: int, until_ns: int, /, **details: Any) -> None:
        """Record a span of the program, by the monotonic clock. For any thread; spans of one rank do not overlap."""

    # ---------------------------------------------------------------- its end

    def forked(self) -> None:
        """Stop writing in a forked child: its parent writes."""

    async def close(self) -> None:
        """Write the rest. Bounded."""


MAX_EVENTS = 2000
BATCH = 256
"""Collectives that are settled at a time, unless somebody asks before there are so many."""

Event: TypeAlias = tuple[float, str, str, int, str]
"""Seconds of the monotonic clock, what happened, name, number of the use, detail."""
MAX_NEWS = 200

News: TypeAlias = tuple[float, str, str, str]
"""Seconds of the wall clock, kind of event, what happened, why."""
Ended: TypeAlias = "tuple[Series, int, float, float, int]"
"""A collective that is complete: its series, number of the use, when posted, when complete, bytes: see
``Operation.nbytes``."""


class Recorder(Observer):
    """Bounded log of a rank's latest events, for error messages, dumps and stall reports.

    A collective is recorded once, when it is complete, with the time of its post; those in flight know theirs. Ended
    collectives are settled in batches: then the meter tallies them, too. Any thread may read. Times are kept by the
    monotonic clock, and reported by the wall clock as it is when they are read.

    ``news`` are rare events of the whole job: losses, changes of the ranks or of the strategy, decisions of policies.
    They pass into the next epoch.
    """

    __slots__ = ("_in_flight", "_kept", "_lock", "_meter", "_notes", "ended", "news")

    def __init__(self, in_flight: Callable[[], list[Operation]], meter: Meter | None = None) -> None:
        self.ended: deque[Ended] = deque()
        self._kept: deque[Ended] = deque(maxlen=MAX_EVENTS)
        self._notes: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.news: deque[News] = deque(maxlen=MAX_NEWS)
        self._in_flight = in_flight
        self._meter = meter
        self._lock = Lock()
        if meter is not None:
            meter.settle = self.settle

    def settle(self, patience_s: float = 0.0) -> None:
        """Tally the ended collectives, unless another thread does it for longer than this many seconds."""
        if not self._lock.acquire(timeout=patience_s):  # in a forked child it may be taken for good
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
        """Record another event, now, of use ``seq`` of ``name``."""
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
        self._tell("lost", f"rank {rank}", reason)

    @override
    def left(self, rank: int) -> None:
        self._tell("left", f"rank {rank}")

    @override
    def swapped(self, strategy: str, generation: int, size: int, error: BaseException | None) -> None:
        if error is None:
            self._tell("strategy", strategy)
        else:
            self._tell("strategy refused", strategy, str(error) or type(error).__name__)

    @override
    def joined(self, epoch: int, rank: int, size: int) -> None:
        self._tell("epoch", f"epoch {epoch}: {size} ranks")

    @override
    def instant(self, name: str, /, **details: Any) -> None:
        why = str(details.pop("why", ""))
        self._tell(name, ": ".join(map(str, details.values())), why)

    def _tell(self, kind: str, what: str, why: str = "") -> None:
        self.news.append((time.time(), kind, what, why))

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
        """Return this number of the latest events, oldest first."""
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


class EngineLoad(Observer):
    """Totals of a rank since this was made: the time with collectives under way, and the bytes that they carry.

    It observes the end of every collective, for 0.2 µs each; nothing is counted in between.
    """

    def __init__(self, in_flight: Callable[[], list[Operation]]) -> None:
        self.count = 0
        self.nbytes = 0  # of the arrays that complete collectives were given or gave
        self._in_flight = in_flight
        self._made_s = time.monotonic()
        self._busy_s = 0.0
        self._since_s = math.inf

    def busy_s(self, now_s: float) -> float:
        """Seconds in which at least one collective was under way, until ``now_s`` (of the monotonic clock)."""
        begun = [one.posted_s for one in self._in_flight()]
        since_s = min([self._since_s, *begun]) if begun else math.inf
        return self._busy_s + max(0.0, now_s - max(since_s, self._made_s))

    @override
    def done(self, operation: Operation | InSlot, *, is_last: bool) -> None:
        self.count += 1
        self.nbytes += operation.nbytes
        self._ended(operation, is_last)

    @override
    def failed(self, operation: Operation, reason: str, *, is_last: bool) -> None:
        self._ended(operation, is_last)

    def _ended(self, operation: Operation | InSlot, is_last: bool) -> None:
        # The last one ends a busy time: all that was in flight since its beginning has ended by then, so the earliest
        # post among them is known.
        if operation.posted_s < self._since_s:
            self._since_s = operation.posted_s
        if is_last:
            self._busy_s += time.monotonic() - max(self._since_s, self._made_s)
            self._since_s = math.inf
