"""Dumps of a process: complete, harmless, and at any moment."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.engine.meter import steady
from kfcomm.monitor import dumps
from kfcomm.monitor.doctor import checked
from kfcomm.monitor.dumps import Record, install_signal
from kfcomm.sync import Communicator
from kfcomm.testing import sync_world, world


def settled(comms: Any) -> None:
    """Returns when the posts so far have been carried out as far as possible."""
    for comm in comms:
        comm.save("settled", 0)


def the(records: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    (found,) = [one for one in records if all(one[field] == value for field, value in fields.items())]
    return found


def test_a_dump_says_what_waits_and_what_was_done(tmp_path: Path) -> None:
    with sync_world(3) as comms:
        done = [comm.all_reduce_async(1, "warm") for comm in comms]
        assert [int(one.wait()) for one in done] == [3, 3, 3]
        comms[0].all_reduce_async(np.ones(3), "grad/1")
        comms[0].recv_async(2, "later")
        comms[0].recv_async()
        settled(comms)
        said = comms[0].dump(tmp_path / "dump.json")
    assert json.loads((tmp_path / "dump.json").read_text()) == [json.loads(json.dumps(said))]
    checked(said, Record)
    assert set(said) == Record.__required_keys__ | Record.__optional_keys__
    assert (said["rank"], said["size"], said["pid"], said["lost"]) == (0, 3, os.getpid(), {})
    (group,) = said["groups"]
    assert said["groups"][group] == {"name": "world", "members": [0, 1, 2]}
    waiting = the(said["waiting"], name="grad/1")
    assert (waiting["group"], waiting["seq"], waiting["verb"]) == (group, 0, "all_reduce")
    assert set(waiting["arrived"]) | set(waiting["not_heard_from"]) == {0, 1, 2}
    assert {(one["tag"], one["source"]) for one in said["receiving"]} == {("tag 'later'", 2), ("tag 0", None)}
    assert said["uses"][group] == {"warm": 1, "grad/1": 1}
    assert [(one["event"], one["name"]) for one in said["events"]] == [
        ("posted", "warm"), ("completed", "warm"), ("posted", "grad/1"),
    ]  # fmt: skip


def test_groups_losses_and_links_are_named() -> None:
    with sync_world(3) as comms:
        made = [threading.Thread(target=comm.group, args=([2, 0], "ends")) for comm in (comms[0], comms[2])]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join()
        comms[0].all_reduce_async(1, "a")
        comms.kill(1)
        waits = comms[0].all_reduce_async(1, "b")
        assert isinstance(waits.exception(), kfcomm.PeerLost)
        said = comms[0].dump()
    assert the(list(said["groups"].values()), name="ends")["members"] == [2, 0]
    assert list(said["lost"]) == ["1"]
    assert said["links"]


def where_the_user_is(comm: Communicator) -> dict[str, Any]:
    return comm.dump()


def test_a_dump_says_where_threads_are() -> None:
    waiting = threading.Event()

    def wait_on_a_thread() -> None:
        waiting.wait()

    thread = threading.Thread(target=wait_on_a_thread, name="loader")
    thread.start()
    with kfcomm.sync.init() as comm:
        said = where_the_user_is(comm)
    waiting.set()
    thread.join()
    assert "in where_the_user_is" in the(said["threads"], name="MainThread")["at"]
    loader = the(said["threads"], name="loader")
    assert "wait_on_a_thread" in loader["at"]
    assert loader["stack"].index(loader["at"]) > 0
    assert the(said["threads"], name="kfcomm-io")["at"] == ""


@pytest.mark.asyncio
async def test_a_dump_says_where_tasks_are() -> None:
    async def inner(gate: asyncio.Event) -> None:
        await gate.wait()

    async def outer(gate: asyncio.Event) -> None:
        await inner(gate)

    async def main() -> dict[str, Any]:
        gate = asyncio.Event()
        async with kfcomm.init() as comm, asyncio.TaskGroup() as tasks:
            tasks.create_task(outer(gate), name="step")
            await asyncio.sleep(0)
            said = comm.dump()
            gate.set()
        return said

    step = the((await main())["tasks"], name="step")
    assert "inner" in step["at"]
    assert [word.rsplit(".", 1)[-1] for word in step["stack"]] == ["outer", "inner", "wait"]


@pytest.mark.asyncio
async def test_a_loop_without_a_turn_is_noticed() -> None:
    async def main() -> list[Any]:
        async with world(2) as comms:
            session = comms[0]._session
            fresh = comms[0].dump()["loop_blocked_s"]
            session.lag._seen_s -= 66
            late = comms[0].dump()
            return [fresh, late["loop_blocked_s"], late["activity"]]

    fresh, late, activity = await main()
    assert fresh < 60 <= late
    assert "event loop has been blocked for 6" in activity


def test_only_the_newest_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumps, "MAX_USES", 2)
    with kfcomm.sync.init() as comm:
        for name in ("a", "b", "c"):
            comm.all_reduce(1, name)
        (uses,) = comm.dump()["uses"].values()
    assert uses == {"b": 1, "c": 1}


def test_all_worlds_of_a_process_are_dumped(tmp_path: Path) -> None:
    with sync_world(2) as comms:
        assert [one["rank"] for one in kfcomm.dump(tmp_path / "all.json")] == [0, 1]
        assert len(json.loads((tmp_path / "all.json").read_text())) == 2
        comms[0]._io.wait_for(comms[0]._inner.close)
        assert [one["rank"] for one in kfcomm.dump()] == [1]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dump.json"
    with kfcomm.sync.init() as comm:
        comm.dump(path)
        before = path.read_text()

        def fails(self: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails)
            with pytest.raises(OSError, match="No space"):
                comm.dump(path)
        assert path.read_text() == before
        assert os.listdir(tmp_path) == ["dump.json"]
        comm.dump(path)
        assert json.loads(path.read_text())[0]["time_s"] > json.loads(before)[0]["time_s"]


# ---------------------------------------------------------------- while the engine works


def test_dumps_may_be_made_while_the_engine_works() -> None:
    """On another thread than the engine's, and without an end to it before the engine is done."""
    num_dumps = 0
    with sync_world(2) as comms:
        handles = [comm.all_reduce_async(n, f"{n % 7}/{n}") for n in range(1500) for comm in comms]
        while not handles[-1].done() or not num_dumps:
            said = kfcomm.dump()
            num_dumps += 1
            assert {one["rank"] for one in said} == {0, 1}
        assert [int(one.wait()) for one in handles[::2]] == [2 * n for n in range(1500)]


