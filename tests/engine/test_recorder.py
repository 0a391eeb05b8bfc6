"""Recorder: the latest calls of a process, and the tally of ended ones."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kfcomm.core.collective import GroupView, Key
from kfcomm.engine import meter as meters
from kfcomm.engine import observer as recorders
from kfcomm.engine.meter import Meter
from kfcomm.engine.observer import Recorder

GROUP = GroupView(b"world", (0, 1), 0)


def series(name: str) -> Any:
    """Data common to the uses of a name, as the recorder reads it."""
    return SimpleNamespace(key=Key(0, GROUP.id, name), signature=("all_reduce",))


class Posted:
    """Operation, as the recorder reads it."""

    def __init__(self, name: str, seq: int, posted_s: float) -> None:
        self.collective = SimpleNamespace(series=series(name), name=name)
        self.seq, self.posted_s = seq, posted_s


def operation(name: str, seq: int = 0, posted_s: float = 100.0) -> Any:
    return Posted(name, seq, posted_s)


def events(recorder: Recorder) -> list[tuple[str, str, int]]:
    return [(one["event"], one["name"], one["seq"]) for one in recorder.as_list()]


def test_events_are_told_in_the_order_of_their_times() -> None:
    live: dict[Any, None] = {}
    recorder = Recorder(lambda: list(live))
    assert recorder.last() == "has not posted anything yet"
    live[operation("grad", 1, 103.0)] = None
    recorder.ended.append((series("grad"), 0, 100.0, 102.0, 8))
    recorder.ended.append((series("loss"), 0, 101.0, 104.0, 8))
    assert events(recorder) == [
        ("posted", "grad", 0), ("posted", "loss", 0), ("completed", "grad", 0), ("posted", "grad", 1),
        ("completed", "loss", 0),
    ]  # fmt: skip
    assert recorder.last().startswith("completed 'loss' #0 ")
    recorder.settle()
    assert not recorder.ended
    assert [re.sub(r"^\S+ ", "", line) for line in recorder.story("grad")] == [
        "posted #0 all_reduce", "completed #0", "posted #1 all_reduce",
    ]  # fmt: skip


def test_a_failure_is_told_with_its_post() -> None:
    recorder = Recorder(list)
    recorder.lost(1, "its process ended")
    recorder.failed(operation("grad", 3), "rank 1 is lost", is_last=True)
    assert events(recorder) == [("posted", "grad", 3), ("lost", "rank 1", -1), ("failed", "grad", 3)]
    assert "failed 'grad' #3, rank 1 is lost 0.0 s ago" in recorder.last()


def test_a_call_that_was_refused_before_it_had_a_number_is_told_without_one() -> None:
    recorder = Recorder(list)
    recorder.refused(GROUP, "x", "used again", is_local=False)
    assert recorder.last().startswith("rejected 'x', used again ")


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    live = [operation("live", number, 1e6 + number) for number in range(2 * recorders.MAX_EVENTS)]
    recorder = Recorder(lambda: live)
    for number in range(2 * recorders.MAX_EVENTS):
        recorder.ended.append((series("x"), number, float(number), number + 0.5, 8))
        recorder.settle()
        recorder.note("rejected", "y", -1)
    assert len(recorder.as_list()) == recorders.MAX_EVENTS
    assert len(recorder._kept) == len(recorder._notes) == recorders.MAX_EVENTS


def test_meter_settles_ended_calls_before_it_is_read() -> None:
    meter = Meter(2)
    recorder = Recorder(list, meter)
    grad = series("grad")
    for number in range(5):
        recorder.ended.append((grad, number, 100.0, 102.0, 8))
    tally = meter.tallies()[0][GROUP.id, "grad"]
    assert (tally.count, tally.nbytes, tally.total_s) == (5, 40, 10.0)
    recorder.ended.append((series("before"), 0, 100.0, 102.0, 8))
    meter.count_failure(GROUP, "after")
    assert [name for _, name in meter.tallies()[0]] == ["grad", "before", "after"]


def test_one_thread_tallies_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "PATIENCE_S", 0.0)
    meter = Meter(2)
    recorder = Recorder(list, meter)
    recorder.ended.append((series("x"), 0, 100.0, 101.0, 8))
    with recorder._lock:  # somebody else is at it, or a forked child's parent was
        assert not meter.tallies()[0]
    assert meter.tallies()[0][GROUP.id, "x"].count == 1


def test_it_is_read_while_others_write() -> None:
    live: dict[Any, None] = {}
    meter = Meter(2)
    recorder = Recorder(lambda: list(live), meter)
    is_over = threading.Event()
    one = series("x")

    def read() -> None:
        while not is_over.is_set():
            assert all(event in ("posted", "completed") for event, _, _ in events(recorder))
            recorder.last()
            meter.tallies()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(5000):
            live[operation("x", number)] = None
            recorder.ended.append((one, number, 100.0, 101.0, 8))
            if len(live) > 10:
                live.pop(next(iter(live)))
    finally:
        is_over.set()
        reader.join()
    assert meter.tallies()[0][GROUP.id, "x"].count == 5000
