"""Contents of a rank's trace; recording never harms the job."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import kfcomm
from kfcomm.monitor.timeline import check_folder, merge, read_files, recording
from kfcomm.monitor.timeline.translation import END
from kfcomm.testing import run_ranks, world
from tests.launch.launched import environ
from tests.monitor.timeline.traces import check, events_of, named, record


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["memory", "shm"])
async def test_every_collective_and_chunk_is_there(tmp_path, transport):
    async with world(3, transport=transport, strategy="star") as comms:
        timelines = record(comms, tmp_path)

        async def rank(comm):
            x = np.ones(1 << 18, np.float32)
            await kfcomm_all(comm.all_reduce(x, f"grad/{i}", priority=i) for i in range(3))
            await comm.broadcast(x[:4], 2, name="weights")
            await comm.barrier()

        await run_ranks(comms, rank)
    for one in timelines:
        events = events_of(one.path)
        check(events)
        grads = [named(events, f"grad/{i}", "b")[0]["args"] for i in range(3)]
        assert [(args["verb"], args["seq"], args["bytes"], args["priority"]) for args in grads] == [
            ("all_reduce", 0, 1 << 20, i) for i in range(3)
        ]
        assert {(args["dtype"], args["op"], args["strategy"], args["group"]) for args in grads} == {
            ("float32", "sum", "star", "world")
        }
        assert named(events, "weights", "e")[0]["args"] == {"outcome": "completed"}
        assert named(events, "unnamed", "b")[0]["args"]["verb"] == "barrier"
    root, leaf = events_of(timelines[0].path), events_of(timelines[1].path)
    tracks = {event["tid"]: event["args"]["name"] for event in root if event["name"] == "thread_name"}
    assert {"from rank 1", "to rank 1", "waiting for rank 2"} <= set(tracks.values())
    came = [event for event in root if event.get("cat") == "arrived" and event["name"] == "grad/0"]
    assert sum(event["args"]["bytes"] for event in came) == 2 << 20
    went = [event for event in leaf if event.get("cat") == "sent" and event["name"] == "grad/0"]
    assert sum(event["args"]["bytes"] for event in went) == 1 << 20


async def kfcomm_all(handles):
    for handle in list(handles):
        await handle


@pytest.mark.asyncio
async def test_uses_of_a_name_share_an_id_unless_they_overlap(tmp_path):
    async with world(2) as comms:
        record(comms, tmp_path)

        async def rank(comm):
            for _ in range(3):
                await comm.all_reduce(1.0, "named")
                await kfcomm_all([comm.barrier(), comm.barrier()])

        await run_ranks(comms, rank)
    events = events_of(min(tmp_path.iterdir()))
    check(events)
    named_ids = [event["id"] for event in named(events, "named", "b")]
    unnamed_ids = [event["id"] for event in named(events, "unnamed", "b")]
    assert (len(named_ids), len(set(named_ids))) == (3, 1)
    assert (len(unnamed_ids), len(set(unnamed_ids))) == (6, 2)


@pytest.mark.asyncio
async def test_wait_for_a_peer_is_shown_with_its_duration(tmp_path):
    async with world(2) as comms:
        record(comms, tmp_path)
        first = comms[0].all_reduce(1.0, "late")
        second = comms[0].all_reduce(1.0, "later")
        ours = [await comms[1].all_reduce(1.0, name) for name in ("later", "late")]
        assert ours == [await second, await first]
    one, other = (events_of(path) for path in sorted(tmp_path.iterdir()))
    (begin,) = named(one, "waiting for rank 1", "B")
    track = begin["tid"]
    (end,) = [event for event in one if event["ph"] == "E" and event["tid"] == track]
    assert begin["args"] == {"first": "late"}
    assert end["args"] == {"last": "late"}
    assert begin["ts"] == named(one, "late", "b")[0]["ts"]
    assert named(other, "late", "b")[0]["ts"] <= end["ts"] <= named(one, "late", "e")[0]["ts"]


@pytest.mark.asyncio
async def test_chunks_that_came_early_are_not_waited_for(tmp_path):
    async with world(2, strategy="star") as comms:
        record(comms, tmp_path)
        early = comms[1].all_reduce(1.0, "early")
        meanwhile = comms[0].all_reduce(1.0, "meanwhile")
        await comms[1].all_reduce(1.0, "meanwhile")  # on the same link: what was sent before is here
        await meanwhile
        await comms[0].all_reduce(1.0, "early")
        await early
    events = events_of(min(tmp_path.iterdir()))
    begun = named(events, "early", "b")[0]["ts"]
    assert [event for event in events if event["ph"] == "B" and event["ts"] >= begun] == []


@pytest.mark.asyncio
async def test_failures_say_why_in_one_line(tmp_path):
    async with world(2) as comms:
        record(comms, tmp_path)
        ours = comms[0].all_reduce(np.ones(3), "grad/0")
        theirs = comms[1].all_reduce(np.ones(4), "grad/0")
        for handle in (ours, theirs):
            with pytest.raises(kfcomm.CollectiveMismatch):
                await handle
        again = comms[0].barrier("twice")
        with pytest.raises(kfcomm.CollectiveError):
            await comms[0].barrier("twice")
        with pytest.raises(kfcomm.ConfigError):
            await comms[0].all_reduce(np.ones(3), "bad", op="sume")
        await comms[1].barrier("twice")
        await again
    events = events_of(min(tmp_path.iterdir()))
    check(events)
    args = named(events, "grad/0", "e")[0]["args"]
    assert args["outcome"] == "failed"
    assert "differs between ranks (shape)" in args["error"]
    assert "\n" not in args["error"]
    assert "used again" in named(events, "rejected", "i")[0]["args"]["reason"]
    assert named(events, "refused", "i")[0]["args"]["collective"] == "'bad'"


@pytest.mark.asyncio
async def test_changes_of_strategy_losses_and_decisions_are_events(tmp_path):
    async with world(3, strategy="star") as comms:
        timelines = record(comms, tmp_path)
        await run_ranks(comms, lambda comm: comm.set_strategy("ring"))
        timelines[0].instant("policy", name="AutoStrategy", arms=["ring", "star"], reward=float("nan"), by=Path("x"))
        swaps = [comm.set_strategy("ring" if comm.rank else "star") for comm in comms]
        for swap in swaps:
            with pytest.raises(kfcomm.CollectiveMismatch):
                await swap
        comms.kill(2)
        with pytest.raises(kfcomm.PeerLost):
            await comms[0].barrier()
    events = events_of(min(tmp_path.iterdir()))
    check(events)
    (swapped,) = named(events, "strategy", "i")
    assert swapped["args"] == {"now": "ring", "generation": 1, "ranks": 3}
    assert named(events, "strategy refused", "i")[0]["args"]["asked"] == "star"
    assert named(events, "peer lost", "i")[0]["args"]["rank"] == 2
    (decided,) = named(events, "policy", "i")
    assert decided["args"] == {
        "name": "AutoStrategy", "arms": ["ring", "star"], "reward": "nan", "by": "x",
    }  # fmt: skip
    assert {event["name"] for event in events if event["ph"] == "C"} <= {"loop lag"}


@pytest.mark.asyncio
async def test_names_of_all_kinds_make_a_file_that_every_viewer_reads(tmp_path):
    names = ['quote"back\\slash', "ünï/🚀", "tab\tnew\nline\x01", '"ts":1,', "x" * 1000]
    async with world(2) as comms:
        record(comms, tmp_path)
        for name in names:
            handles = [comm.barrier(name) for comm in comms]
            for handle in handles:
                await handle
        objects = [comm.all_gather_object(comm.rank, name="things") for comm in comms]
        for handle in objects:
            await handle
    for path in tmp_path.iterdir():
        text = path.read_text("utf-8")
        check(json.loads(text))
        assert "\\u" not in text
        shown = {event["name"] for event in json.loads(text) if event["ph"] == "b"}
        assert {names[0], names[1], names[3], "things", "things (data)", "x" * 500 + "…"} <= shown
        assert "tab\N{REPLACEMENT CHARACTER}new\N{REPLACEMENT CHARACTER}line\N{REPLACEMENT CHARACTER}" in shown


@pytest.mark.asyncio
async def test_dropped_events_are_counted_and_collectives_stay_complete(tmp_path):
    async with world(2) as comms:
        timelines = record(comms, tmp_path)
        timelines[0]._chunk_room = 0
        timelines[1]._room = timelines[1]._chunk_room = 0
        for handle in [comm.all_reduce(1.0, "x") for comm in comms]:
            await handle
        timelines[1]._room = recording.MAX_NOTES
        for handle in [comm.all_reduce(1.0, "y") for comm in comms]:
            await handle
    one, other = (events_of(path) for path in sorted(tmp_path.iterdir()))
    for events in (one, other):
        check(events)
        assert events[-1]["name"] == END
        assert events[-1]["args"]["left_out"] > 0
        assert events[-1]["args"]["open"] == 0
        assert not [event for event in events if event.get("cat") in ("arrived", "sent")]
    assert len(named(one, "x", "e")) == 1
    assert not named(other, "x", "b")
    assert len(named(other, "y", "e")) == 1


@pytest.mark.asyncio
async def test_a_file_that_has_become_too_large_ends_the_timeline_and_not_the_job(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "MAX_FILE_NBYTES", 2000)

    with caplog.at_level(logging.WARNING, "kfcomm"):
        async with world(2) as comms:
            for one in record(comms, tmp_path):
                for i in range(50):
                    one.instant("padding", number=i)
            for handle in [comm.all_reduce(1.0, "x") for comm in comms]:
                assert await handle == 2.0
        merged = merge(read_files([tmp_path]), tmp_path / "merged.json")
        check(events_of(tmp_path / "merged.json"))  # what had begun is unfinished there
        assert all(trace.is_whole for trace in merged.traces)
    assert "the timeline ends here, the job goes on" in caplog.text


@pytest.mark.asyncio
async def test_a_disk_that_is_full_ends_the_timeline_and_not_the_job(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "kfcomm"):
        async with world(2) as comms:
            full = os.open("/dev/full", os.O_WRONLY)
            for one in record(comms, tmp_path):
                os.dup2(full, one._file)
            os.close(full)
            for handle in [comm.all_reduce(1.0, "x") for comm in comms]:
                assert await handle == 2.0
    assert "No space left on device" in caplog.text


@pytest.mark.asyncio
async def test_a_defect_ends_the_timeline_and_not_the_job(tmp_path, caplog):
    async with world(2) as comms:
        timelines = record(comms, tmp_path)
        timelines[0]._notes.append((99,))
        for handle in [comm.all_reduce(1.0, "x") for comm in comms]:
            assert await handle == 2.0
    assert events_of(timelines[0].path)[-1]["name"] == END
    assert "has a defect" in caplog.text


def test_folders_that_cannot_be_written_to_are_refused_at_once(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(kfcomm.ConfigError, match="cannot be written to"):
            check_folder(folder)
        with pytest.raises(kfcomm.ConfigError, match="cannot be written to"):
            kfcomm.init(timeline=str(folder))
    check_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.asyncio
async def test_a_folder_that_goes_away_meanwhile_is_an_error_of_init(tmp_path):
    joining = kfcomm.init(rank=0, size=1, timeline=str(tmp_path / "t"))
    (tmp_path / "t").rmdir()
    with pytest.raises(kfcomm.ConfigError, match="No such file"):
        await joining


def alone(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, in a world of one that records, with this as its program."""
    program = textwrap.dedent(
        f"""
        import asyncio, atexit, os, pathlib, signal, sys
        import kfcomm

        folder = pathlib.Path({str(folder)!r})

        async def written(text):
            while not any(text in path.read_text() for path in folder.iterdir()):
                await asyncio.sleep(0)

        async def main():
            comm = await kfcomm.init(timeline=str(folder))
            await comm.all_reduce(1.0, "x")
        """
    )
    program += textwrap.indent(textwrap.dedent(body), "    ") + "\nasyncio.run(main())\n"
    return subprocess.run([sys.executable, "-W", "error", "-c", program], env=environ(), capture_output=True, text=True)


