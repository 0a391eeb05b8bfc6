"""Trace files, read: found, checked line by line, in order by rank, and with the clock of each on that of rank 0.

Invariants: of a malformed file the line is named; a file that breaks off, since its process was killed or still
runs, is read as far as it goes. What is read is not trusted to be what was written.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kfcomm.errors import ConfigError
from kfcomm.monitor.timeline.translation import ABOUT, CLOCK, END, FORMAT, SUFFIX, About

MAX_LINE_NBYTES = 1 << 20
MAX_NAMED = 16

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """Relation of a rank's clock to rank 0's at one moment: the latter is ``offset_ns`` more."""

    at_ns: int  # the moment, by the rank's clock
    offset_ns: int  # rank 0's clock less the rank's
    uncertainty_ns: int  # by how much that can be wrong


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The trace of one rank."""

    path: Path  # of the file
    about: About  # whose it is
    samples: tuple[Sample, ...]  # of its clock, oldest first
    is_whole: bool  # its end was written; else the process was killed, or still runs
    left_out: int  # notes that were not taken; -1 where the end is missing

    def events(self) -> Iterator[Event]:
        """All events but ours of this file's own, checked.

        Raises:
            ConfigError: a line is malformed.
        """
        for number, event in _events(self.path):
            if event["name"] in (ABOUT, CLOCK, END) and event["ph"] == "M":
                continue
            if event["pid"] != self.about.rank + 1:
                raise _bad(self.path, number, f"an event of process {event['pid']} in the trace of {self.about.title}")
            yield event


def find_files(places: Sequence[str | Path]) -> list[Path]:
    """The trace files in these folders, files and patterns, each once.

    Raises:
        ConfigError: a file does not exist, or a folder has no traces.
    """
    found: dict[Path, None] = {}
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(place.glob(f"kfcomm-*{SUFFIX}"))
            if not inside:
                raise ConfigError(f"{place}: no timelines here (kfcomm-*{SUFFIX})")
        # A name that exists is not a pattern; what does not exist is reported when it is read.
        elif place.exists() or not any(sign in place.name for sign in "*?["):
            inside = [place]
        else:
            inside = sorted(place.parent.glob(place.name))
            if not inside:
                raise ConfigError(f"{place}: no such file")
        found.update(dict.fromkeys(inside))
    return list(found)


def read_files(places: Sequence[str | Path]) -> list[TraceFile]:
    """The traces of one job, by rank.

    Raises:
        ConfigError: a file cannot be read, is not a trace, or a line of it is malformed; the files are of different
            jobs, or two of one rank.
    """
    traces = [_read(path) for path in find_files(places)]
    jobs = {trace.about.job: trace for trace in traces}
    if len(jobs) > 1:
        shown = "; ".join(
            f"{job} ({sum(one.about.job == job for one in traces)} of {trace.about.size} ranks, such as {trace.path})"
            for job, trace in list(jobs.items())[:MAX_NAMED]
        )
        raise ConfigError(f"the files are of {len(jobs)} jobs, name those of one: {shown}")
    traces.sort(key=lambda trace: trace.about.rank)
    for one, other in zip(traces, traces[1:], strict=False):
        if one.about.rank == other.about.rank:
            raise ConfigError(f"{one.path} and {other.path} are both of rank {one.about.rank}")
    return traces


def missing_ranks(traces: Sequence[TraceFile]) -> list[int]:
    """The ranks of the job without a trace."""
    return sorted(set(range(traces[0].about.size)) - {trace.about.rank for trace in traces})


def _read(path: Path) -> TraceFile:
    about: About | None = None
    samples: list[Sample] = []
    left_out = -1
    for number, event in _events(path):
        args = event["args"]
        if about is None:
            about = _about(path, event)
        elif event["ph"] == "M" and event["name"] == CLOCK:
            samples.append(Sample(*_integers(path, number, args, "at_ns", "offset_ns", "uncertainty_ns")))
        elif event["ph"] == "M" and event["name"] == END:
            (left_out,) = _integers(path, number, args, "left_out")
    if about is None:
        raise ConfigError(f"{path}: empty: its process ended before anything was written")
    samples.sort(key=lambda sample: sample.at_ns)
    return TraceFile(path, about, tuple(samples), left_out >= 0, left_out)


