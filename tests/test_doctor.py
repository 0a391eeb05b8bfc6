"""The doctor: every way in which ranks wait for each other is named, and bad input is refused by name."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kfcomm.cli import main
from kfcomm.errors import ConfigError
from kfcomm.monitor.doctor import Diagnosis, diagnose, read
from kfcomm.monitor.findings import Finding, FindingKind, as_text, findings
from kfcomm.testing import run_threads, sync_world
from tests.launch.launched import environ, launched

WORLD = b"world".hex()
Posts = Callable[[Any], object]


def dumped(folder: Path, size: int, posts: Posts, *, of: Any = None) -> str:
    """The dumps of a world in memory in which ``posts(comms)`` was done; a pattern for them."""
    with sync_world(size) as comms:
        posts(comms)
        for comm in comms:
            comm.save("settled", 0)  # when this returns, all that was posted before it is under way
        for comm in comms:
            # what was sent may still arrive: each turn of the loop hands over what there is
            comm.save("settled", 0)
        for rank in range(size) if of is None else of:
            comms[rank].dump(folder / f"{rank}.json")
    return str(folder / "*.json")


def examined(folder: Path, size: int, posts: Posts, *, of: Any = None) -> Diagnosis:
    return diagnose(read([dumped(folder, size, posts, of=of)]))


def found(diagnosis: Diagnosis, kind: FindingKind) -> list[Finding]:
    return [one for one in findings(diagnosis) if one.kind is kind]


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


# ---------------------------------------------------------------- who waits for whom


def test_world_without_waits(tmp_path: Path) -> None:
    pattern = dumped(tmp_path, 3, lambda comms: run_threads(comms, lambda comm: comm.all_reduce(1, "a")))
    done = doctor(pattern)
    assert (done.exit_code, done.output) == (0, "A world of 3: dumps of ranks 0-2.\nNothing waits.\n")


def test_a_rank_that_never_posts_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        run_threads(comms, lambda comm: comm.all_reduce(1, "warm"))
        comms[0].all_reduce_async(1, "grad/1")
        comms[2].all_reduce_async(1, "grad/1")

    diagnosis = examined(tmp_path, 3, posts)
    (wait,) = diagnosis.waits
    assert (wait.title, list(wait.waiting), wait.missing) == ("all_reduce 'grad/1' #0", [0, 2], (1,))
    (late,) = findings(diagnosis)
    assert (late.kind, late.ranks) == (FindingKind.LATE, (1,))
    assert late.text.startswith("ranks 0, 2 wait for rank 1, which is not waiting (at ")
    text = as_text(diagnosis)
    assert "  waiting: ranks 0, 2, for " in text
    assert "not posted: rank 1, which has not used the name; it last completed 'warm' #0 at " in text
    assert "in dumped" in text  # the user's own function


def test_a_rank_without_a_dump_is_named(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, 4, lambda comms: [comm.barrier_async("b") for comm in comms[1:3]], of=(1, 2))
    (wait,) = diagnosis.waits
    assert (list(wait.waiting), wait.missing, wait.unknown) == ([1, 2], (), (0, 3))
    assert [one.kind for one in findings(diagnosis)] == [FindingKind.NO_DUMP]
    text = as_text(diagnosis)
    assert text.startswith("A world of 4: dumps of ranks 1-2, none of ranks 0, 3.")
    assert "no dump: ranks 0, 3" in text


def test_ranks_without_a_dump_are_known_from_others(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        root, _ = (comm.gather_async(1, 0, "g") for comm in comms[:2])
        while 1 not in root._inner.operation.collective.arrived_ranks():
            pass

    diagnosis = examined(tmp_path, 3, posts, of=(0,))
    (wait,) = diagnosis.waits
    assert (wait.heard, wait.unknown) == ((1,), (2,))
    assert "posted, by what the others have heard: rank 1" in as_text(diagnosis)


def test_a_chain_ends_at_the_rank_that_is_not_waiting(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        comms[0].send_async(1, 1)
        comms[1].recv_async(2)

    diagnosis = examined(tmp_path, 3, posts)
    assert {wait.title for wait in diagnosis.waits} == {
        "send with tag 0 from rank 0 to rank 1",
        "recv with tag 0 on rank 1 from rank 2",
    }
    assert [one.ranks for one in found(diagnosis, FindingKind.LATE)] == [(2,)]
    text = as_text(diagnosis)
    assert "not received: rank 1, it" in text
    assert "not sent: rank 2, it has not posted anything" in text


def test_names_that_are_one_name_misspelt(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        comms[0].all_reduce_async(1, "grads/0")
        for comm in comms[1:]:
            comm.all_reduce_async(1, "grad/0")

    diagnosis = examined(tmp_path, 3, posts)
    (spelling,) = findings(diagnosis)
    assert spelling.kind is FindingKind.SPELLING
    assert "'grads/0'" in spelling.text
    assert "'grad/0'" in spelling.text
    assert set(spelling.ranks) == {0, 1, 2}


def test_names_that_differ_by_number_are_meant_to(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        comms[0].all_reduce_async(1, "grad/0")
        comms[1].all_reduce_async(1, "grad/1")

    diagnosis = examined(tmp_path, 2, posts)
    (cycle,) = findings(diagnosis)
    assert (cycle.kind, set(cycle.ranks)) == (FindingKind.CYCLE, {0, 1})
    assert "rank 0 waits in all_reduce 'grad/0' #0 for rank 1" in cycle.text
    assert "rank 1 waits in all_reduce 'grad/1' #0 for rank 0" in cycle.text


def test_a_long_cycle_of_messages(tmp_path: Path) -> None:
    diagnosis = examined(tmp_path, 4, lambda comms: [comm.recv_async((comm.rank + 1) % 4) for comm in comms])
    (cycle,) = findings(diagnosis)
    assert (cycle.kind, cycle.ranks) == (FindingKind.CYCLE, (0, 1, 2, 3))


def test_tags_that_do_not_meet(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        comms[0].send_async(1, 1, tag="loss")
        comms[1].recv_async(0, tag=5)

    (tag,) = findings(examined(tmp_path, 2, posts))
    assert (tag.kind, tag.ranks) == (FindingKind.TAG, (1, 0))
    assert "with tag 5" in tag.text
    assert "with tag 'loss'" in tag.text


def test_one_name_in_two_groups(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        sub = run_threads(comms, lambda comm: comm.group([1, 0], "tp"))
        comms[0].all_reduce_async(1, "x")
        sub[1].all_reduce_async(1, "x")

    diagnosis = examined(tmp_path, 2, posts)
    (group,) = findings(diagnosis)
    assert group.kind is FindingKind.GROUP
    assert "rank 0 waits for 'x' in group 'world'" in group.text
    assert "rank 1 waits for 'x' in group 'tp'" in group.text
    assert "all_reduce 'x' #0 in group 'tp'" in as_text(diagnosis)


def test_calls_without_names_and_calls_inside_calls(tmp_path: Path) -> None:
    def posts(comms: Any) -> None:
        comms[0].set_strategy_async("ring")
        comms[1].all_reduce_async(1)
        comms[2].recv_async()

    titles = {wait.title for wait in examined(tmp_path, 3, posts).waits}
    assert titles == {"set_strategy #0", "unnamed all_reduce #0", "recv with tag 0 on rank 2 from any rank"}


# ---------------------------------------------------------------- records as other processes may write them


def record(rank: int, size: int = 3, **fields: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "format": 1, "rank": rank, "size": size, "time_s": 100.0 + rank, "loop_blocked_s": 0.0, "lost": {},
        "groups": {WORLD: {"name": "world", "members": list(range(size))}}, "waiting": [], "receiving": [],
        "uses": {}, "events": [], "threads": [], "tasks": [],
    }  # fmt: skip
    return {**empty, **fields}


def waits(name: str, seq: int, *, verb: str = "all_reduce", size: int = 3, waited_s: float = 1.0) -> dict[str, Any]:
    return {
        "group": WORLD, "members": list(range(size)), "name": name, "seq": seq, "verb": verb, "waited_s": waited_s,
        "arrived": [], "not_heard_from": [], "chunks_missing": 1, "sends_pending": 0,
    }  # fmt: skip


def written(folder: Path, *records: dict[str, Any]) -> str:
    for number, one in enumerate(records):
        (folder / f"{number}.json").write_text(json.dumps([one]))
    return str(folder / "*.json")


def judged(folder: Path, *records: dict[str, Any]) -> Diagnosis:
    return diagnose(read([written(folder, *records)]))


def test_a_rank_that_is_a_step_behind(tmp_path: Path) -> None:
    diagnosis = judged(
        tmp_path,
        record(0, waiting=[waits("x", 4)], uses={WORLD: {"x": 5}}),
        record(1, waiting=[waits("x", 4)], uses={WORLD: {"x": 5}}),
        record(2, waiting=[waits("x", 3)], uses={WORLD: {"x": 4}}),
    )
    behind = found(diagnosis, FindingKind.BEHIND)
    assert [one.ranks for one in behind] == [(2,)]
    assert behind[0].text == "rank 2 is 1 use behind: it still waits in #3 of 'x', ranks 0-1 in #4"
    assert {wait.key.seq: tuple(wait.finished) for wait in diagnosis.waits} == {4: (), 3: (0, 1)}
    assert found(diagnosis, FindingKind.UNDER_WAY)[0].ranks == (2,)
    assert "whose last use of the name was #3; it has not posted anything" in as_text(diagnosis)


def test_failed_and_finished_ranks_are_named(tmp_path: Path) -> None:
    event = {"time_s": 90.0, "event": "failed", "name": "x", "seq": 0, "detail": "out of luck"}
    diagnosis = judged(
        tmp_path,
        record(0, waiting=[waits("x", 0)], uses={WORLD: {"x": 1}}),
        record(1, uses={WORLD: {"x": 1}}, events=[event]),
        record(2, uses={WORLD: {"x": 1}}),
    )
    (wait,) = diagnosis.waits
    assert wait.finished == {1: "failed: out of luck", 2: "over"}
    assert found(diagnosis, FindingKind.FAILED)[0].text == "all_reduce 'x' #0 is over on rank 1: it failed: out of luck"
    assert "  failed: out of luck: rank 1\n  over: rank 2" in as_text(diagnosis)
    assert diagnosis.last[1].before_dump_s == 11.0


def test_lost_ranks_and_loops_without_a_turn(tmp_path: Path) -> None:
    place = {"name": "step", "at": "train.py:7 in step", "stack": []}
    diagnosis = judged(
        tmp_path,
        record(0, lost={"2": "its process ended with code 1"}, waiting=[waits("x", 0)], uses={WORLD: {"x": 1}}),
        record(1, loop_blocked_s=12.0, tasks=[place], threads=[{"name": "MainThread", "at": "run.py:1", "stack": []}]),
    )
    assert [one.text for one in found(diagnosis, FindingKind.LOST)] == ["rank 2 is gone: its process ended with code 1"]
    (blocked,) = found(diagnosis, FindingKind.BLOCKED)
    assert blocked.text.startswith("the event loop of rank 1 has had no turn for 12.0 s (at train.py:7 in step): ")
    assert not found(diagnosis, FindingKind.NO_DUMP)


def test_last_event_of_a_rank_is_shown(tmp_path: Path) -> None:
    def last(event: str, name: str, seq: int, detail: str) -> str:
        one = {"time_s": 99.0, "event": event, "name": name, "seq": seq, "detail": detail}
        return judged(tmp_path, record(0, 1, events=[one])).last[0].did

    assert last("posted", "x", 3, "broadcast") == "posted broadcast 'x' #3"
    assert last("posted", "\0data", 0, "all_gather") == "posted unnamed all_gather (data) #0"
    assert last("completed", "", 2, "") == "completed an unnamed collective #2"
    assert last("rejected", "x", -1, "in flight") == "rejected 'x': in flight"
    assert last("lost", "rank 1", -1, "reset") == "lost rank 1: reset"


def test_long_lists_are_cut(tmp_path: Path) -> None:
    names = [waits(f"{n}", 0, size=40) for n in range(60)]
    ranks = [record(rank, 40) for rank in range(1, 40)]
    diagnosis = judged(tmp_path, record(0, 40, waiting=names), *ranks)
    lines = as_text(diagnosis).splitlines()
    assert "... and 10 more, which have waited for less long" in lines
    assert lines.count("  not posted: 23 more, ranks 17-39") == 50


def test_the_longest_wait_comes_first(tmp_path: Path) -> None:
    diagnosis = judged(
        tmp_path, record(0, 2, waiting=[waits("short", 0, size=2), waits("long", 0, waited_s=9, size=2)])
    )
    assert [wait.key.name for wait in diagnosis.waits] == ["long", "short"]


def test_the_newest_record_of_a_rank_counts(tmp_path: Path) -> None:
    old = record(0, 2, waiting=[waits("x", 0, size=2)], time_s=1.0)
    new = record(0, 2, time_s=2.0)
    assert judged(tmp_path, old, new, old).waits == ()


# ---------------------------------------------------------------- the command


def test_the_exit_code_says_whether_something_waits(tmp_path: Path) -> None:
    done = doctor(written(tmp_path, record(0, 1, waiting=[waits("x", 0, size=1)])))
    assert done.exit_code == 1
    assert done.output.startswith("A world of 1: dumps of rank 0.\n\nall_reduce 'x' #0\n")


def test_the_diagnosis_for_machines(tmp_path: Path) -> None:
    files = written(
        tmp_path,
        record(0, waiting=[waits("x", 0)], uses={WORLD: {"x": 1}}),
        record(1, waiting=[waits("x", 0)], uses={WORLD: {"x": 1}}),
        record(2),
    )
    done = doctor(files, "--json")
    said = json.loads(done.output)
    assert done.exit_code == 1
    assert (said["size"], said["dumps"], said["absent"]) == (3, [0, 1, 2], [])
    (wait,) = said["waits"]
    assert (wait["key"]["name"], sorted(wait["waiting"]), wait["missing"]) == ("x", ["0", "1"], [2])
    assert said["findings"] == [
        {"kind": "late", "ranks": [2], "text": "ranks 0-1 wait for rank 2, which is not waiting"}
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "expected JSON"),
        (b"[{]", "expected JSON"),
        (b"7", "expected a dump of kfcomm: it has no format"),
        (b'[{"rank": 0}]', "expected a dump of kfcomm: it has no format"),
        (b'{"format": 99}', "its format is 99, this version of kfcomm reads 1"),
        (b'{"format": 1, "rank": 0}', "expected a dump of kfcomm: lacks 'size'"),
        (json.dumps(record(3, 3)).encode(), "rank 3 is outside a world of 3"),
        (b'{"format": 1, "rank": "0", "size": 1}', "'0' is not of type int"),
        (json.dumps(record(0, waiting=[7])).encode(), "expected a dump of kfcomm"),
        (json.dumps(record(0, lost=[])).encode(), "expected a dump of kfcomm"),
        (json.dumps(record(0, time_s="noon")).encode(), "expected a dump of kfcomm"),
        (b"[]", "no communicator was open"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    done = doctor(str(path))
    assert done.exit_code == 2
    assert reason in done.output
    assert content == b"[]" or str(path) in done.output


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    for name, reason in ((tmp_path / "none.json", "file not found"), (tmp_path, "Is a directory")):
        done = doctor(str(name))
        assert (done.exit_code, f"{name}: " in done.output, reason in done.output) == (2, True, True)
    assert doctor().exit_code == 2


def test_dumps_of_two_jobs_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1\.json: a dump of a world of 3, but .*0\.json is of a world of 2"):
        judged(tmp_path, record(0, 2), record(1, 3))


# ---------------------------------------------------------------- a real job

PROGRAM = """
import logging, os, sys, threading, numpy as np, kfcomm
held = open(os.environ["HELD"], "w", buffering=1)
logging.basicConfig(stream=held, format="%(message)s", level=logging.INFO)

