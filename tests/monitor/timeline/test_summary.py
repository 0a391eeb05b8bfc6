"""Peers for which ranks waited, in summaries."""

from __future__ import annotations

from kfcomm.monitor.timeline import as_text, read_files, summarize
from tests.monitor.timeline.traces import about, collective, sampled, written


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
    assert "There is no trace of rank 1." in text
    assert "The slowest" not in text
