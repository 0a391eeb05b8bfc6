"""Summary of the traces of all ranks: slow collectives, and ranks that were waited for.

A collective cannot be over before its last rank has posted it. So of its time, what passes until the last rank posts is
time that the others wait for that rank; what follows is the exchange. Where clocks are compared between hosts, times
closer than their uncertainty say nothing, and are not counted against anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kfcomm.common.sizes import ranks_in_words
from kfcomm.core.collective import OWN_NAMES
from kfcomm.monitor.timeline.clocks import clocks_of
from kfcomm.monitor.timeline.files import Event, TraceFile, missing_ranks
from kfcomm.monitor.timeline.merge import aligned

MAX_WORDS = 48


@dataclass(slots=True)
class Collective:
    """One collective, as all ranks saw it; times in nanoseconds by the clock of rank 0.

    Attributes:
        what: verb, name and use.
        nbytes: of its first rank.
        strategy: its name.
        size: of the group.
        posted: when, by rank.
        ended: when, by rank.
        failed: ranks on which it failed.
    """

    what: str
    nbytes: int
    strategy: str
    size: int
    posted: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks are known to have posted it, and to have ended it well."""
        return len(self.posted) == len(self.ended) == self.size and not self.failed

    @property
    def last(self) -> int:
        """The rank that posted it last."""
        return max(self.posted, key=self.posted.__getitem__)

    @property
    def total_ns(self) -> int:
        """From the first rank's post to the last rank's end."""
        return max(self.ended.values()) - min(self.posted.values())

    @property
    def late_ns(self) -> int:
        """From the first rank's post to the last rank's."""
        return max(self.posted.values()) - min(self.posted.values())

    @property
    def alone_ns(self) -> int:
        """For how long only the last rank was missing."""
        if len(self.posted) < 2:
            return 0
        *_, before, last = sorted(self.posted.values())
        return last - before


@dataclass(slots=True)
class WaitedFor:
    """How one rank was waited for: it alone had not posted what all others had.

    Attributes:
        count: how often.
        total_ns: for how long, together.
        most: the longest.
    """

    count: int = 0
    total_ns: int = 0
    most: Collective | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Findings in the traces.

    Attributes:
        traces: the ranks'.
        collectives: all of which every rank's part is known, the slowest first.
        num_failed: that failed on some rank.
        num_unfinished: that did not end on some rank, or of which some rank's part is missing.
        waited_for: by rank.
    """

    traces: Sequence[TraceFile]
    collectives: Sequence[Collective]
    num_failed: int
    num_unfinished: int
    waited_for: Mapping[int, WaitedFor]


def summarize(traces: Sequence[TraceFile]) -> Summary:
    """Read all traces of a job. Memory grows with the number of collectives.

    Raises:
        ConfigError: a line is malformed.
    """
    clocks = clocks_of(traces)
    found: dict[tuple[str, str, int], Collective] = {}
    for trace in traces:
        _gather(found, trace.about.rank, aligned(trace, clocks[trace.about.rank]))
    complete = sorted((one for one in found.values() if one.is_complete), key=lambda one: -one.total_ns)
    num_failed = sum(bool(one.failed) for one in found.values())
    waited_for = {trace.about.rank: WaitedFor() for trace in traces}
    certain_ns = {rank: clock.uncertainty_ns for rank, clock in clocks.items()}
    for one in complete:
        last = one.last
        if one.alone_ns > certain_ns[last] + max(certain_ns[rank] for rank in one.posted):
            _count(waited_for[last], one)
    return Summary(traces, complete, num_failed, len(found) - len(complete) - num_failed, waited_for)


def _gather(found: dict[tuple[str, str, int], Collective], rank: int, events: Iterable[Event]) -> None:
    open_here: dict[str, Collective] = {}
    for event in events:
        args = event["args"]
        if event["ph"] == "b":
            seq, group = args.get("seq", 0), str(args.get("group", ""))
            key = (group, event["name"], seq)
            one = found.get(key)
            if one is None:
                whose = "kfcomm's own " if event["name"].startswith(OWN_NAMES) else ""
                what = f"{whose}{args.get('verb')} {event['name']!r} #{seq}"
                one = found[key] = Collective(
                    what, args.get("bytes", 0), args.get("strategy", ""), args.get("ranks", 0)
                )
            one.posted[rank] = event["ts"]
            open_here[event["id"]] = one
        elif event["ph"] == "e" and event["id"] in open_here:
            one = open_here.pop(event["id"])
            one.ended[rank] = event["ts"]
            if args.get("outcome") != "completed":
                one.failed.append(rank)


def _count(waited: WaitedFor, one: Collective) -> None:
    waited.count += 1
    waited.total_ns += one.alone_ns
    if waited.most is None or one.alone_ns > waited.most.alone_ns:
        waited.most = one


def as_text(summary: Summary, count: int = 10) -> str:
    """For people: the ``count`` slowest, and every rank."""
    about, missing = summary.traces[0].about, missing_ranks(summary.traces)
    numbers = f"{summary.num_failed} failed, {summary.num_unfinished} unfinished or not known of all ranks"
    lines = [f"A world of {about.size}, job {about.job}: {len(summary.collectives)} collectives complete, {numbers}."]
    if missing:
        lines.append(f"There is no trace of {ranks_in_words(missing)}.")
    if summary.collectives:
        lines += ["", "The slowest, from the first post to the last end:"]
        lines.append(f"  {'total':>9}  {'waiting for':<21} {'exchange':>9} {'bytes':>14}  what")
        lines += [_row(one) for one in summary.collectives[:count]]
    lines += ["", "Who was waited for, when all others had posted:"]
    by_time = sorted(summary.waited_for.items(), key=lambda item: -item[1].total_ns)
    lines += [_waited(rank, waited) for rank, waited in by_time]
    return "\n".join(lines)


def _row(one: Collective) -> str:
    waiting = f"{_ms(one.late_ns)} rank {one.last}"
    strategy = one.strategy and f", {one.strategy}"
    exchange = _ms(one.total_ns - one.late_ns)
    return f"  {_ms(one.total_ns)}  {waiting:<21} {exchange} {one.nbytes:>14,}  {one.what:.{MAX_WORDS}}{strategy}"


def _waited(rank: int, waited: WaitedFor) -> str:
    line = f"  rank {rank:<5} {waited.count:>7} times  {_ms(waited.total_ns)}"
    if waited.most is None:
        return line
    return f"{line}, at most {_ms(waited.most.alone_ns).strip()} in {waited.most.what:.{MAX_WORDS}}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:>6.{1 if ns >= 1e8 else 2 if ns >= 1e6 else 3}f} ms"
