"""Marks that a rank waits for: polled, left to the device before a rest, and looked at late where no call waits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kfcomm.collectives.on_device.marks import LAZY_S, Marks
from kfcomm.testing import FakeDevice
from kfcomm.transports.reactor import Reactor

Told = list[tuple[str, BaseException | None]]


class Place:
    """Marks of a reactor whose clock the test sets, and a device whose streams are held."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reactor = Reactor(lambda: self.now_s)
        self.device = FakeDevice()
        self.marks = Marks(self.reactor)
        self.told: Told = []

    def stream(self, *titles: str, **options: Any) -> Any:
        """A held stream with marks of these titles."""
        made = self.device.stream()
        self.device.hold(made)
        for title in titles:
            self.watch(made, title, **options)
        return made

    def watch(self, stream: Any, title: str, **options: Any) -> None:
        self.marks.watch(self.device, stream, partial(self.hear, title), **options)

    def hear(self, title: str, error: BaseException | None) -> None:
        self.told.append((title, error))

    @property
    def titles(self) -> list[str]:
        return [title for title, _ in self.told]


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.device.release()
    made.device.close()
    made.reactor.close()


def test_marks_are_polled_in_the_order_of_their_stream(place: Place) -> None:
    one, other = place.stream("a", "b"), place.stream("c")
    assert not place.reactor.glance()
    assert place.marks.is_needed
    assert place.marks.is_awake
    place.device.release(other)
    assert place.reactor.glance()
    assert place.titles == ["c"]
    place.device.release(one)
    place.reactor.glance()
    assert place.titles == ["c", "a", "b"]
    assert not place.marks.is_needed
    assert place.device.num_promised == 0


def test_a_rest_leaves_them_to_the_device_with_one_notice_for_each_stream(place: Place) -> None:
    streams = [place.stream("a", "b"), place.stream("c")]
    for _ in range(2):
        assert place.reactor.park()
        assert not place.marks.is_awake
        assert place.device.num_promised == 2
    place.watch(streams[0], "d")
    assert place.marks.is_awake
    assert place.reactor.park()
    assert place.device.num_promised == 3
    for stream in streams:
        place.device.release(stream)
    assert place.titles == []
    place.reactor.progress()
    assert sorted(place.titles) == ["a", "b", "c", "d"]


def test_a_mark_of_the_callers_is_taken(place: Place) -> None:
    stream = place.device.stream()
    mark = place.device.mark(stream)
    place.device.hold(stream)
    place.device.mark(stream)
    place.watch(stream, "a", mark=mark)
    place.reactor.glance()
    assert place.titles == ["a"]


def test_lazy_marks_keep_nobody_awake_and_are_looked_at_after_a_moment(place: Place) -> None:
    done = place.stream("done", lazily=True)
    held = place.stream("held", lazily=True)
    assert not place.marks.is_awake
    assert not place.marks.is_needed
    assert place.reactor.park()
    assert place.device.num_promised == 0
    place.device.release(done)
    place.now_s = 2 * LAZY_S
    place.reactor.progress()
    assert place.titles == ["done"]
    assert place.device.num_promised == 1, "of the one that is not done"
    place.device.release(held)
    place.reactor.progress()
    assert place.titles == ["done", "held"]


def test_a_caller_who_waits_makes_lazy_marks_urgent(place: Place) -> None:
    stream = place.stream("a", lazily=True)
    place.marks.hurry()
    assert place.marks.is_awake
    place.device.release(stream)
    place.reactor.glance()
    assert place.titles == ["a"]
    assert not place.marks.is_needed
    place.marks.hurry()
    assert not place.marks.is_needed


@pytest.mark.parametrize("rests", [False, True])
def test_a_failed_stream_fails_all_its_marks(place: Place, rests: bool) -> None:
    stream, other = place.device.stream(), place.stream("other")
    place.device.hold(stream)
    place.watch(stream, "before")
    place.device.run(stream, partial(int, "no number"))
    place.watch(stream, "behind")
    if rests:
        assert place.reactor.park()
    place.device.release(stream)
    place.reactor.progress()
    assert place.titles == ["before", "behind"]
    assert [type(error) for _, error in place.told] == [type(None), ValueError]
    place.device.release(other)
    place.reactor.progress()
    assert place.told[-1] == ("other", None)


@pytest.mark.parametrize("step", ["mark", "notify"])
def test_a_device_that_refuses_is_an_error_of_the_mark(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the device refuses")

    monkeypatch.setattr(place.device, step, refuse)
    place.stream("a")
    place.reactor.park()
    place.reactor.progress()
    ((title, error),) = place.told
    assert (title, str(error)) == ("a", "the device refuses")


def test_closed_marks_are_polled_until_all_are_passed(place: Place) -> None:
    stream = place.stream("a", lazily=True)
    place.marks.close()
    assert place.reactor.pollers == [place.marks]
    place.device.release(stream)
    place.reactor.progress()
    assert place.titles == ["a"]
    place.reactor.progress()
    assert place.reactor.pollers == []
