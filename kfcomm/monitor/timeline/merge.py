"""The traces of all ranks as one, on the clock of rank 0. One line at a time: memory does not grow with the job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from kfcomm.errors import ConfigError
from kfcomm.monitor.timeline.clocks import RankClock, clocks_of
from kfcomm.monitor.timeline.files import Event, TraceFile, missing_ranks
from kfcomm.monitor.timeline.layout import ABOUT, FIRST, FORMAT, LAST, NEXT

UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge.

    Attributes:
        traces: the ranks', by rank.
        clocks: how each was aligned, by rank.
        missing: ranks without a trace.
        unfinished: of each rank, how many collectives have no end, where there are any.
        num_events: in the result.
    """

    traces: Sequence[TraceFile]
    clocks: Mapping[int, RankClock]
    missing: Sequence[int]
    unfinished: Mapping[int, int]
    num_events: int


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


class Unended:
    """Events of a trace that have begun and not ended.

    Attributes:
        last_ns: the latest time of all.
    """

    def __init__(self) -> None:
        self.last_ns = 0
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