def ready():
    print("ready", comm.rank, os.getpid(), file=held)

def load_batch():
    ready()
    while not threading.Event().wait(0.2):  # a signal that comes just before a sleep does not end it
        pass

with kfcomm.sync.init(stall_after=1e6) as comm:
    comm.all_reduce(1, "warm")
    if comm.rank != 2:
        waits = comm.all_reduce_async(np.ones(1000), "grad/1")
        comm.save("posted", 1)
        ready()
        waits.wait()
    load_batch()
"""


def test_three_processes_of_which_one_never_posts(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    options = ("-n", "3", "--dump-dir", str(dumps))
    with launched(tmp_path, *options, sys.executable, "-W", "error", str(program), env=environ()) as job:
        ready = [line.split() for line in job.lines(3)]
        assert [line[:2] for line in ready] == [["ready", "0"], ["ready", "1"], ["ready", "2"]]
        for _, _, pid in ready:
            os.kill(int(pid), signal.SIGUSR1)
        wrote = job.lines(3)
    assert wrote == [f"rank {rank} wrote {dumps}/kfcomm-rank{rank}-pid{pid}.json" for _, rank, pid in ready]
    done = doctor(f"{dumps}/kfcomm-rank*.json")
    assert done.exit_code == 1
    assert "all_reduce 'grad/1' #0\n  waiting: ranks 0-1, for " in done.output
    assert "not posted: rank 2, which has not used the name; it last completed 'warm' #0 at " in done.output
    place = re.escape(f"{program}:") + r"\d+ in (load_batch|ready)\)"
    assert re.search(r"ranks 0-1 wait for rank 2, which is not waiting \(at " + place, done.output)