def _about(path: Path, event: Event) -> About:
    args = event["args"]
    if event["name"] != ABOUT:
        raise _bad(path, 1, "no timeline of kfcomm")
    if args.get("merged"):
        raise _bad(path, 1, "a merged timeline; give the files of the ranks")
    if args.get("format") != FORMAT:
        raise _bad(path, 1, f"format {args.get('format')!r}, this version reads {FORMAT}")
    kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}
    for field in fields(About):
        value = args.get(field.name)
        if not isinstance(value, kinds[str(field.type)]) or isinstance(value, bool):
            raise _bad(path, 1, f"{field.name}={value!r} must be of type {field.type}")
    about = About(**{field.name: args[field.name] for field in fields(About)})
    if not abs(about.time_s) < 1 << 33:
        raise _bad(path, 1, f"time_s={about.time_s!r} must be a time of the wall clock")
    if not 0 <= about.rank < about.size:
        raise _bad(path, 1, f"rank {about.rank} of a world of {about.size}")
    return about


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    """Number of the line, and event, of every line. The last may be torn, if it is not ended either."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line[1:] if line[:1] in (b"[", b",") else line
                if text.strip() in (b"", b"]"):
                    continue
                try:
                    yield number, _event(text)
                except ValueError as error:
                    # A line that is not ended was being written when the process was killed.
                    if line.endswith(b"\n"):
                        raise _bad(path, number, str(error)) from None
                    return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _event(text: bytes) -> Event:
    """One line as an event of the format, with ``ts`` in nanoseconds.

    Raises:
        ValueError: it is not an event.
    """
    if len(text) > MAX_LINE_NBYTES:
        raise ValueError(f"a line of {len(text)} bytes")
    event = json.loads(text)
    if not isinstance(event, dict):
        raise ValueError("no JSON object")
    ph, name = event.setdefault("ph", None), event.setdefault("name", "")
    pid, args = event.get("pid"), event.setdefault("args", {})
    if not isinstance(ph, str) or not isinstance(name, str) or not isinstance(args, dict):
        raise ValueError("an event needs texts 'ph' and 'name', and an object 'args'")
    if not isinstance(pid, int):
        raise ValueError(f"pid={pid!r} must be a whole number")
    if ph != "M":
        ts = event.get("ts")
        if not isinstance(ts, (int, float)) or isinstance(ts, bool) or not abs(ts) < 1 << 62:
            raise ValueError(f"ts={ts!r} must be a number of microseconds")
        event["ts"] = round(ts * 1000)
    if ph in ("B", "E") and not isinstance(event.get("tid"), int):
        raise ValueError(f"tid={event.get('tid')!r} must be a whole number")
    if ph in ("b", "e") and not isinstance(event.get("id"), str):
        raise ValueError(f"id={event.get('id')!r} must be a text")
    return event


def _integers(path: Path, number: int, args: Mapping[str, Any], *names: str) -> list[int]:
    for name in names:
        if type(args.get(name)) is not int:
            raise _bad(path, number, f"{name}={args.get(name)!r} must be a whole number")
    return [args[name] for name in names]


def _bad(path: Path, number: int, reason: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {reason}")


GOOD_ENOUGH_NS = 50_000
TIMES_THE_BEST = 3
"""Samples that are less certain than both of these are left out."""


@dataclass(frozen=True, slots=True)
class RankClock:
    """One rank's clock."""

    samples: tuple[Sample, ...]  # those that count, oldest first; without any, the clock is rank 0's
    how: str  # where it comes from, in words

    def on_rank_0(self, ns: int) -> int:
        """A time of this rank, by the clock of rank 0."""
        return ns + self.offset_at(ns)

    def offset_at(self, ns: int) -> int:
        """Rank 0's clock less this one, at a time of this one."""
        # between two samples it is taken to change evenly, before the first and after the last not at all
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
    # Processes of one host have one monotonic clock, so they are given one: that of the host's first rank, and rank 0's
    # own on its host, unless what a rank has measured says otherwise: a process in a time namespace of its own has a
    # clock of its own (time_namespaces(7)).
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
    # Each rank has read both of its clocks at one moment: so two wall clocks tell the offset, as far as they agree.
    offset_ns = round((mine.time_s - zero.time_s) * 1e9) + zero.started_ns - mine.started_ns
    return RankClock((Sample(mine.started_ns, offset_ns, 0),), "never compared; by the wall clocks of the two hosts")


def _measured(samples: Sequence[Sample], how: str = "") -> RankClock:
    best_ns = min(sample.uncertainty_ns for sample in samples)
    # samples that are much less certain than the best were taken while a process was busy
    limit_ns = max(GOOD_ENOUGH_NS, TIMES_THE_BEST * best_ns)
    clock = RankClock(tuple(sample for sample in samples if sample.uncertainty_ns <= limit_ns), "")
    offset_s = clock.samples[-1].offset_ns / 1e9
    return replace(
        clock,
        how=f"{how}{offset_s:+.6f} s ± {clock.uncertainty_ns / 1e3:.0f} µs, "
        f"drift {clock.drift * 1e6:+.1f} µs/s, from {len(clock.samples)} of {len(samples)} samples",
    )
