"""The checker of what tests leave behind sees what it must, and forgives what has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.leaks import Snapshot, left_since
from tests.support import LeftOnLoop, run


def test_nothing_is_left_by_a_test_that_does_nothing(tmp_path: Path) -> None:
    assert left_since(Snapshot.take(tmp_path), tmp_path) == []


def test_sees_an_open_socket(tmp_path: Path) -> None:
    before = Snapshot.take(tmp_path)
    with socket.socket():
        assert [line.split(":")[0] for line in left_since(before, tmp_path)] == ["descriptor socket"]
    assert left_since(before, tmp_path) == []


def test_sees_a_memory_file_opened_twice(tmp_path: Path) -> None:
    one = os.memfd_create("arena")
    before = Snapshot.take(tmp_path)
    other = os.dup(one)
    assert len(left_since(before, tmp_path)) == 1
    os.close(other)
    assert left_since(before, tmp_path) == []
    os.close(one)


def test_sees_a_process_until_it_was_waited_for(tmp_path: Path) -> None:
    before = Snapshot.take(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = left_since(before, tmp_path)
    assert any(line.startswith(f"process {process.pid}") for line in left)
    process.communicate(b"\n")
    assert left_since(before, tmp_path) == []


def test_waits_for_a_thread_that_is_ending(tmp_path: Path) -> None:
    before = Snapshot.take(tmp_path)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait)
    thread.start()
    gate.set()
    assert left_since(before, tmp_path) == []


def test_sees_a_thread_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.leaks.PATIENCE_S", 0.0)
    before = Snapshot.take(tmp_path)
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="stuck")
    thread.start()
    assert left_since(before, tmp_path) == ["thread 'stuck' (daemon: False)"]
    gate.set()
    thread.join()


def test_sees_a_temporary_file(tmp_path: Path) -> None:
    before = Snapshot.take(tmp_path)
    (tmp_path / "kfcomm.sock").touch()
    assert left_since(before, tmp_path) == ["temporary file kfcomm.sock"]


@pytest.mark.parametrize("plain", [False, True])
def test_run_returns_the_result(plain: bool) -> None:
    async def answer() -> int:
        return 42

    assert run(answer(), plain=plain) == 42


def test_run_refuses_a_task_left_pending() -> None:
    async def forget() -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.Event().wait(), name="forgotten")

    with pytest.raises(LeftOnLoop, match="forgotten"):
        run(forget())


def test_run_lets_a_task_finish_that_is_about_to() -> None:
    async def finishing() -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.sleep(0))

    assert run(finishing()).done()


def test_run_refuses_an_error_in_a_callback() -> None:
    def fail() -> None:
        raise ValueError("unheard")

    async def call() -> None:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)

    with pytest.raises(LeftOnLoop, match="unheard"):
        run(call())


def test_run_refuses_an_error_of_a_forgotten_task() -> None:
    async def fail() -> None:
        raise ValueError("unheard")

    async def forget() -> None:
        task = asyncio.create_task(fail())
        del task
        await asyncio.sleep(0)

    with pytest.raises(LeftOnLoop, match="unheard"):
        run(forget())


def test_the_error_of_the_coroutine_itself_comes_first() -> None:
    async def fail() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        raise KeyError(task.get_name())

    with pytest.raises(KeyError):
        run(fail())
