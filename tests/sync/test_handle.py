"""Handles of blocking communicators: who completes them, and what they say in the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import kfcomm
from kfcomm.sync import thread, turns
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.handle import Handle
from kfcomm.testing import sync_world
from kfcomm.transports.reactor import Reactor
from tests.sync.worlds import Call, at_rest, driver_of, joined, leading, until


@pytest.fixture(autouse=True)
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turns, thread):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 1e6)


@pytest.mark.parametrize("wait", [Handle.wait, Handle.result, Handle.exception])
def test_a_handle_whose_wait_was_interrupted_was_cancelled(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = Reactor.wait

    def interrupted(reactor: Reactor, timeout_s: float) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        rest(reactor, timeout_s)

    with sync_world(2) as (one, other):
        begun = one.all_reduce_async(1, "a")
        with monkeypatch.context() as patch:
            patch.setattr(Reactor, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                wait(begun)
        concurrent.futures.wait([begun])
        assert begun.cancelled()  # not: closed
        with pytest.raises(concurrent.futures.CancelledError):
            begun.wait()
        with pytest.raises(kfcomm.CollectiveAborted, match="cancelled on rank 0"):
            other.all_reduce(1, "a")
        assert at_rest(one)


def test_a_callback_that_knows_its_handle_leaves_no_cycle() -> None:
    with sync_world(2) as (one, other), no_collection():
        begun = one.all_reduce_async(1, "a")
        known = [begun]
        begun.add_done_callback(lambda _, known=known: len(known))
        other.all_reduce(1, "a")
        begun.wait()
        gone = weakref.ref(begun)
        del begun, known
        until(lambda: gone() is None)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_completion_notifies_every_waiter(transport: str) -> None:
    """The I/O thread, the one who waits for it, or a caller who waits for something else."""
    with joined(transport) as (one, other):
        for completes in ("the I/O thread", "a wait", "another call"):
            told: list[Any] = []
            seen = threading.Event()
            begun = one.all_reduce_async(1, "a")
            begun.add_done_callback(lambda done, told=told, seen=seen: (told.append(done), seen.set()))
            callers = []
            if completes == "a wait":
                callers = [Call(begun.wait), Call(begun.exception)]
                until(lambda: driver_of(one).turns.is_resting)
            elif completes == "another call":
                callers = [leading(one, "lead")]
            assert int(other.all_reduce(1, "a")) == 2
            seen.wait()
            assert told == [begun]
            if completes == "another call":
                other.all_reduce(1, "lead")
            for caller in callers:
                caller.result()
            assert int(begun.result()) == 2
            late = threading.Event()
            begun.add_done_callback(lambda _, late=late: late.set())
            late.wait()


def test_second_or_late_cancel_changes_nothing() -> None:
    with joined("shm") as (one, other):
        begun = one.all_reduce_async(1, "a")
        cancels = [Call(begun.cancel) for _ in range(4)]
        assert sum(call.result() for call in cancels) == 1
        assert begun.cancelled()
        with pytest.raises(kfcomm.CollectiveAborted):
            other.all_reduce(1, "a")
        begun = one.all_reduce_async(1, "b")
        other.all_reduce(1, "b")
        assert int(begun.wait()) == 2
        assert not begun.cancel()
        assert not begun.cancelled()


def test_a_callback_may_cancel_another_collective() -> None:
    def cancels(_: Any) -> None:
        ended.set_result(second.cancel())

    ended: concurrent.futures.Future[bool] = concurrent.futures.Future()
    with joined("shm") as (one, other):
        first, second = one.all_reduce_async(1, "a"), one.all_reduce_async(1, "b")
        first.add_done_callback(cancels)
        other.all_reduce(1, "a")
        assert ended.result()
        assert second.cancelled()


def test_handles_without_waiters_end_with_the_communicator() -> None:
    with joined("shm") as (one, _):
        begun = [one.all_reduce_async(1, f"{number}") for number in range(5)]
        one.close()
        assert {type(each.exception()) for each in begun} == {kfcomm.CollectiveAborted}
        assert isinstance(one, Communicator)


def waited_for(comm: Communicator, call: Any) -> None:
    driver_of(comm).io.wait_for(call)


def begun_and_waited_for(comm: Communicator, call: Any) -> None:
    begun: Handle[None] = Handle(driver_of(comm), comm._session)
    begun.start(call)
    begun.wait()


def begun_and_cancelled(comm: Communicator, call: Any) -> None:
    begun: Handle[None] = Handle(driver_of(comm), comm._session)
    begun.start(partial(call, asyncio.Event().wait))
    assert begun.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        begun.wait()


@pytest.mark.parametrize("made", [waited_for, begun_and_waited_for, begun_and_cancelled])
def test_the_last_reference_to_a_task_is_never_of_the_program(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end calls back asyncio's weak set of all tasks: Python swallows a Ctrl-C that comes in there."""
    gone: list[threading.Thread] = []
    tasks = []

    async def call(until: Any = None) -> None:
        task = asyncio.current_task()
        tasks.append(weakref.ref(task, lambda _: gone.append(threading.current_thread())))  # type: ignore[arg-type]
        del task
        await (until() if until else asyncio.sleep(0))

    with sync_world(1) as (comm,):
        io = driver_of(comm).io

        def turned() -> bool:
            """The I/O thread has forgotten by now what it ran before."""
            has_turned = threading.Event()
            io.loop.call_soon_threadsafe(lambda: io.loop.call_soon(has_turned.set))
            return has_turned.wait() and False

        with monkeypatch.context() as patch:
            patch.setattr(io.signals, "is_here", turned)
            made(comm, call)
            turned()
        assert gone == [io._thread]
