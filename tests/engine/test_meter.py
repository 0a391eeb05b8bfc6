"""The figures themselves: histograms with a known error, references that follow slowly, sums that never fall."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.collective import GroupView, Key
from kfcomm.engine import meter as meters
from kfcomm.engine import traffic as traffics
from kfcomm.engine.meter import Meter, MeteredThroughput, Tally, bound_s, bucket_of, steady
from kfcomm.engine.traffic import Traffic
from kfcomm.transports.base import Counts

GROUP = GroupView(b"world", (0, 1, 2, 3), 0)
HALF_A_BUCKET = 2 ** (1 / 16)


class Clock:
    """The meter's, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.reads = 0
        monkeypatch.setattr(meters, "monotonic", self)

    def __call__(self) -> float:
        self.reads += 1
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def call(posted_s: float = 100.0) -> Any:
    """Operation with a received chunk, as the meter reads it."""
    return SimpleNamespace(heard_s=posted_s)


def tallied(seconds: list[float]) -> Tally:
    tally = Tally()
    for taken_s in seconds:
        bucket = bucket_of(taken_s)
        tally.buckets[bucket] = tally.buckets.get(bucket, 0) + 1
        tally.max_s = max(tally.max_s, taken_s)
    return tally


# ---------------------------------------------------------------- calls by key


