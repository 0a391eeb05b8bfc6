"""The checker of what tests leave behind sees what it must, and forgives what has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.leaks import Snapshot, left_since
from tests.support import LeftOnLoop, Watch, on_every_loop


def test_empty_test_leaves_nothing(tmp_path: Path) -> None:
    assert left_since(Snapshot.take(tmp_path), tmp_path) == []


def test_sees_an_open_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.leaks.CLOSING_S", 0.0)
    before = Snapshot.take(tmp_path)
    with socket.socket():
        assert [line.split(":")[0] for line in left_since(before, tmp_path)] == ["descriptor socket"]
    assert left_since(before, tmp_path) == []


def test_waits_for_a_socket_that_a_lasting_thread_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closing, ending = threading.Event(), threading.Event()
    opened: list[socket.socket] = []

    def last() -> None:
        closing.wait()
        opened.pop().close()
        ending.wait()

    def sleep(_: float) -> None:  # it is closed only once somebody waits for it
        closing.set()

    thread = threading.Thread(target=last)
    thread.start()
    before = Snapshot.take(tmp_path)
    opened.append(socket.socket())
    monkeypatch.setattr("tests.leaks.time.sleep", sleep)
    assert left_since(before, tmp_path) == []
    monkeypatch.undo()
    ending.set()
    thread.join()


def test_sees_a_memory_file_opened_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.leaks.CLOSING_S", 0.0)
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


@on_every_loop
async def test_a_task_left_pending_is_found() -> None:
    watch = Watch()
    task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
    with pytest.raises(LeftOnLoop, match="forgotten"):
        await watch.settle()
    task.cancel()


@on_every_loop
async def test_earlier_pending_tasks_are_not_blamed_on_the_test() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    await Watch().settle()
    task.cancel()


@on_every_loop
async def test_a_task_that_is_about_to_end_may_do_so() -> None:
    watch = Watch()
    task = asyncio.create_task(asyncio.sleep(0))
    await watch.settle()
    assert task.done()


@on_every_loop
async def test_an_error_in_a_callback_is_found_and_told_once() -> None:
    def fail() -> None:
        raise ValueError("unheard")

    watch = Watch()
    asyncio.get_running_loop().call_soon(fail)
    await asyncio.sleep(0)
    with pytest.raises(LeftOnLoop, match="unheard"):
        await watch.settle()
    await watch.settle()


@on_every_loop
async def test_an_error_of_a_forgotten_task_is_found() -> None:
    async def fail() -> None:
        raise ValueError("unheard")

    watch = Watch()
    task = asyncio.create_task(fail())
    del task
    await asyncio.sleep(0)
    with pytest.raises(LeftOnLoop, match="unheard"):
        await watch.settle()


@pytest.mark.asyncio
async def test_the_error_of_the_test_itself_comes_first() -> None:
    async def fail() -> None:
        tasks.append(asyncio.create_task(asyncio.Event().wait()))
        raise KeyError("first")

    tasks: list[asyncio.Task[Any]] = []
    with pytest.raises(KeyError):
        await Watch().around(fail)()
    tasks[0].cancel()


@on_every_loop
async def test_a_test_runs_on_the_loop_that_it_names(request: pytest.FixtureRequest) -> None:
    loop = asyncio.get_running_loop()
    name = request.node.callspec.id
    assert loop.get_debug() == (name == "debug")
    assert isinstance(loop, asyncio.SelectorEventLoop) == (name != "uvloop")


def test_leak_of_a_coroutine_test_fails_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        """
        import asyncio
        import pytest
        from hypothesis import given, strategies as st

        def forget() -> None:
            asyncio.get_running_loop().keep = asyncio.create_task(asyncio.Event().wait(), name="forgotten")

        @pytest.mark.asyncio
        async def test_tidy() -> None:
            await asyncio.sleep(0)

        @pytest.mark.asyncio
        async def test_untidy() -> None:
            forget()

        @pytest.mark.asyncio
        async def test_loud() -> None:
            asyncio.get_running_loop().call_soon(lambda: 1 // 0)

        @pytest.mark.asyncio
        @given(st.integers(0, 100))
        async def test_searched(number: int) -> None:
            if number > 7:
                forget()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=3, failed=1, errors=2)
    result.stdout.fnmatch_lines_random(["*forgotten*", "*ZeroDivisionError*", "*number=8,*"])
