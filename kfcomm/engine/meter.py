"""Counters and timings of one rank: calls by key, and the waiting for each peer.

The engine notifies a `Meter` of every arriving chunk and of the end of every collective; links count the bytes (see
``engine.traffic``). Counting is cheap, since it happens on the engine's loop. Any thread may read the numbers: a reader
may see one number updated before another, but never a wrong number.

The time of a collective, from its post to its last chunk, is divided among the peers that send its chunks. Each chunk
adds the time since the chunk before it (or the post) to its sender's ``waited_s``. So a peer that posts late, computes
for long or has a slow link has the largest value. Each collective in flight counts in full, so the sums grow faster
than the clock. Chunks that came before the post add nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from math import ceil, frexp
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from kfcomm.common import do_nothing
from kfcomm.engine.observer import Observer
from kfcomm.engine.traffic import Totals, added
from kfcomm.types import override

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from kfcomm.core.collective import Collective, GroupView, Key
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.operation import Operation
    from kfcomm.engine.traffic import Traffic

K = TypeVar("K")
T = TypeVar("T")

TRIES = 100
"""Attempts to copy what another thread changes; each takes microseconds."""
PATIENCE_S = 1.0
"""Of a reader, while another thread tallies."""
MAX_KEYS = 10_000
"""Keys with a record of their own, 1 KiB each at most; what comes later is counted together."""
REFERENCE_WEIGHT = 0.1
"""Of the latest throughput in the reference that follows it."""
LEFT_GROUPS = b""
"""In place of a group's id: all those that this rank has left."""
MAX_STRATEGIES = 100
"""Strategies of a group with a record; of more, the first is forgotten."""

PER_OCTAVE = 8
"""Buckets of a histogram to each doubling.

Bucket b holds what took from ``2**((b - 1)/8)`` to ``2**(b/8)`` seconds: b is the binary exponent of the eighth power,
which costs a fifth of a search among bounds. A quantile is the geometric middle of its bucket, so it is wrong by at
most a factor of ``2**(1/16)``, 4.4 %.
"""


class Tally:
    """Outcomes and durations of the calls under one key: ``total_s`` and ``max_s`` are from post to completion.

    ``nbytes`` is of the results of complete calls (see ``Operation.nbytes``). ``failures`` include refused and
    cancelled calls. ``buckets`` count calls by duration, see ``PER_OCTAVE``.
    """

    __slots__ = ("buckets", "failures", "max_s", "nbytes", "total_s")

    def __init__(self) -> None:
        self.nbytes = self.failures = 0
        self.total_s = self.max_s = 0.0
        self.buckets: dict[int, int] = {}  # of numbers alone: the garbage collector does not look at it

    @property
    def count(self) -> int:
        """Calls that are complete."""
        return sum(dict(self.buckets).values())

    @classmethod
    def sum(cls, tallies: Iterable[Tally]) -> Tally:
        """Return the sum of tallies."""
        whole = cls()
        for tally in tallies:
            whole.nbytes += tally.nbytes
            whole.failures += tally.failures
            whole.total_s += tally.total_s
            whole.max_s = max(whole.max_s, tally.max_s)
            for bucket, count in dict(tally.buckets).items():
                whole.buckets[bucket] = whole.buckets.get(bucket, 0) + count
        return whole

    def quantile(self, share: float) -> float:
        """Quantile of the durations in seconds, to 4.4 %; 0 without calls."""
        buckets = dict(self.buckets)
        wanted = ceil(share * sum(buckets.values()))
        for bucket in sorted(buckets):
            wanted -= buckets[bucket]
            if wanted <= 0:
                return min(bound_s(bucket - 0.5), self.max_s)
        return self.max_s


def bucket_of(seconds: float) -> int:
    """The bucket of a histogram to which a duration belongs."""
    return frexp(seconds**PER_OCTAVE)[1]


def bound_s(bucket: float) -> float:
    """The upper bound of a bucket, in seconds."""
    return float(2.0 ** (bucket / PER_OCTAVE))


