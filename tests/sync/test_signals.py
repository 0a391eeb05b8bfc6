"""Signal handlers that raise, in blocking calls: they end the call in which they run, and nothing else.

Python runs them on the main thread, on which the tests run, too.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from threading import main_thread
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.monitor.dumps import install_signal
from kfcomm.sync import Communicator
from kfcomm.sync.signals import Signals
from kfcomm.testing import sync_world
from tests.sync.worlds import TRANSPORTS, Call, driver_of, joined, leading, until

X = np.arange(3.0)
PACKAGE = Path(kfcomm.__file__).parent
NUMBER = signal.SIGUSR2


class Alarm(Exception):
    """Of the program."""


RAISED = [
    Alarm("now"), TimeoutError("now"), ConnectionResetError(104, "now"), BlockingIOError(11, "now"),
    kfcomm.CollectiveAborted("now"), kfcomm.SessionClosed("now"), asyncio.CancelledError("now"),
    CancelledError("now"), KeyboardInterrupt("now"),
]  # fmt: skip


@pytest.fixture
def error(request: pytest.FixtureRequest) -> BaseException:
    """A new one, whose traceback is that of one test."""
    return type(request.param)(*request.param.args)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = signal.signal(NUMBER, handler)
    try:
        yield
    finally:
        signal.signal(NUMBER, before)


@contextmanager
def raising(error: BaseException) -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise error

    with handled(handler):
        yield
        assert signal.getsignal(NUMBER) is handler


def send_signal() -> None:
    signal.pthread_kill(main_thread().ident or 0, NUMBER)


def signalled_when(condition: Callable[[], Any]) -> Call:
    """The signal comes once this holds."""

    def wait() -> None:
        until(condition)
        send_signal()

    return Call(wait)


def sleeps(comm: Communicator) -> bool:
    """The main thread does, in a call."""
    signals = driver_of(comm).signals
    return signals._is_held and signals._wake.__name__ != "_nothing"


WAITS: dict[str, Callable[[Communicator], Any]] = {
    "barrier": lambda comm: comm.barrier("b"),
    "all_reduce": lambda comm: comm.all_reduce(X, "a"),
    "recv": lambda comm: comm.recv(1),
    "recv_object": lambda comm: comm.recv_object(1),
    "get": lambda comm: comm.queue("q", 1, 0).get(),
    "wait": lambda comm: comm.all_reduce_async(X, "a").wait(),
    "wait of a task": lambda comm: comm.queue("q", 1, 0).get_async().wait(),
    "persistent": lambda comm: comm.all_reduce_init(X, "a").start().wait(),
    "persistent run": lambda comm: comm.all_reduce_init(X, "a").run(),
    "set_strategy": lambda comm: comm.set_strategy("ring"),
    "group": lambda comm: comm.group([0, 1]),
}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__, indirect=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handler_ends_the_call_that_waits(transport: str, error: BaseException) -> None:
    with joined(transport) as (one, other), raising(error):
        sending = signalled_when(lambda: sleeps(one))
        with pytest.raises(type(error)) as raised:
            one.recv(1)
        sending.result()
        assert raised.value is error
        other.send(X, 0)
        assert one.recv(1).tolist() == X.tolist()


@pytest.mark.parametrize("wait", WAITS)
def test_a_handler_ends_every_kind_of_wait(wait: str) -> None:
    with joined("shm") as (one, other), raising(error := TimeoutError("now")):
        sending = signalled_when(lambda: sleeps(one))
        with pytest.raises(TimeoutError) as raised:
            WAITS[wait](one)
        sending.result()
        assert raised.value is error
        barrier = Call(other.barrier, "after")
        one.barrier("after")
        barrier.result()


def test_a_handler_ends_the_wait_of_one_who_follows() -> None:
    with joined("shm") as (one, other), raising(error := Alarm()):
        lead = leading(one, "lead")
        sending = signalled_when(lambda: sleeps(one))
        with pytest.raises(Alarm) as raised:
            one.recv(1)
        sending.result()
        assert raised.value is error
        assert int(other.all_reduce(1, "lead")) == 2
        assert int(lead.result()) == 2


class Signalling:
    """An array, whose reading takes so long that a signal comes meanwhile."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        send_signal()
        return X


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__, indirect=True)
def test_a_handler_ends_a_call_that_need_not_wait(error: BaseException) -> None:
    with sync_world(1) as (comm,), raising(error):
        for name in ("first", "again", "again"):
            with pytest.raises(type(error)) as raised:
                comm.all_reduce(Signalling(), name)
            assert raised.value is error
        comm.barrier()


