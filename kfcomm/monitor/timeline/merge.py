"""The traces of all ranks together: merged into one on the clock of rank 0, or summarised.

A merge goes through one line at a time: memory does not grow with the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kfcomm.common.sizes import ranks_in_words
from kfcomm.core.collective import OWN_NAMES
from kfcomm.errors import ConfigError
from kfcomm.monitor.timeline.files import Event, RankClock, TraceFile, clocks_of, missing_ranks
from kfcomm.monitor.timeline.translation import ABOUT, FIRST, FORMAT, LAST, NEXT

UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge."""

    traces: Sequence[TraceFile]  # the ranks', by rank
    clocks: Mapping[int, RankClock]  # how each was aligned, by rank
    missing: Sequence[int]  # ranks without a trace
    unfinished: Mapping[int, int]  # of each rank, how many collectives have no end, where there are any
    num_events: int  # in the result


def merge(traces: Sequence[TraceFile], output: Path) -> Merged:
    """Write one trace of all; whole or not at all.

    Raises:
        ConfigError: a line is malformed, or the result cannot be written.
    """
    clocks = clocks_of(traces)
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8", errors="replace") as file:
            unfinished, num_events = _write(file, traces, clocks)
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return Merged(traces, clocks, missing_ranks(traces), unfinished, num_events)


def _write(file: TextIO, traces: Sequence[TraceFile], clocks: Mapping[int, RankClock]) -> tuple[dict[int, int], int]:
    about = traces[0].about
    shown = {str(rank): clock.how for rank, clock in clocks.items()}
    args = {"format": FORMAT, "merged": True, "job": about.job, "size": about.size, "clocks": shown}
    _put(file, FIRST, {"ph": "M", "name": ABOUT, "pid": 0, "args": args})
    unfinished: dict[int, int] = {}
    num_events = 0
    for trace in traces:
        begun = Unended()
        for event in aligned(trace, clocks[trace.about.rank]):
            begun.note(event)
            _put(file, NEXT, event)
            num_events += 1
        for event in begun.ends():
            _put(file, NEXT, event)
            num_events += 1
        if begun.num_collectives:
            unfinished[trace.about.rank] = begun.num_collectives
    file.write(LAST)
    return unfinished, num_events


def aligned(trace: TraceFile, clock: RankClock) -> Iterator[Event]:
    """The events of a trace, their times (``ts``, in nanoseconds) by the clock of rank 0."""
    for event in trace.events():
        if "ts" in event:
            event["ts"] = clock.on_rank_0(event["ts"])
        yield event


