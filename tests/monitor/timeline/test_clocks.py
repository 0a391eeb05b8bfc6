"""Traces of clocks that differ come out as if there had been one clock."""

from __future__ import annotations

import json
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.monitor.timeline import merge, read_files
from kfcomm.monitor.timeline.files import RankClock, Sample, clocks_of
from kfcomm.testing import run_ranks, world
from tests.monitor.timeline.traces import about, check, record, sampled, written

SECOND = 1_000_000_000


def skewed(offset_ns, drift=0.0):
    """A clock that is set wrong, and runs too fast or too slowly."""
    start_ns = time.monotonic_ns()

    def read():
        now_ns = time.monotonic_ns()
        return now_ns + offset_ns + int((now_ns - start_ns) * drift)

    return read


@pytest.mark.asyncio
async def test_a_merged_trace_of_skewed_clocks_keeps_the_order_of_things(tmp_path):
    clocks = {1: skewed(5 * SECOND), 2: skewed(-3 * SECOND, drift=0.05)}
    async with world(3, hosts=3) as comms:
        record(comms, tmp_path, clocks)

        async def rank(comm):
            for step in range(30):
                await comm.barrier(f"step/{step}")

        await run_ranks(comms, rank)
    traces = read_files([tmp_path])
    assert _overlap([event for trace in traces for event in _raw(trace.path)]) < 0  # else the test would show nothing
    merged = merge(traces, tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text("utf-8"))
    check(events)
    error_us = sum(clock.uncertainty_ns for clock in merged.clocks.values()) / 1000
    # before the first sample and after the last the drift is not known: a busy machine may be late with them
    times_us = [event["ts"] for event in _raw(traces[2].path) if event["ph"] in "be"]
    samples_us = [sample.at_ns / 1000 for sample in merged.clocks[2].samples]
    outside_us = max(0.0, samples_us[0] - min(times_us), max(times_us) - samples_us[-1])
    assert _overlap(events) >= -error_us - 0.05 * outside_us
    for sample in merged.clocks[1].samples:
        assert abs(sample.offset_ns + 5 * SECOND) <= sample.uncertainty_ns
    assert merged.clocks[2].offset_at(0) > 2 * SECOND
    assert merged.clocks[2].drift < -0.01


def _raw(path):
    return json.loads(path.read_text("utf-8"))


def _overlap(events):
    """By how many microseconds every barrier's first end comes after its last beginning, at the least."""
    begun, ended = defaultdict(list), defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            (begun if event["ph"] == "b" else ended)[event["name"]].append(event["ts"])
    assert len(begun) == 30
    assert {len(times) for times in (*begun.values(), *ended.values())} == {3}
    return min(min(ended[name]) - max(begun[name]) for name in begun)


samples = st.lists(
    st.builds(Sample, st.integers(0, 10**12), st.integers(-(10**9), 10**9), st.integers(0, 10**6)),
    min_size=1,
    max_size=6,
    unique_by=lambda sample: sample.at_ns,
).map(lambda found: tuple(sorted(found, key=lambda sample: sample.at_ns)))


@given(samples=samples, ns=st.integers(-(10**12), 2 * 10**12))
def test_an_offset_lies_between_those_of_the_samples_around_it(samples, ns):
    clock = RankClock(samples, "")
    before = [sample for sample in samples if sample.at_ns <= ns][-1:]
    after = [sample for sample in samples if sample.at_ns > ns][:1]
    around = [sample.offset_ns for sample in before + after]
    assert min(around) - 1 <= clock.offset_at(ns) <= max(around) + 1
    assert clock.on_rank_0(ns) == ns + clock.offset_at(ns)
    for sample in samples:
        assert clock.offset_at(sample.at_ns) == sample.offset_ns
        assert clock.agrees_with(sample)


def test_a_drift_is_taken_to_be_even():
    clock = RankClock((Sample(0, 100, 1), Sample(1000, 300, 2)), "")
    assert [clock.offset_at(ns) for ns in (-5, 0, 250, 500, 1000, 9999)] == [100, 100, 150, 200, 300, 300]
    assert clock.drift == 0.2
    assert clock.uncertainty_ns == 2


def traces(tmp_path, *files):
    for rank, (changes, found) in enumerate(files):
        lines = [about(rank=rank, size=len(files), **changes), *(sampled(rank, *one) for one in found)]
        written(tmp_path / f"kfcomm-{rank}.trace.json", lines)
    return read_files([tmp_path])


def test_ranks_of_one_host_have_one_clock(tmp_path):
    clocks = clocks_of(
        traces(
            tmp_path,
            ({"host": 0}, []),
            ({"host": 0}, [(10, 30_000, 40_000)]),
            ({"host": 1}, [(10, 5 * SECOND, 40_000), (20, 5 * SECOND, 900_000)]),
            ({"host": 1}, [(15, 5 * SECOND + 60_000, 30_000)]),
            ({"host": 1}, []),
        )
    )
    assert [clock.offset_at(12) for clock in clocks.values()] == [0, 0, 5 * SECOND, 5 * SECOND, 5 * SECOND]
    assert [clock.uncertainty_ns for clock in clocks.values()] == [0, 0, 40_000, 40_000, 40_000]
    assert "from 1 of 2 samples" in clocks[2].how


def test_a_rank_whose_clock_is_unlike_its_host_s_keeps_its_own(tmp_path):
    clocks = clocks_of(
        traces(tmp_path, ({"host": 0}, []), ({"host": 0}, [(10, 7 * SECOND, 40_000)]), ({"host": 0}, [(10, 9, 50)]))
    )
    assert [clock.offset_at(10) for clock in clocks.values()] == [0, 7 * SECOND, 0]
    assert "unlike others on its host" in clocks[1].how


@pytest.mark.parametrize("zero_is_there", [True, False])
def test_without_samples_the_wall_clocks_have_to_do(tmp_path, zero_is_there):
    found = traces(
        tmp_path,
        ({"host": 0, "started_ns": 50 * SECOND, "time_s": 1000.0}, []),
        ({"host": 1, "started_ns": 7 * SECOND, "time_s": 1001.0}, []),
    )
    clocks = clocks_of(found if zero_is_there else found[1:])
    assert clocks[1].on_rank_0(8 * SECOND) == (52 * SECOND if zero_is_there else 8 * SECOND)
    assert "never compared" in clocks[1].how