def test_a_call_that_cannot_be_undone_returns_first() -> None:
    class Ranks(list[int]):
        def __iter__(self) -> Iterator[int]:
            send_signal()
            return super().__iter__()

    with sync_world(1) as (comm,), raising(Alarm()):
        made: list[Communicator] = []

        def make() -> None:
            group = comm.group(Ranks([0]))
            made.append(group)

        with pytest.raises(Alarm):
            make()
        made.pop().barrier()


def test_a_handler_that_raises_nothing_runs_where_the_call_waits() -> None:
    seen: list[Any] = []
    with joined("shm") as (one, other), handled(lambda number, _: seen.append(signal.getsignal(number))):
        sending = signalled_when(lambda: sleeps(one))
        answer = Call(lambda: (until(lambda: seen), other.all_reduce(1, "a")))
        assert int(one.all_reduce(1, "a")) == 2
        sending.result()
        answer.result()
        assert seen == [signal.getsignal(NUMBER)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handler_may_make_calls_of_its_own(transport: str) -> None:
    results: list[Any] = []
    with joined(transport) as (one, other):

        def handler(*_: Any) -> None:
            results.append(int(one.all_reduce(1, "inner")))
            one.group([0], "alone").close()

        with handled(handler):
            sending = signalled_when(lambda: sleeps(one))
            answer = Call(lambda: (other.all_reduce(2, "inner"), other.all_reduce(4, "outer")))
            results.append(int(one.all_reduce(3, "outer")))
            sending.result()
            answer.result()
    assert results == [3, 7]


def test_a_handler_may_close_the_communicator() -> None:
    with joined("shm") as (one, _), handled(lambda *_: one.close()):
        sending = signalled_when(lambda: sleeps(one))
        with pytest.raises(kfcomm.KfcommError, match="closed"):
            one.recv(1)
        sending.result()


def test_a_handler_ends_the_wait_for_other_ranks_of_init() -> None:
    with raising(error := Alarm()):

        def waits() -> bool:
            return signal.getsignal(NUMBER) is not handler

        handler = signal.getsignal(NUMBER)
        sending = signalled_when(waits)
        with pytest.raises(Alarm) as raised:
            kfcomm.sync.init(rank=1, size=2, store="http://127.0.0.1:1", token="0123456789abcdef" * 4, timeout=1e6)
        sending.result()
        assert raised.value is error


def test_errors_end_at_the_callers_line_while_handlers_are_held() -> None:
    with sync_world(1) as (comm,), raising(Alarm()):
        for call in (lambda: comm.all_reduce(X, op="noop"), lambda: comm.group([9]), lambda: comm.recv(9)):
            with pytest.raises(kfcomm.ConfigError) as failed:
                call()
            own = [one for one in traceback.extract_tb(failed.tb) if Path(one.filename).is_relative_to(PACKAGE)]
            assert len(own) == 1


def test_no_handlers_are_held_if_none_raises() -> None:
    signals = Signals()
    assert not signals.hold()
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        install_signal()
        assert not signals.hold()
    finally:
        signal.signal(signal.SIGUSR1, before)
    with raising(Alarm()):
        assert Call(signals.hold).result() is False  # another thread, on which no handler runs
        assert signals.hold()
        signals.let_go()