def calls(events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Begin and end of each collective of a rank; where it is unfinished, an end at the latest time."""
    begun: dict[str, Event] = {}
    last_ns = 0
    for event in events:
        last_ns = max(last_ns, event.get("ts", 0))
        if event["ph"] == "b":
            begun[event["id"]] = event
        elif event["ph"] == "e" and event["id"] in begun:
            yield begun.pop(event["id"]), event
    for event in begun.values():
        yield event, {"ts": last_ns, "args": {"outcome": UNFINISHED}}


class Unended:
    """Events of a trace that have begun and not ended."""

    def __init__(self) -> None:
        self.last_ns = 0  # latest time of all events
        self._collectives: dict[str, Event] = {}
        self._slices: dict[int, Event] = {}

    def note(self, event: Event) -> None:
        """The next event."""
        self.last_ns = max(self.last_ns, event.get("ts", 0))
        match event["ph"]:
            case "b":
                self._collectives[event["id"]] = event
            case "e":
                self._collectives.pop(event["id"], None)
            case "B":
                self._slices[event["tid"]] = event
            case "E":
                self._slices.pop(event["tid"], None)

    @property
    def num_collectives(self) -> int:
        """Collectives without an end."""
        return len(self._collectives)

    def ends(self) -> Iterator[Event]:
        """An end for each, at the latest time, that says what it is."""
        for event in self._collectives.values():
            kept = {name: event[name] for name in ("cat", "name", "id", "pid")}
            yield {"ph": "e", **kept, "ts": self.last_ns, "args": {"outcome": UNFINISHED}}
        for event in self._slices.values():
            kept = {name: event[name] for name in ("name", "pid", "tid")}
            yield {"ph": "E", **kept, "ts": self.last_ns, "args": {"outcome": UNFINISHED}}


def _put(file: TextIO, before: str, event: dict[str, Any]) -> None:
    if "ts" in event:
        event["ts"] = event["ts"] / 1000
    file.write(before + json.dumps(event, ensure_ascii=False, separators=(",", ":")))


MAX_WORDS = 48


@dataclass(slots=True)
class TracedCollective:
    """One collective, as all ranks saw it; times in nanoseconds by the clock of rank 0."""

    what: str  # verb, name and use
    nbytes: int  # of its first rank
    strategy: str
    size: int  # of the group
    posted: dict[int, int] = field(default_factory=dict)  # when, by rank
    ended: dict[int, int] = field(default_factory=dict)  # when, by rank
    failed: list[int] = field(default_factory=list)  # ranks on which it failed

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
    """Wait for one rank, which alone had not posted the collective."""

    count: int = 0  # how often
    total_ns: int = 0  # for how long, together
    most: TracedCollective | None = None  # the longest


@dataclass(frozen=True, slots=True)
class Summary:
    """Findings in the traces."""

    traces: Sequence[TraceFile]  # the ranks'
    collectives: Sequence[TracedCollective]  # all of which every rank's part is known, the slowest first
    num_failed: int  # that failed on some rank
    num_unfinished: int  # that did not end on some rank, or of which some rank's part is missing
    waited_for: Mapping[int, WaitedFor]  # by rank


def summarize(traces: Sequence[TraceFile]) -> Summary:
    """Read all traces of a job. Memory grows with the number of collectives.

    Raises:
        ConfigError: a line is malformed.
    """
    clocks = clocks_of(traces)
    found: dict[tuple[str, str, int], TracedCollective] = {}
    for trace in traces:
        _gather(found, trace.about.rank, aligned(trace, clocks[trace.about.rank]))
    complete = sorted((one for one in found.values() if one.is_complete), key=lambda one: -one.total_ns)
    num_failed = sum(bool(one.failed) for one in found.values())
    waited_for = {trace.about.rank: WaitedFor() for trace in traces}
    certain_ns = {rank: clock.uncertainty_ns for rank, clock in clocks.items()}
    # A collective cannot be over before its last rank has posted it. So of its time, what passes until the last rank
    # posts is time that the others wait for that rank; what follows is the exchange. Where clocks are compared between
    # hosts, times closer than their uncertainty say nothing, and are not counted against any rank.
    for one in complete:
        last = one.last
        if one.alone_ns > certain_ns[last] + max(certain_ns[rank] for rank in one.posted):
            _count(waited_for[last], one)
    return Summary(traces, complete, num_failed, len(found) - len(complete) - num_failed, waited_for)


def _gather(found: dict[tuple[str, str, int], TracedCollective], rank: int, events: Iterable[Event]) -> None:
    for begin, end in calls(events):
        args, name, outcome = begin["args"], begin["name"], end["args"].get("outcome")
        seq, group = args.get("seq", 0), str(args.get("group", ""))
        # Not the id of the event: the ranks agree on group, name and use, and each has ids of its own.
        key = (group, name, seq)
        one = found.get(key)
        if one is None:
            whose = "kfcomm's own " if name.startswith(OWN_NAMES) else ""
            what = f"{whose}{args.get('verb')} {name!r} #{seq}"
            one = found[key] = TracedCollective(
                what, args.get("bytes", 0), args.get("strategy", ""), args.get("ranks", 0)
            )
        one.posted[rank] = begin["ts"]
        if outcome != UNFINISHED:
            one.ended[rank] = end["ts"]
            if outcome != "completed":
                one.failed.append(rank)


def _count(waited: WaitedFor, one: TracedCollective) -> None:
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
        lines.append(f"Missing traces: {ranks_in_words(missing)}.")
    if summary.collectives:
        lines += ["", "The slowest, from the first post to the last end:"]
        lines.append(f"  {'total':>9}  {'waiting for':<21} {'exchange':>9} {'bytes':>14}  what")
        lines += [_row(one) for one in summary.collectives[:count]]
    lines += ["", "Who was waited for, when all others had posted:"]
    by_time = sorted(summary.waited_for.items(), key=lambda item: -item[1].total_ns)
    lines += [_waited(rank, waited) for rank, waited in by_time]
    return "\n".join(lines)


def _row(one: TracedCollective) -> str:
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
