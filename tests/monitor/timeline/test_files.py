"""Trace files: read line by line, with the clocks of all ranks on one, and summarised."""

from __future__ import annotations

import json
import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.monitor.timeline import as_text, find_files, merge, read_files, summarize
from kfcomm.monitor.timeline.files import RankClock, Sample, clocks_of
from kfcomm.testing import run_ranks, world
from tests.monitor.timeline.traces import about, check, collective, record, sampled, written


def test_files_are_found_in_folders_by_name_and_by_pattern(tmp_path):
    one = written(tmp_path / "kfcomm-j-rank0.trace.json", [about()])
    two = written(tmp_path / "kfcomm-j-rank1.trace.json", [about(rank=1)])
    (tmp_path / "merged.json").write_text("[]")
    assert find_files([tmp_path]) == [one, two]
    assert find_files([tmp_path / "*rank1*", two, one]) == [two, one]
    assert [trace.about.rank for trace in read_files([two, one])] == [0, 1]


@pytest.mark.parametrize(
    ("place", "message"),
    [("nothing", "nothing: No such file"), ("no*thing", "no such file"), (".", "no timelines here")],
)
def test_files_that_are_not_there_are_named(tmp_path, place, message):
    with pytest.raises(ConfigError, match=message):
        read_files([tmp_path / place])


