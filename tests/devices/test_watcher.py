"""A watcher keeps its promises: all of them, once, in order, on a thread of its own."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from kfcomm.arrays.devices.cuda import Watcher
from kfcomm.errors import TransportError


def refuse() -> None:
    raise TransportError("broken")


def test_promises_are_kept_in_order() -> None:
    watcher = Watcher("watches")
    said: list[tuple[int, BaseException | None]] = []
    for number in range(100):
        watcher.promise(lambda: None, lambda error, number=number: said.append((number, error)))
    watcher.close()
    assert said == [(number, None) for number in range(100)]


def test_one_that_has_to_wait_holds_up_those_behind_it() -> None:
    watcher = Watcher("watches")
    gate, said = threading.Event(), []
    watcher.promise(gate.wait, lambda _: said.append("first"))
    watcher.promise(lambda: None, lambda _: said.append("second"))
    assert not said
    gate.set()
    watcher.close()
    assert said == ["first", "second"]


def test_failed_wait_is_reported_and_the_thread_continues() -> None:
    watcher = Watcher("watches")
    said: list[BaseException | None] = []
    watcher.promise(refuse, said.append)
    watcher.promise(lambda: None, said.append)
    watcher.promise(lambda: {}["nothing"], said.append)
    watcher.promise(lambda: None, said.append)
    watcher.close()
    assert [type(error) for error in said] == [TransportError, type(None), KeyError, type(None)]


def test_the_thread_begins_with_the_first_promise_and_ends_with_close() -> None:
    watcher = Watcher("watches for a test")
    assert "watches for a test" not in [thread.name for thread in threading.enumerate()]
    told: list[str] = []
    watcher.promise(lambda: None, lambda _: told.append(threading.current_thread().name))
    watcher.close()
    assert told == ["watches for a test"]
    assert "watches for a test" not in [thread.name for thread in threading.enumerate()]


def test_close_is_idempotent_and_allowed_in_a_callback() -> None:
    watcher = Watcher("watches")
    closed = threading.Event()

    def close(_: BaseException | None) -> None:
        watcher.close()
        closed.set()

    watcher.promise(lambda: None, close)
    closed.wait()
    watcher.close()
    Watcher("never used").close()


def test_closed_watcher_refuses_requests() -> None:
    watcher = Watcher("watches")
    watcher.close()
    with pytest.raises(TransportError, match="closed"):
        watcher.promise(lambda: None, lambda _: None)


def test_finished_callbacks_are_released() -> None:
    class Held:
        pass

    watcher, held = Watcher("watches"), Held()
    gone, told = weakref.ref(held), threading.Event()
    watcher.promise(lambda held=held: None, lambda _: None)
    del held
    waiting = threading.Event()
    watcher.promise(waiting.wait, lambda _: told.set())  # it has let go of the first when it waits for this one
    while gone() is not None:
        gc.collect()
    waiting.set()
    told.wait()
    watcher.close()