def test_a_copy_that_was_disturbed_is_made_again() -> None:
    tries = iter([RuntimeError("dictionary changed size during iteration")] * 3)

    def copy() -> str:
        for error in tries:
            raise error
        return "copied"

    assert steady(copy) == "copied"
    with pytest.raises(RuntimeError, match="for good"):
        steady(lambda: (_ for _ in ()).throw(RuntimeError("for good")))


# ---------------------------------------------------------------- on a signal


@pytest.fixture
def own_signal() -> Iterator[None]:
    """SIGUSR1 as a fresh process has it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.usefixtures("own_signal")
def test_a_signal_is_answered_into_the_folder_of_the_setting(tmp_path: Path) -> None:
    with kfcomm.sync.init(dump_dir=str(tmp_path)) as comm:
        ask()
        (path,) = tmp_path.iterdir()
        assert path.name == f"kfcomm-rank0-pid{os.getpid()}.json"
        assert json.loads(path.read_text())[0]["rank"] == comm.rank
        path.unlink()
    ask()  # nothing is open, so there is nothing to write, and the process lives on
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("own_signal")
def test_the_latest_folder_counts(tmp_path: Path) -> None:
    with (
        kfcomm.sync.init(dump_dir=str(tmp_path / "unused")),
        kfcomm.sync.init(dump_dir=str(tmp_path)),
    ):
        ask()
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.asyncio
@pytest.mark.usefixtures("own_signal")
async def test_a_process_that_computes_answers_too(tmp_path: Path) -> None:
    def found() -> list[Path]:
        return list(tmp_path.glob("kfcomm-*.json"))

    async def computes() -> None:
        ask()
        while not found():
            pass  # the loop has no turn meanwhile

    async with kfcomm.init(dump_dir=str(tmp_path)):
        await asyncio.create_task(computes(), name="step")
    (said,) = json.loads(found()[0].read_text())
    assert "computes" in the(said["tasks"], name="step")["at"]


@pytest.mark.usefixtures("own_signal")
def test_a_program_with_a_handler_of_its_own_keeps_it(tmp_path: Path) -> None:
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    with kfcomm.sync.init(dump_dir=str(tmp_path)):
        ask()
    assert (heard, list(tmp_path.iterdir())) == (["mine"], [])


@pytest.mark.usefixtures("own_signal")
def test_a_dump_that_cannot_be_written_does_not_disturb_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kfcomm.sync.init(dump_dir=str(tmp_path / "nowhere")) as comm, caplog.at_level(logging.WARNING, "kfcomm"):
        ask()
        assert int(comm.all_reduce(1)) == 1
    assert f"rank 0 could not write {tmp_path}/nowhere/kfcomm-rank0-" in caplog.text


@pytest.mark.usefixtures("own_signal")
def test_only_the_main_thread_sets_the_handler() -> None:
    thread = threading.Thread(target=install_signal)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
