"""The clocks of all ranks on that of rank 0, from what the ranks have measured.

Between two samples the offset is taken to change evenly, before the first and after the last not at all. Samples that
are much less certain than the best are left out: they were taken while a process was busy.

Processes of one host have one monotonic clock, so they are given one: that of the host's first rank, and rank 0's own
on its host, unless what a rank has measured says otherwise (a process in a time namespace of its own has a clock of its
own: time_namespaces(7)). Without any samples a host's wall clock has to do.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kfcomm.monitor.timeline.files import Sample, TraceFile

GOOD_ENOUGH_NS = 50_000
TIMES_THE_BEST = 3
"""Samples that are less certain than both of these are left out."""


@dataclass(frozen=True, slots=True)
class RankClock:
    """One rank's clock.

    Attributes:
        samples: those that count, oldest first; without any, the clock is rank 0's.
        how: where it comes from, in words.
    """

    samples: tuple[Sample, ...]
    how: str

    def on_rank_0(self, ns: int) -> int:
        """A time of this rank, by the clock of rank 0."""
        return ns + self.offset_at(ns)

    def offset_at(self, ns: int) -> int:
        """Rank 0's clock less this one, at a time of this one."""
        samples = self.samples
        if not samples:
            return 0
        place = bisect(samples, ns, key=lambda sample: sample.at_ns)
        if place in (0, len(samples)):
            return samples[max(0, place - 1)].offset_ns
        before, after = samples[place - 1], samples[place]
        change, time = after.offset_ns - before.offset_ns, after.at_ns - before.at_ns
        return before.offset_ns + change * (ns - before.at_ns) // time

    def agrees_with(self, sample: Sample) -> bool:
        """Whether a sample may well be of this clock, too."""
        return abs(sample.offset_ns - self.offset_at(sample.at_ns)) <= sample.uncertainty_ns + self.uncertainty_ns

    @property
    def uncertainty_ns(self) -> int:
        """By how much a time can be wrong where it was measured; 0 for rank 0's own clock."""
        return max((sample.uncertainty_ns for sample in self.samples), default=0)

    @property
    def drift(self) -> float:
        """By how much rank 0's clock gains on this one: seconds in a second."""
        if len(self.samples) < 2:
            return 0.0
        first, last = self.samples[0], self.samples[-1]
        return (last.offset_ns - first.offset_ns) / max(1, last.at_ns - first.at_ns)


def clocks_of(traces: Sequence[TraceFile]) -> Mapping[int, RankClock]:
    """The clock of every rank with a trace; ``traces`` by rank."""
    by_host: dict[int, RankClock] = {}
    clocks: dict[int, RankClock] = {}
    for trace in traces:
        about = trace.about
        shared = by_host.get(about.host)
        if shared is None:
            shared = by_host[about.host] = clocks[about.rank] = _first_of_its_host(trace, traces)
        elif all(map(shared.agrees_with, trace.samples)):
            clocks[about.rank] = replace(shared, how=f"that of its host: {shared.how}") if shared.samples else SHARED
        else:
            clocks[about.rank] = _measured(trace.samples, "unlike others on its host, ")
    return clocks


ITSELF = RankClock((), "the clock that all times are shown by")
SHARED = RankClock((), "the clock of rank 0, on whose host it is")


def _first_of_its_host(trace: TraceFile, traces: Sequence[TraceFile]) -> RankClock:
    if trace.about.rank == 0:
        return ITSELF
    if trace.samples:
        return _measured(trace.samples)
    zero = traces[0].about
    if zero.rank != 0:
        return RankClock((), "never compared; taken for that of rank 0")
    mine = trace.about
    offset_ns = round((mine.time_s - zero.time_s) * 1e9) + zero.started_ns - mine.started_ns
    return RankClock((Sample(mine.started_ns, offset_ns, 0),), "never compared; by the wall clocks of the two hosts")


def _measured(samples: Sequence[Sample], how: str = "") -> RankClock:
    best_ns = min(sample.uncertainty_ns for sample in samples)
    limit_ns = max(GOOD_ENOUGH_NS, TIMES_THE_BEST * best_ns)
    clock = RankClock(tuple(sample for sample in samples if sample.uncertainty_ns <= limit_ns), "")
    offset_s = clock.samples[-1].offset_ns / 1e9
    return replace(
        clock,
        how=f"{how}{offset_s:+.6f} s ± {clock.uncertainty_ns / 1e3:.0f} µs, "
        f"drift {clock.drift * 1e6:+.1f} µs/s, from {len(clock.samples)} of {len(samples)} samples",
    )