GOOD = json.dumps(about())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty: its process ended before anything was written"),
        ("[\n]\n", "empty"),
        ("hello\n", ":1: Expecting value"),
        ("\x00\x01\xff\xfe", "empty"),
        ("\x00\x01\xff\xfe\n", ":1: "),
        ('[{"ph":"M","pid":1,"name":"process_name","args":{"name":"x"}}\n]', ":1: no timeline of kfcomm"),
        ('{"traceEvents":[]}\n', ":1: an event needs texts"),
        (f"[{json.dumps(about(format=9))}\n]", ":1: format 9, this version reads 1"),
        (f"[{json.dumps(about(merged=True))}\n]", ":1: a merged timeline; give the files of the ranks"),
        (f"[{json.dumps(about(rank=2))}\n]", ":1: rank 2 of a world of 2"),
        (f"[{json.dumps(about(size='2'))}\n]", ":1: size='2' must be of type int"),
        (f"[{json.dumps(about(rank=True))}\n]", ":1: rank=True must be of type int"),
        (f"[{json.dumps(about(time_s=float('nan')))}\n]", ":1: time_s=nan must be a time of the wall clock"),
        (f"[{GOOD}\n,{{\"ph\":\"i\"\n]", ":2: "),
        (f"[{GOOD}\n,7\n]", ":2: no JSON object"),
        (f"[{GOOD}\n,{{}}\n]", ":2: an event needs texts 'ph' and 'name'"),
        (f'[{GOOD}\n,{{"ph":"i","pid":1}}\n]', ":2: ts=None must be a number"),
        (f'[{GOOD}\n,{{"ph":"i","pid":1,"ts":"3"}}\n]', ":2: ts='3' must be a number"),
        (f'[{GOOD}\n,{{"ph":"i","pid":1,"ts":NaN}}\n]', ":2: ts=nan must be a number"),
        (f'[{GOOD}\n,{{"ph":"i","pid":1,"ts":1e300}}\n]', ":2: ts=1e.300 must be a number"),
        (f'[{GOOD}\n,{{"ph":"i","ts":1,"args":[]}}\n]', ":2: an event needs"),
        (f'[{GOOD}\n\n,{{"ph":"b","pid":1,"ts":1}}\n]', ":3: id=None must be a text"),
        (f'[{GOOD}\n,{{"ph":"B","pid":1,"ts":1}}\n]', ":2: tid=None must be a whole number"),
        (f'[{GOOD}\n,{{"ph":"i","pid":9,"ts":1}}\n]', ":2: an event of process 9 in the trace of rank 0 on host h"),
        (f'[{GOOD}\n,{{"ph":"M","pid":1,"name":"kfcomm clock"}}\n]', ":2: at_ns=None must be a whole number"),
        (f'[{GOOD}\n,{{"ph":"M","pid":1,"name":"{"x" * (1 << 20)}"}}\n]', ":2: a line of"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(tmp_path, text, message):
    path = tmp_path / "kfcomm-bad.trace.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message) as caught:
        merge(read_files([path]), tmp_path / "merged.json")
    assert str(path) in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_files_of_different_jobs_are_refused(tmp_path):
    written(tmp_path / "kfcomm-a.trace.json", [about(job="a")])
    written(tmp_path / "kfcomm-b.trace.json", [about(job="b", rank=1)])
    with pytest.raises(ConfigError, match=r"of 2 jobs, name those of one: a \(1 of 2 ranks, such as .*\); b \(1 of 2"):
        read_files([tmp_path])


def test_two_files_of_one_rank_are_refused(tmp_path):
    for name in "ab":
        written(tmp_path / f"kfcomm-{name}.trace.json", [about()])
    with pytest.raises(ConfigError, match="are both of rank 0"):
        read_files([tmp_path])


@pytest.mark.parametrize("torn", ["", '\n,{"ph":"e","cat', "\n"])
def test_a_file_that_breaks_off_is_read_as_far_as_it_goes(tmp_path, torn):
    wait = {"ph": "B", "name": "waiting for rank 1", "pid": 1, "tid": 5, "ts": 22}
    events = [about(), *collective(0, "done", 10, 20), *collective(0, "open", 21, None), wait]
    path = written(tmp_path / "kfcomm-0.trace.json", events, whole=False)
    path.write_text(path.read_text() + torn)
    written(tmp_path / "kfcomm-1.trace.json", [about(rank=1), *collective(1, "done", 12, 99)])
    merged = merge(read_files([tmp_path]), tmp_path / "merged.json")
    assert [trace.is_whole for trace in merged.traces] == [False, True]
    assert merged.unfinished == {0: 1}
    found = json.loads((tmp_path / "merged.json").read_text())
    check(found)
    (end,) = [event for event in found if event["ph"] == "e" and event["name"] == "open"]
    assert (end["ts"], end["args"]) == (22, {"outcome": "unfinished"})
    assert len(found) == merged.num_events + 1


def test_missing_ranks_are_told(tmp_path):
    written(tmp_path / "kfcomm-0.trace.json", [about(size=4)])
    written(tmp_path / "kfcomm-2.trace.json", [about(size=4, rank=2)])
    assert merge(read_files([tmp_path]), tmp_path / "merged.json").missing == [1, 3]


def test_a_result_that_cannot_be_written_is_an_error(tmp_path):
    written(tmp_path / "kfcomm-0.trace.json", [about()])
    with pytest.raises(ConfigError, match=r"merged\.json: No such file"):
        merge(read_files([tmp_path]), tmp_path / "nowhere" / "merged.json")


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


def test_the_slowest_and_those_who_were_waited_for_are_named(tmp_path):
    posted = {0: {"a": 100, "b": 5000}, 1: {"a": 4100, "b": 5001}, 2: {"a": 1100, "b": 5002}}
    ended = {0: {"a": 6100, "b": 5100}, 1: {"a": 6000, "b": 5100}, 2: {"a": 6050, "b": 5100}}
    for rank in range(3):
        events = [about(rank=rank, size=3)]
        for name in "ab":
            events += collective(rank, name, posted[rank][name], ended[rank][name], ranks=3, bytes=4096)
        events += collective(rank, "broken", 7000, 7001, ranks=3, outcome="failed" if rank else "completed")
        events += collective(rank, "pair", 7000, 7001, ranks=2) if rank == 1 else []
        written(tmp_path / f"kfcomm-{rank}.trace.json", events)
    found = summarize(read_files([tmp_path]))
    slowest, other = found.collectives
    assert (slowest.total_ns, slowest.late_ns, slowest.alone_ns, slowest.last) == (6_000_000, 4_000_000, 3_000_000, 1)
    assert (other.total_ns, other.alone_ns, other.last) == (100_000, 1000, 2)
    assert (found.num_failed, found.num_unfinished) == (1, 1)
    assert {rank: (one.count, one.total_ns) for rank, one in found.waited_for.items()} == {
        0: (0, 0), 1: (1, 3_000_000), 2: (1, 1000),
    }  # fmt: skip
    text = as_text(found, 1)
    assert "A world of 3, job j: 2 collectives complete, 1 failed, 1 unfinished or not known of all ranks." in text
    assert "6.00 ms    4.00 ms rank 1        2.00 ms          4,096  all_reduce 'a' #0, ring\n" in text
    assert "all_reduce 'b'" in text.split("Who")[1]
    assert "all_reduce 'b'" not in text.split("Who")[0]
    assert "rank 1           1 times    3.00 ms, at most 3.00 ms in all_reduce 'a' #0" in text


def test_waits_below_clock_uncertainty_count_against_no_rank(tmp_path):
    for rank in range(2):
        clock = [sampled(1, 5, 0, 40_000)] if rank else []
        events = [about(rank=rank, host=rank), *clock]
        events += collective(rank, "a", 100 + 60 * rank, 500) + collective(rank, "b", 1000 + 100 * rank, 1500)
        written(tmp_path / f"kfcomm-{rank}.trace.json", events)
    found = summarize(read_files([tmp_path]))
    assert {rank: one.count for rank, one in found.waited_for.items()} == {0: 0, 1: 1}


def test_missing_ranks_and_empty_traces_are_told(tmp_path):
    written(tmp_path / "kfcomm-0.trace.json", [about()])
    text = as_text(summarize(read_files([tmp_path])))
    assert "Missing traces: rank 1." in text
    assert "The slowest" not in text