@given(st.lists(st.floats(1e-7, 1e5), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_right_to_half_a_bucket(seconds: list[float], share: float) -> None:
    exact = sorted(seconds)[max(0, -int(-share * len(seconds) // 1) - 1)]
    found = tallied(seconds).quantile(share)
    assert exact / HALF_A_BUCKET * (1 - 1e-9) <= found <= exact * HALF_A_BUCKET * (1 + 1e-9)
    assert found <= max(seconds)


@given(st.floats(1e-9, 1e9))
def test_a_duration_is_within_the_bounds_of_its_bucket(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert bound_s(bucket - 1) * (1 - 1e-9) <= seconds <= bound_s(bucket) * (1 + 1e-9)


def test_without_calls_a_quantile_is_nothing() -> None:
    assert Tally().quantile(0.5) == 0.0


def test_a_call_is_tallied_under_its_key() -> None:
    meter = Meter(4)
    key = Key(7, GROUP.id, "grad")
    for taken_s in (0.5, 2.0):  # the second time the key knows its tally
        meter.completed(key, taken_s, 16)
    tally = meter.tallies()[0][GROUP.id, "grad"]
    assert (tally.count, tally.nbytes, tally.total_s, tally.max_s, tally.failures) == (2, 32, 2.5, 2.0, 0)
    meter.count_failure(GROUP, "grad")
    meter.count_failure(GROUP, "other")
    assert tally.failures == 1
    assert list(meter.tallies()[0]) == [(GROUP.id, "grad"), (GROUP.id, "other")]


def test_names_beyond_the_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "MAX_KEYS", 2)
    meter = Meter(4)
    other = GroupView(b"other", (0, 1), 0)
    for name in "abcd":
        for _ in range(2):
            meter.completed(Key(0, GROUP.id, name), 1.0, 8)
    meter.completed(Key(0, other.id, "e"), 1.0, 8)
    meter.count_failure(GROUP, "f")
    tallies, others = meter.tallies()
    assert [name for _, name in tallies] == ["a", "b"]
    assert (others[GROUP.id].count, others[GROUP.id].failures) == (4, 1)
    assert others[other.id].count == 1


def test_groups_that_were_left_are_counted_together_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "MAX_KEYS", 3)
    meter = Meter(4)
    groups = [GroupView(bytes([number]), (0, 1), 0) for number in range(3)]
    for group in groups:
        meter.completed(Key(0, group.id, "a"), 1.0, 8)
        meter.throughput(group, "star").note(8, 1.0)
    for group in groups[:2]:
        meter.completed(Key(0, group.id, "beyond"), 2.0, 8)
    meter.forget([group.id for group in groups[:2]])
    meter.forget([groups[0].id])
    tallies, others = meter.tallies()
    left = meters.LEFT_GROUPS
    assert {identity: tally.count for identity, tally in tallies.items()} == {(groups[2].id, "a"): 1, (left, "a"): 2}
    assert {group_id: tally.total_s for group_id, tally in others.items()} == {left: 4.0}
    assert list(meter.throughputs) == [groups[2].id]
    meter.forget([groups[2].id])
    assert [tally.count for tally in meter.tallies()[0].values()] == [3]


def test_tallies_add_up() -> None:
    one, other = tallied([1e-3, 2e-3]), tallied([4.0])
    one.nbytes, one.failures, one.total_s = 8, 1, 3e-3
    other.nbytes, other.failures, other.total_s = 16, 2, 4.0
    whole = Tally.sum([one, other])
    assert (whole.count, whole.nbytes, whole.failures, whole.total_s, whole.max_s) == (3, 24, 3, 4.003, 4.0)


# ---------------------------------------------------------------- who is waited for


def test_the_time_of_a_collective_is_shared_out_by_arrival(clock: Clock) -> None:
    meter = Meter(4)
    operation = call(100.0)
    for peer, now_s in ((1, 100.5), (2, 100.75), (1, 103.0)):
        clock.now_s = now_s
        meter.arrived(peer, operation)
        meter.now_s = 0.0  # the burst is over
    assert meter.waited_s == [0.0, 2.75, 0.25, 0.0]


def test_the_clock_is_read_once_a_burst(clock: Clock) -> None:
    meter = Meter(4)
    clock.now_s = 101.0
    for number in range(5):
        meter.arrived(1, call(100.0 + number / 4))
        clock.now_s = 200.0  # while it folds: what is in the same burst had arrived before
    assert clock.reads == 1
    assert meter.waited_s == [0.0, 1.0 + 0.75 + 0.5 + 0.25, 0.0, 0.0]


def test_chunks_before_the_post_add_no_waiting_time(clock: Clock) -> None:
    meter = Meter(4)
    meter.arrived(1, call(clock.now_s + 1.0))
    assert meter.waited_s == [0.0] * 4


# ---------------------------------------------------------------- throughput


def test_a_reference_begins_with_the_first_call_and_follows_slowly() -> None:
    one = MeteredThroughput()
    one.note(1000, 1.0)
    assert (one.last, one.reference) == (1000.0, 1000.0)
    one.note(1000, 4.0)
    assert (one.last, one.reference) == (250.0, 1000.0 - 75.0)
    assert (one.count, one.nbytes, one.seconds) == (2, 2000, 5.0)
    calls = 1
    while one.last < 0.8 * one.reference:
        one.note(1000, 4.0)
        calls += 1
    assert 15 <= calls <= 30  # a quarter of the rate stands out for some twenty calls


def test_strategies_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "MAX_STRATEGIES", 2)
    meter = Meter(4)
    first = meter.throughput(GROUP, "a")
    assert meter.throughput(GROUP, "a") is first
    meter.throughput(GROUP, "b")
    meter.throughput(GROUP, "c")
    assert list(meter.throughputs[GROUP.id]) == ["b", "c"]


# ---------------------------------------------------------------- bytes


class FakeLink:
    """As much of a link as is counted."""

    def __init__(self, peer: int, kind: str = "tcp") -> None:
        self.peer = peer
        self.kind = kind
        self.moved = Counts(0, 0, 0, 0)

    def counts(self) -> Counts:
        return self.moved


def test_links_of_one_kind_to_a_peer_are_one_sum_also_when_they_have_ended() -> None:
    traffic = Traffic()
    out, back, other, unix = FakeLink(1), FakeLink(1), FakeLink(2), FakeLink(1, "unix")
    for link in (out, other, back, unix):
        traffic.add(link)  # type: ignore[arg-type]
    out.moved, back.moved = Counts(100, 3, 4, 1), Counts(5, 200, 1, 6)
    expected = {(1, "tcp"): (105, 203, 5, 7), (2, "tcp"): (0, 0, 0, 0), (1, "unix"): (0, 0, 0, 0)}
    assert traffic.totals() == expected
    for _ in range(2):  # the end of a link is counted once
        traffic.end(out)  # type: ignore[arg-type]
    assert traffic.totals() == expected
    assert list(traffic.totals()) == list(expected)


def test_a_link_that_is_not_known_ends_without_a_trace() -> None:
    traffic = Traffic()
    traffic.end(FakeLink(1))  # type: ignore[arg-type]
    assert traffic.totals() == {}


def test_rates_are_those_of_the_last_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffics.time, "monotonic", lambda: 10.0)
    traffic = Traffic()
    link = FakeLink(1)
    traffic.add(link)  # type: ignore[arg-type]

    def rates(now_s: float) -> tuple[float, float]:
        return traffic.rates(traffic.totals(), now_s)[1, "tcp"]

    link.moved = Counts(50, 10, 1, 1)
    assert rates(10.5) == (100.0, 20.0)
    traffic.mark(10.5)  # no window has passed: nothing changes
    assert rates(10.5) == rates(10.5) == (100.0, 20.0)
    traffic.mark(11.0)
    link.moved = Counts(150, 10, 2, 1)
    assert rates(11.5) == (100.0, 10 / 1.5)
    traffic.mark(12.0)
    assert rates(12.0) == (100.0, 0.0)  # since 11.0
    traffic.mark(13.5)
    assert rates(13.5) == (0.0, 0.0)  # since 12.0


def test_reading_while_another_thread_tallies() -> None:
    """Sums are read on any thread; what changes under the hands is read again."""

    async def main() -> None:
        meter = Meter(2)
        ended = False

        def read() -> int:
            reads = 0
            last = 0
            while not ended:
                now = steady(lambda: Tally.sum(meter.tallies()[0].values())).count
                assert now >= last
                last = now
                reads += 1
            return reads

        reading = asyncio.create_task(asyncio.to_thread(read))
        keys = [Key(number, GROUP.id, f"name/{number}") for number in range(300)]
        try:
            for number in range(20_000):
                meter.completed(keys[number % 300], (number % 977) * 1e-3, 8)
                if not number % 1000:
                    await asyncio.sleep(0)
        finally:
            ended = True
        assert await reading > 0
        assert Tally.sum(meter.tallies()[0].values()).count == 20_000

    asyncio.run(main())