class MeteredThroughput:
    """Throughput of the monitored calls under one strategy; ``nbytes`` and ``seconds`` are sums over complete calls.

    ``last`` and ``reference`` are in bytes per second. The reference begins with the first call and follows each by
    ``REFERENCE_WEIGHT`` of the way, so that a link that slows down stands out for some twenty calls.
    """

    __slots__ = ("count", "last", "nbytes", "reference", "seconds")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.seconds = self.last = self.reference = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """Note a complete call."""
        self.last = nbytes / max(seconds, 1e-9)
        self.reference += (self.last - self.reference) * (REFERENCE_WEIGHT if self.count else 1.0)
        self.count += 1
        self.nbytes += nbytes
        self.seconds += seconds


class StepTally:
    """Training steps whose gradients travel while the program computes; ``nbytes`` is of the gradients.

    ``in_flight_s`` is the time during which any gradient was under way, ``waited_s`` the part of it in which the
    program stood still. ``waited_for`` has the latter by the name of the collective.
    """

    __slots__ = ("count", "in_flight_s", "nbytes", "waited_for", "waited_s")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.in_flight_s = self.waited_s = 0.0
        self.waited_for: dict[str, float] = {}


Tallies: TypeAlias = dict[tuple[bytes, str], Tally]
"""By group id and name."""


class Meter(Observer):
    """The figures of one rank in a world of ``size``; see the module."""

    __slots__ = ("_others", "_tallies", "earlier", "gauges", "now_s", "settle", "steps", "throughputs", "waited_s")

    def __init__(self, size: int) -> None:
        self.waited_s = [0.0] * size  # by world rank, for its chunks
        self.throughputs: dict[bytes, dict[str, MeteredThroughput]] = {}  # by group id, and by name of the strategy
        self.gauges: dict[str, float] = {}  # latest values that the program reports, by name
        # by group id and the name under which gradients are averaged
        self.steps: dict[tuple[bytes, str], StepTally] = {}
        self.now_s = 0.0  # beginning of the burst that is being handed over; 0 between bursts
        self.settle: Callable[..., None] = do_nothing  # see ``Recorder.settle``; set by the recorder
        self.earlier: Earlier | None = None  # counts of former epochs; None in the first
        self._tallies: Tallies = {}
        self._others: dict[bytes, Tally] = {}

    def arrived(self, peer: int, collective: Collective) -> None:
        """Note a chunk of ``peer`` for this collective. The clock is read once a burst."""
        now_s = self.now_s
        if not now_s:
            now_s = self.now_s = monotonic()
        waited_s = now_s - collective.heard_s
        if waited_s > 0.0:
            self.waited_s[peer] += waited_s
            collective.heard_s = now_s

    def completed(self, key: Key, taken_s: float, nbytes: int) -> None:
        """Tally a complete collective. On one thread at a time: see ``Recorder.settle``."""
        tally: Tally | None = key.tally
        if tally is None:
            tally = key.tally = self._tally(key.group_id, key.name)
        tally.nbytes += nbytes
        tally.total_s += taken_s
        bucket = frexp(taken_s**PER_OCTAVE)[1]  # as bucket_of
        tally.buckets[bucket] = tally.buckets.get(bucket, 0) + 1
        if taken_s > tally.max_s:
            tally.max_s = taken_s

    def tallies(self) -> tuple[Tallies, dict[bytes, Tally]]:
        """Return the tallies by key, in the order of first use; and, by group, those beyond ``MAX_KEYS``.

        For any thread; the tallies keep counting.
        """
        self.settle(PATIENCE_S)
        return steady(lambda: (dict(self._tallies), dict(self._others)))

    @override
    def failed(self, operation: Operation, reason: str, *, is_last: bool) -> None:
        self.count_failure(operation.collective.group, operation.collective.name)

    @override
    def refused(self, group: GroupView, name: str, reason: str, *, is_local: bool) -> None:
        self.count_failure(group, name)

    def count_failure(self, group: GroupView, name: str) -> None:
        """Tally a collective that has failed on this rank, or did not begin."""
        self.settle()  # what ended before is tallied before
        self._tally(group.id, name).failures += 1

    def forget(self, group_ids: Collection[bytes]) -> None:
        """Count ended groups together from now on. O(keys).

        Sums over all groups stay the same at every moment for readers on other threads: a dictionary is updated at
        once.
        """
        self.settle(PATIENCE_S)
        _move(self._tallies, {one: (LEFT_GROUPS, one[1]) for one in list(self._tallies) if one[0] in group_ids})
        _move(self._others, {one: LEFT_GROUPS for one in list(self._others) if one in group_ids})
        for group_id in group_ids:
            self.throughputs.pop(group_id, None)
        for one in [one for one in self.steps if one[0] in group_ids]:
            del self.steps[one]

    def throughput(self, group: GroupView, strategy: str) -> MeteredThroughput:
        """Of the monitored calls of a group under a strategy."""
        of_group = self.throughputs.setdefault(group.id, {})
        found = of_group.get(strategy)
        if found is None:
            found = of_group[strategy] = MeteredThroughput()
            if len(of_group) > MAX_STRATEGIES:
                del of_group[next(iter(of_group))]
        return found

    def _tally(self, group_id: bytes, name: str) -> Tally:
        tally = self._tallies.get((group_id, name))
        if tally is None:
            if len(self._tallies) < MAX_KEYS:
                tally = self._tallies.setdefault((group_id, name), Tally())
            else:
                tally = self._others.setdefault(group_id, Tally())
        return tally


