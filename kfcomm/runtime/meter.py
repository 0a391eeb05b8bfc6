"""What one rank counts and times while it works: calls by key, and the waiting for each peer.

The engine holds a `Meter` and tells it of every chunk that arrives and of every collective that ends; bytes are
counted by the links (see ``runtime.traffic``). Everything here is made to cost next to nothing where it is told, on
the engine's loop, and to be read on any thread: a reader may find one number a chunk ahead of another, never a wrong
one.

The time of a collective, from its post to the last chunk that it gets, is shared out among the peers from which its
chunks come: each adds what has passed since the chunk before it (or the post) to the peer's ``waited_s``. So a peer
that posts late, computes for long or sits behind a slow link has the most. With several collectives in flight each
counts for itself: the sums grow faster than the clock. Chunks that came before the post add nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from math import ceil, sqrt
from time import monotonic
from typing import TYPE_CHECKING

from kfcomm.core.machine import Effect
from kfcomm.core.router import ANSWER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kfcomm.core.collective import GroupView, Key
    from kfcomm.runtime.operation import Operation

MAX_KEYS = 10_000
"""Keys with a record of their own, 1 KiB each at most; what comes later is counted together."""
REFERENCE_WEIGHT = 0.1
"""Of the latest throughput in the reference that follows it."""
MAX_STRATEGIES = 100
"""Strategies of a group with a record; of more, the first is forgotten."""

_FIRST_S, _LAST_S = 1e-6, 1e3
_PER_OCTAVE = 8
BOUNDS_S = tuple(_FIRST_S * 2 ** (step / _PER_OCTAVE) for step in range(30 * _PER_OCTAVE))
"""Between the buckets of a histogram: from 1 µs to 18 minutes, eight to each doubling.