def test_a_killed_process_leaves_a_trace_that_breaks_off(tmp_path):
    done = alone(tmp_path, "await written('completed')\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    check(json.loads(text + "]"))
    (trace,) = read_files([path])
    assert (trace.is_whole, trace.left_out) == (False, -1)


@pytest.mark.asyncio
async def test_failed_call_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "WRITE_EVERY_S", 3600.0)
    async with world(2) as comms:
        record(comms, tmp_path)
        handle = comms[0].barrier("lost")
        comms.kill(1)
        with pytest.raises(kfcomm.PeerLost):
            await handle
        path = min(tmp_path.iterdir())
        while '"outcome":"failed"' not in path.read_text():  # noqa: ASYNC110  a file tells nobody
            await asyncio.sleep(0)
        assert '"peer lost"' in path.read_text()


def test_a_process_that_ends_without_closing_leaves_a_whole_trace(tmp_path):
    done = alone(tmp_path, "pass")
    assert done.returncode == 0, done.stderr
    (trace,) = read_files([tmp_path])
    assert trace.is_whole
    assert [event["name"] for event in trace.events() if event["ph"] == "e"] == ["x"]


def test_a_forked_child_writes_nothing(tmp_path):
    body = """
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0
            await comm.all_reduce(1.0, "y")
            await comm.close()
        else:
            atexit._run_exitfuncs()  # without closing the loop, whose epoll is the parent's
            os._exit(0)
    """
    done = alone(tmp_path, body)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    events = events_of(path)
    check(events)
    assert [event["name"] for event in events if event["ph"] == "e"] == ["x", "y"]
    assert sum(event["name"] == END for event in events) == 1


@pytest.mark.asyncio
async def test_worlds_one_after_the_other_have_files_of_their_own(tmp_path):
    for _ in range(2):
        async with kfcomm.init(rank=0, size=1, timeline=str(tmp_path)) as comm:
            await comm.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(kfcomm.ConfigError, match="the files are of 2 jobs"):
        read_files([tmp_path])
