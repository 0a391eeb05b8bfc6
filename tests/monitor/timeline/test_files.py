"""Trace files that are not as they should be: named, with the line; or read as far as they go."""

from __future__ import annotations

import json

import pytest

from kfcomm.errors import ConfigError
from kfcomm.monitor.timeline import find_files, merge, read_files
from tests.monitor.timeline.traces import about, check, collective, written


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