A quantile is the middle of its bucket (the geometric mean of its bounds), so it is wrong by at most a factor of
2**(1/16), 4.4 %.
"""


class Tally:
    """What became of the calls under one key.

    Attributes:
        nbytes: of the results of those that are complete (see ``Operation.nbytes``).
        total_s: from post to completion, of all of them.
        max_s: of the one that took longest.
        failures: calls that failed, those that were refused or cancelled included.
        buckets: how many took how long: index in ``BOUNDS_S`` of the first bound above, and their number.
    """

    __slots__ = ("buckets", "failures", "max_s", "nbytes", "total_s")

    def __init__(self) -> None:
        self.nbytes = self.failures = 0
        self.total_s = self.max_s = 0.0
        self.buckets: defaultdict[int, int] = defaultdict(int)

    @property
    def count(self) -> int:
        """Calls that are complete."""
        return sum(dict(self.buckets).values())

    @classmethod
    def sum(cls, tallies: Iterable[Tally]) -> Tally:
        """All of them as one."""
        whole = cls()
        for tally in tallies:
            whole.nbytes += tally.nbytes
            whole.failures += tally.failures
            whole.total_s += tally.total_s
            whole.max_s = max(whole.max_s, tally.max_s)
            for bucket, count in dict(tally.buckets).items():
                whole.buckets[bucket] += count
        return whole

    def quantile(self, share: float) -> float:
        """So many of the calls took at most so many seconds, to 4.4 %; 0 if there were none."""
        return quantile(dict(self.buckets), share, self.max_s)


def quantile(buckets: Mapping[int, int], share: float, max_s: float) -> float:
    """The quantile of a histogram; see ``BOUNDS_S`` for its error."""
    wanted = ceil(share * sum(buckets.values()))
    for bucket in sorted(buckets):
        wanted -= buckets[bucket]
        if wanted <= 0:
            return min(_middle_s(bucket), max_s)
    return max_s


def _middle_s(bucket: int) -> float:
    if bucket == 0:
        return BOUNDS_S[0]
    return sqrt(BOUNDS_S[bucket - 1] * BOUNDS_S[bucket]) if bucket < len(BOUNDS_S) else float("inf")


class Throughput:
    """Of the monitored calls under one strategy.

    Attributes:
        count: calls that are complete.
        nbytes: their sum.
        seconds: their sum.
        last: bytes per second of the latest call.
        reference: what to expect, in bytes per second: it begins with the first call and follows each by
            ``REFERENCE_WEIGHT`` of the way, so that a link that slows down stands out for some twenty calls.
    """

    __slots__ = ("count", "last", "nbytes", "reference", "seconds")

    def __init__(self) -> None:
        self.count = self.nbytes = 0
        self.seconds = self.last = self.reference = 0.0

    def note(self, nbytes: int, seconds: float) -> None:
        """A call is complete."""
        self.last = nbytes / max(seconds, 1e-9)
        self.reference += (self.last - self.reference) * (REFERENCE_WEIGHT if self.count else 1.0)
        self.count += 1
        self.nbytes += nbytes
        self.seconds += seconds


class Meter:
    """The figures of one rank in a world of ``size``; see the module.

    Attributes:
        waited_s: by world rank, for its chunks.
        tallies: by group id and name, in the order of first use.
        others: of each group, what is beyond ``MAX_KEYS``.
        throughputs: by group id, of monitored calls by name of the strategy.
        now_s: when the burst began that is being handed over; 0 between bursts.
    """

    __slots__ = ("_by_key", "now_s", "others", "tallies", "throughputs", "waited_s")

    def __init__(self, size: int) -> None:
        self.waited_s = [0.0] * size
        self.tallies: dict[tuple[bytes, str], Tally] = {}
        self.others: dict[bytes, Tally] = {}
        self.throughputs: dict[bytes, dict[str, Throughput]] = {}
        self.now_s = 0.0
        self._by_key: dict[Key, Tally] = {}

    def arrived(self, peer: int, effect: Effect) -> None:
        """A chunk of ``peer`` had this as its first effect. The clock is read once a burst."""
        if effect[0] >= ANSWER:  # it was nobody's
            return
        operation: Operation = effect[1]
        now_s = self.now_s
        if not now_s:
            now_s = self.now_s = monotonic()
        waited_s = now_s - operation.heard_s
        if waited_s > 0.0:
            self.waited_s[peer] += waited_s
            operation.heard_s = now_s

    def completed(self, operation: Operation) -> None:
        """A collective is complete."""
        taken_s = monotonic() - operation.posted_s
        key = operation.key
        tally = self._by_key.get(key)
        if tally is None:
            tally = self._tally_of(key)
        tally.nbytes += operation.nbytes
        tally.total_s += taken_s
        tally.buckets[bisect_right(BOUNDS_S, taken_s)] += 1
        if taken_s > tally.max_s:
            tally.max_s = taken_s

    def failed(self, group: GroupView, name: str) -> None:
        """A collective has failed on this rank, or did not begin."""
        self._tally(group.id, name).failures += 1

    def throughput(self, group: GroupView, strategy: str) -> Throughput:
        """Of the monitored calls of a group under a strategy."""
        of_group = self.throughputs.setdefault(group.id, {})
        found = of_group.get(strategy)
        if found is None:
            found = of_group[strategy] = Throughput()
            if len(of_group) > MAX_STRATEGIES:
                del of_group[next(iter(of_group))]
        return found

    def _tally_of(self, key: Key) -> Tally:
        tally = self._tally(key.group_id, key.name)
        if (key.group_id, key.name) in self.tallies:
            self._by_key[key] = tally
        return tally

    def _tally(self, group_id: bytes, name: str) -> Tally:
        tally = self.tallies.get((group_id, name))
        if tally is None:
            if len(self.tallies) < MAX_KEYS:
                tally = self.tallies[group_id, name] = Tally()
            else:
                tally = self.others.get(group_id)
                if tally is None:
                    tally = self.others[group_id] = Tally()
        return tally
