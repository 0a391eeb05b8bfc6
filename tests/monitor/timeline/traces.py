"""Support for tests of the timeline: worlds that record, and handmade files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kfcomm import Communicator
from kfcomm.monitor.timeline import Timeline
from kfcomm.monitor.timeline.translation import ABOUT, CLOCK, END, FORMAT

Event = dict[str, Any]
Clock = Callable[[], int]


def record(comms: Iterable[Communicator], folder: Path, clocks: dict[int, Clock] | None = None) -> list[Timeline]:
    """Record every rank; those of ``clocks`` by a clock of their own, which their control plane has as well."""
    made = []
    for comm in comms:
        session = comm._session
        clock = (clocks or {}).get(comm.rank)
        if clock is None:
            made.append(Timeline.of(session, folder))
        else:
            session.engine.control.clock = clock
            made.append(Timeline.of(session, folder, clock))
    return made


def events_of(path: Path) -> list[Event]:
    """All events of a whole file."""
    return json.loads(path.read_text("utf-8"))


def named(events: Iterable[Event], name: str, ph: str) -> list[Event]:
    return [event for event in events if event["name"] == name and event["ph"] == ph]


def check(events: Iterable[Event]) -> None:
    """Check a complete trace: pairs are complete, and times ascend on each track."""
    begun: dict[Any, Event] = {}
    open_slices: dict[Any, int] = defaultdict(int)
    latest: dict[Any, float] = {}
    for event in events:
        match event["ph"]:
            case "M":
                continue
            case "b":
                assert event["id"] not in begun
                begun[event["id"]] = event
            case "e":
                begin = begun.pop(event["id"])
                assert (begin["name"], begin["cat"], begin["pid"]) == (event["name"], event["cat"], event["pid"])
                assert begin["ts"] <= event["ts"]
            case "B":
                open_slices[event["tid"]] += 1
                assert open_slices[event["tid"]] == 1
            case "E":
                open_slices[event["tid"]] -= 1
                assert open_slices[event["tid"]] == 0
        end = event["ts"] + event.get("dur", 0)
        track = (event["pid"], event.get("tid"), event["ph"] == "C")
        assert latest.get(track, 0) <= end
        latest[track] = end
    assert not begun
    assert not any(open_slices.values())


def about(**changes: Any) -> dict[str, Any]:
    """The first event of a file."""
    usual = {
        "format": FORMAT, "job": "j", "rank": 0, "size": 2, "host": 0, "hostname": "h", "pid": 7, "started_ns": 1,
        "time_s": 1.5,
    }  # fmt: skip
    args = {**usual, **changes}
    return {"ph": "M", "name": ABOUT, "pid": args["rank"] + 1, "args": args}


def sampled(rank: int, at_ns: int, offset_ns: int, uncertainty_ns: int) -> Event:
    args = {"at_ns": at_ns, "offset_ns": offset_ns, "uncertainty_ns": uncertainty_ns}
    return {"ph": "M", "name": CLOCK, "pid": rank + 1, "args": args}


def collective(rank: int, name: str, begin: float, end: float | None, **args: Any) -> list[Event]:
    """The events of one collective; times in microseconds."""
    usual = {"verb": "all_reduce", "strategy": "ring", "group": "world", "ranks": 2, "seq": 0, "bytes": 8, **args}
    outcome = usual.pop("outcome", "completed")
    label = f"{rank}.{name}.{usual['seq']}"
    common = {"cat": "collective", "name": name, "id": label, "pid": rank + 1}
    events = [{"ph": "b", **common, "ts": begin, "args": usual}]
    if end is not None:
        events.append({"ph": "e", **common, "ts": end, "args": {"outcome": outcome}})
    return events


def written(path: Path, events: Iterable[Event], *, whole: bool = True) -> Path:
    """A file of these events, in the layout of the real ones."""
    end = [{"ph": "M", "name": END, "pid": 1, "args": {"left_out": 0, "open": 0}}] if whole else []
    text = "[" + "\n,".join(json.dumps(event) for event in [*events, *end])
    path.write_text(text + ("\n]\n" if whole else ""), "utf-8")
    return path
