"""`kfcomm timeline`, from a job to the merged file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from kfcomm.cli import main
from tests.launch.launched import finished
from tests.monitor.timeline.traces import about, check, collective, written

PROGRAM = """
import kfcomm
with kfcomm.sync.init() as comm:
    for step in range(3):
        comm.all_reduce(1.0, name="loss")
"""


def timeline(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["timeline", *map(str, arguments)])


def test_a_job_writes_traces_that_merge(tmp_path: Path) -> None:
    folder, merged = tmp_path / "traces", tmp_path / "merged.json"
    done = finished("run", "-n", "3", "--timeline", str(folder), sys.executable, "-W", "error", "-c", PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    names = sorted(path.name for path in folder.iterdir())
    assert [re.sub(r"-[0-9a-f]{16}-", "-JOB-", name) for name in names] == [
        f"kfcomm-JOB-rank{rank}.trace.json" for rank in range(3)
    ]
    told = timeline("merge", folder, "-o", merged)
    assert told.exit_code == 0, told.output
    assert "rank 2: clock: the clock of rank 0, on whose host it is" in told.output
    assert "events of 3 ranks" in told.output
    events = json.loads(merged.read_text("utf-8"))
    check(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [processes[pid].split(" on ")[0] for pid in (1, 2, 3)] == ["rank 0", "rank 1", "rank 2"]
    assert sum(event["ph"] == "e" and event["name"] == "loss" for event in events) == 9
    tracks = [(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert len({tid for _, tid in tracks}) == len(tracks)  # also across processes
    said = timeline("summary", folder, "-n", "2")
    assert said.exit_code == 0
    assert said.output.count("all_reduce 'loss' #") >= 2
    assert "3 collectives complete, 0 failed, 0 unfinished" in said.output


def test_missing_and_truncated_traces_are_reported(tmp_path: Path) -> None:
    written(tmp_path / "kfcomm-0.trace.json", [about(size=3)])
    written(tmp_path / "kfcomm-2.trace.json", [about(size=3, rank=2), *collective(2, "x", 5, None)], whole=False)
    told = timeline("merge", tmp_path, "-o", tmp_path / "merged.json")
    assert told.exit_code == 0
    assert "missing: rank 1 of 3" in told.output
    assert "rank 2: " in told.output
    assert "breaks off (its process was killed, or still runs); 1 collectives unfinished" in told.output


def test_bad_files_are_one_clear_error(tmp_path: Path) -> None:
    bad = tmp_path / "bad.trace.json"
    bad.write_text("[1\n]\n")
    for command in (["merge", bad, "-o", tmp_path / "merged.json"], ["summary", bad]):
        done = timeline(*command)
        assert done.exit_code == 2
        assert f"kfcomm: error: {bad}:1: no JSON object" in done.output
    assert timeline("merge", bad).exit_code == 2
    done = timeline("merge", bad, "-o", tmp_path / "merged.xyz")
    assert done.exit_code == 2
    assert ".xyz cannot be written: the file is one of .json" in done.output
    assert timeline("summary").exit_code == 2