def _move(tallies: dict[K, Tally], places: Mapping[K, K]) -> None:
    """Add tallies to those at other places."""
    moved: dict[K, Tally] = {}
    for old, new in places.items():
        known = moved.get(new) or tallies.get(new)
        moved[new] = Tally.sum([tallies[old]] if known is None else [known, tallies[old]])
        moved[old] = Tally()
    tallies.update(moved)
    for old in places:
        del tallies[old]


def steady(copy: Callable[[], T]) -> T:
    """Return what ``copy`` returns; it is tried again while another thread changes what it reads."""
    for _ in range(TRIES):
        try:
            return copy()
        except RuntimeError:  # changed size during iteration
            continue
    return copy()


class Earlier(NamedTuple):
    """Sums over former epochs, so that counters keep growing across a change of the ranks.

    Peers are identified by their ranks, which other processes have in another epoch: these sums cover all of them.
    """

    tallies: dict[str, Tally]  # by name
    others: Tally | None  # of the calls beyond ``meter.MAX_KEYS``
    totals: Totals  # see ``Traffic.totals``
    waited_s: dict[int, float]  # by rank


def with_epoch(meter: Meter, traffic: Traffic) -> Earlier:
    """Add the counts of a finished epoch to those of all before it. O(keys)."""
    before = meter.earlier or Earlier({}, None, {}, {})
    tallies, others = meter.tallies()
    by_name = {name: [tally] for name, tally in before.tallies.items()}
    for (_, name), tally in tallies.items():
        by_name.setdefault(name, []).append(tally)
    rest = [*([] if before.others is None else [before.others]), *others.values()]
    return Earlier(
        {name: found[0] if len(found) == 1 else Tally.sum(found) for name, found in by_name.items()},
        Tally.sum(rest) if rest else None,
        added(before.totals, traffic.totals()),
        before.waited_s | {rank: one + before.waited_s.get(rank, 0.0) for rank, one in enumerate(meter.waited_s)},
    )


MEASURED_EVERY_S = 0.1


class LoopLag:
    """Lag of one loop, measured ten times a second; 0 until it was started. Readable on any thread."""

    def __init__(self) -> None:
        self._lag_s = 0.0
        self._seen_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def start(self, engine: Engine) -> None:
        """Measure the loop of this engine from now on, and tell its observers."""
        self._measure(engine, engine.loop.time())

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def blocked_s(self) -> float:
        """Time since the loop last had a turn, in seconds."""
        return max(0.0, time.monotonic() - self._seen_s - MEASURED_EVERY_S)

    def lag_s(self) -> float:
        """Lag of the loop in seconds: the last measured, or the present one if larger."""
        return max(self._lag_s, self.blocked_s())

    def _measure(self, engine: Engine, due_s: float) -> None:
        loop = engine.loop
        self._lag_s = max(0.0, loop.time() - due_s)
        self._seen_s = time.monotonic()
        for observer in engine.observers or ():
            observer.counter("loop lag", "ms", self._lag_s * 1e3)
        if engine.meter is not None:
            engine.links.traffic.mark(self._seen_s)
        next_s = loop.time() + MEASURED_EVERY_S
        self._timer = loop.call_at(next_s, self._measure, engine, next_s)
