"""The reactor by itself: what runs when, on whose thread, and what an error in it does."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.transports.reactor import Reactor

FOREVER_S = 1e6


@contextlib.contextmanager
def opened() -> Iterator[Reactor]:
    reactor = Reactor()
    reactor.failed = _unexpected
    try:
        yield reactor
    finally:
        reactor.close()


def _unexpected(error: BaseException) -> None:
    raise AssertionError from error


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    with opened() as made:
        yield made


@pytest.fixture
def socks() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    with one, other:
        yield one, other


def counted(reactor: Reactor) -> list[int]:
    """Grows with every ``woken``."""
    wakes: list[int] = []
    reactor.woken = lambda: wakes.append(len(wakes))
    return wakes


class Fake:
    """A poller that moves so many times, and refuses so many times to be parked."""

    def __init__(self, moves: int = 0, refusals: int = 0) -> None:
        self.moves, self.refusals = moves, refusals
        self.looks = 0
        self.is_awake = True
        self.is_needed = False

    def progress(self) -> bool:
        self.looks += 1
        self.moves -= 1
        return self.moves >= 0

    def park(self) -> bool:
        self.refusals -= 1
        self.is_awake = False
        return self.refusals < 0

    def unpark(self) -> None:
        self.is_awake = True


# ---------------------------------------------------------------- deferred calls


def test_calls_come_in_their_order_and_never_inside_the_call_that_asks_for_them(reactor: Reactor) -> None:
    seen: list[Any] = []

    def first() -> None:
        reactor.call_soon(seen.append, "third")
        seen.append("first")

    reactor.call_soon(first)
    reactor.call_soon(seen.append, "second")
    assert not seen
    assert reactor.deferred
    assert reactor.progress()
    assert seen == ["first", "second", "third"]
    assert not reactor.deferred
    assert not reactor.progress()


def test_a_call_that_asks_for_itself_again_leaves_others_their_turn(reactor: Reactor) -> None:
    times = 0

    def again() -> None:
        nonlocal times
        times += 1
        reactor.call_soon(again)

    reactor.call_soon(again)
    assert reactor.progress()
    assert times == 2
    assert reactor.deferred
    assert reactor.glance()
    assert times == 3


def test_driver_is_woken_once(reactor: Reactor) -> None:
    wakes = counted(reactor)
    for _ in range(3):
        reactor.call_soon(lambda: reactor.call_soon(int))
    assert len(wakes) == 1
    reactor.is_driven = True
    reactor.progress()  # what is asked for in there is done in there, or deferred tells of it
    reactor.call_soon(int)
    reactor.wake()
    assert len(wakes) == 1
    reactor.is_driven = False
    reactor.progress()
    reactor.call_soon(int)
    assert len(wakes) == 2


# ---------------------------------------------------------------- from other threads


def waiting(reactor: Reactor) -> threading.Thread:
    """A thread that drives until it is ended."""

    def drive() -> None:
        while not done:
            reactor.wait(FOREVER_S)
            reactor.progress()

    done: list[bool] = []
    thread = threading.Thread(target=drive)
    thread.start()
    reactor.__dict__["end"] = lambda: done.append(True)
    return thread


def test_a_call_from_another_thread_ends_a_wait(reactor: Reactor) -> None:
    where: list[int] = []
    thread = waiting(reactor)
    ident = thread.ident
    reactor.call_soon_threadsafe(lambda: where.append(threading.get_ident()))
    reactor.call_soon_threadsafe(reactor.__dict__["end"])
    thread.join()
    assert where == [ident]


def test_ringing_ends_a_wait_and_calls_nothing(reactor: Reactor) -> None:
    for _ in range(3):
        reactor.ring()
        reactor.ring()
        reactor.wait(FOREVER_S)
        assert not reactor.deferred
        reactor.progress()
        reactor.wait(0)


def test_no_call_of_many_threads_is_slept_over(reactor: Reactor) -> None:
    """Each waits for its own call before the next, so that one wake-up that is lost stops everything."""

    def call(number: int) -> None:
        for _ in range(300):
            mine = threading.Event()
            reactor.call_soon_threadsafe(mine.set)
            mine.wait()
        seen.append(number)

    seen: list[int] = []
    driver = waiting(reactor)
    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    reactor.call_soon_threadsafe(reactor.__dict__["end"])
    driver.join()
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_bell_that_is_rung_while_it_is_answered_is_heard(reactor: Reactor, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the worst moment: after the reactor has forgotten that it was rung, before it takes the ring away."""
    read = os.eventfd_read

    def slowly(descriptor: int) -> int:
        ringer = threading.Thread(target=reactor.ring)
        ringer.start()
        ringer.join(0.01)  # it waits for its turn, which comes after this
        got = read(descriptor)
        ringers.append(ringer)
        return got

    ringers: list[threading.Thread] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", slowly)
        reactor.ring()
        reactor.progress()
    for ringer in ringers:
        ringer.join()
    reactor.wait(FOREVER_S)
    reactor.progress()
    reactor.ring()
    reactor.wait(FOREVER_S)


def test_a_closed_reactor_says_so_to_other_threads() -> None:
    reactor = Reactor()
    reactor.call_soon(_unexpected, ValueError())
    reactor.close()
    reactor.close()
    with pytest.raises(RuntimeError, match="closed"):
        reactor.call_soon_threadsafe(int)
    reactor.ring()
    assert not reactor.deferred
    assert reactor.descriptors() == ()
    assert reactor.own_descriptors() == []
    assert reactor.next_deadline_s == float("inf")


def test_a_callback_may_close_it() -> None:
    reactor = Reactor()
    reactor.failed = _unexpected
    reactor.ring()
    reactor.call_soon(reactor.close)
    reactor.call_soon(_unexpected, ValueError())
    reactor.call_at(0.0, _unexpected, ValueError())
    reactor.progress()
    assert not reactor.progress()


# ---------------------------------------------------------------- timers


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20), st.lists(st.integers(0, 7), max_size=5))
def test_timers_run_in_the_order_of_their_times_once_they_are_due(
    timers: list[tuple[int, bool]], looks: list[int]
) -> None:
    with opened() as reactor:
        now = 0
        reactor.time = lambda: float(now)  # type: ignore[method-assign]
        seen: list[tuple[int, int]] = []
        for index, (when, is_cancelled) in enumerate(timers):
            timer = reactor.call_at(when, seen.append, (when, index))
            if is_cancelled:
                timer.cancel()
        wanted = sorted((when, index) for index, (when, is_cancelled) in enumerate(timers) if not is_cancelled)
        for now in sorted(looks):
            due = [one for one in wanted if one[0] <= now]
            is_due = len(due) > len(seen)
            assert reactor.progress() is is_due
            assert seen == due
            left = wanted[len(due) :]
            assert reactor.next_deadline_s == (left[0][0] if left else float("inf"))


def test_a_timer_may_cancel_and_begin_others(reactor: Reactor) -> None:
    seen: list[str] = []
    now = reactor.time()

    def first() -> None:
        second.cancel()
        reactor.call_at(now, seen.append, "third")

    reactor.call_at(now - 2, first)
    second = reactor.call_at(now - 1, seen.append, "second")
    assert reactor.progress()
    assert seen == ["third"]


def test_only_a_timer_that_is_the_next_tells_the_driver(reactor: Reactor) -> None:
    wakes = counted(reactor)
    reactor.call_later(FOREVER_S, int)
    reactor.call_later(2 * FOREVER_S, int)
    assert len(wakes) == 1
    reactor.call_later(1.0, int)
    assert len(wakes) == 2


# ---------------------------------------------------------------- descriptors


def test_readers_and_writers_are_called_while_a_descriptor_is_ready(
    reactor: Reactor, socks: tuple[socket.socket, socket.socket]
) -> None:
    one, other = socks
    seen: list[str] = []
    reactor.add_reader(one.fileno(), lambda: seen.append("read"))
    assert not reactor.progress()
    other.send(b"x")
    reactor.wait(FOREVER_S)
    assert reactor.progress()
    assert reactor.progress()
    assert seen == ["read", "read"]
    reactor.add_writer(one.fileno(), lambda: seen.append("write"))
    reactor.progress()
    assert seen[2:] == ["read", "write"]
    reactor.remove_reader(one.fileno())
    reactor.progress()
    assert seen[4:] == ["write"]
    reactor.remove_writer(one.fileno())
    assert not reactor.progress()
    assert not select.select(reactor.descriptors(), [], [], 0)[0]  # or a driver would never rest
    reactor.remove_writer(one.fileno())
    reactor.remove_reader(one.fileno())


def test_findings_of_wait_are_used_and_may_be_stale(
    reactor: Reactor, socks: tuple[socket.socket, socket.socket]
) -> None:
    one, other = socks
    heard: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            heard.append(one.recv(10))

    reactor.add_reader(one.fileno(), read)
    other.send(b"a")
    reactor.ring()
    reactor.wait(FOREVER_S)
    assert not heard
    assert one.recv(10) == b"a"  # somebody else was faster, who has answered the bell, too
    reactor._answer()
    assert reactor.progress()
    assert not heard
    assert not reactor.progress()
    other.send(b"b")
    reactor.wait(FOREVER_S)
    reactor.remove_reader(one.fileno())
    assert not reactor.progress()
    assert not heard


def test_the_end_of_a_peer_is_something_to_read_and_ends_a_wait_to_write(
    reactor: Reactor, socks: tuple[socket.socket, socket.socket]
) -> None:
    one, other = socks
    with contextlib.suppress(BlockingIOError):
        while one.send(b"x" * 65536):
            pass
    seen: list[str] = []
    reactor.add_reader(one.fileno(), lambda: seen.append("read"))
    reactor.add_writer(one.fileno(), lambda: seen.append("write"))
    assert not reactor.progress()
    other.close()
    assert reactor.progress()
    assert sorted(seen) == ["read", "write"]
    reactor.remove_reader(one.fileno())
    reactor.remove_writer(one.fileno())


def test_a_callback_may_remove_what_is_watched_itself_included(
    reactor: Reactor, socks: tuple[socket.socket, socket.socket]
) -> None:
    one, _ = socks
    seen: list[socket.socket] = []

    def read(sock: socket.socket) -> None:
        seen.append(sock)
        for watched in socks:
            reactor.remove_reader(watched.fileno())
            reactor.remove_writer(watched.fileno())

    for sock in socks:
        sock.send(b"x")
    for sock in socks:
        reactor.add_reader(sock.fileno(), lambda sock=sock: read(sock))
        reactor.add_writer(sock.fileno(), lambda: seen.append(one))
    assert reactor.progress()
    assert len(seen) == 1  # both were ready
    assert not reactor.progress()


def test_a_number_that_is_used_again_within_one_look(reactor: Reactor) -> None:
    """Both are ready; the first callback closes the second and opens another in its place."""
    pairs = [socket.socketpair() for _ in range(2)]
    seen: list[tuple[int, bytes]] = []
    new: list[socket.socket] = []

    def read(index: int, sock: socket.socket) -> None:
        try:
            seen.append((index, sock.recv(10)))
        except BlockingIOError:
            seen.append((index, b"nothing"))
        if not new:
            other = pairs[1 - index][0]
            number = other.fileno()
            reactor.remove_reader(number)
            other.close()
            new.extend(socket.socketpair())
            assert number in (new[0].fileno(), new[1].fileno())
            for sock in new:
                sock.setblocking(False)
                reactor.add_reader(sock.fileno(), lambda sock=sock: read(2, sock))

    for index, (one, other) in enumerate(pairs):
        one.setblocking(False)
        other.send(b"x")
        reactor.add_reader(one.fileno(), lambda index=index, one=one: read(index, one))
    reactor.progress()
    assert (seen[0][1], {what for index, what in seen[1:]} <= {b"nothing"}) == (b"x", True)
    new[1].send(b"y")
    reactor.progress()
    assert seen[-1] == (2, b"y")
    for sock in new:
        reactor.remove_reader(sock.fileno())
        sock.close()
    for pair in pairs:
        for sock in pair:
            if sock.fileno() >= 0:
                reactor.remove_reader(sock.fileno())
            sock.close()


# ---------------------------------------------------------------- errors


def test_errors_are_told_and_the_others_go_on(reactor: Reactor, socks: tuple[socket.socket, socket.socket]) -> None:
    def fail(what: str) -> Callable[[], None]:
        def failing() -> None:
            raise ValueError(what)

        return failing

    failing = Fake()
    failing.progress = fail("poller")  # type: ignore[method-assign,assignment]
    errors: list[str] = []
    seen: list[str] = []
    reactor.failed = lambda error: errors.append(str(error))
    fine = Fake(moves=1)
    reactor.pollers += [failing, fine]
    reactor.call_soon(fail("soon"))
    reactor.call_soon(seen.append, "soon")
    reactor.call_at(0.0, fail("timer"))
    reactor.call_at(1e-9, seen.append, "timer")
    one, _ = socks
    reactor.add_writer(one.fileno(), fail("descriptor"))
    assert reactor.progress()
    assert errors == ["soon", "poller", "descriptor", "timer"]
    assert seen == ["soon", "timer"]
    assert fine.looks == 1
    assert reactor.glance()
    assert errors[4:] == ["poller"]
    reactor.remove_writer(one.fileno())
    reactor.call_exception_handler({"message": "of somebody else"})
    assert errors[5:] == ["of somebody else"]


def test_without_a_driver_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    reactor = Reactor()
    reactor.call_soon(lambda: 1 // 0)
    reactor.progress()
    reactor.close()
    assert "an error in a callback" in caplog.text
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------- pollers


def test_pollers_are_looked_at_in_every_look(reactor: Reactor) -> None:
    one, other = Fake(moves=1), Fake()
    reactor.pollers += [one, other]
    assert reactor.progress()
    assert not reactor.progress()
    assert not reactor.glance()
    assert one.looks == other.looks == 3
    assert reactor.is_awake
    assert not reactor.is_needed
    other.is_needed = True
    assert reactor.is_needed


def test_a_glance_looks_at_neither_descriptors_nor_timers(
    reactor: Reactor, socks: tuple[socket.socket, socket.socket]
) -> None:
    seen: list[str] = []
    reactor.add_writer(socks[0].fileno(), lambda: seen.append("write"))
    reactor.call_at(0.0, seen.append, "timer")
    assert not reactor.glance()
    assert not seen
    reactor.progress()
    assert sorted(seen) == ["timer", "write"]
    reactor.remove_writer(socks[0].fileno())


@pytest.mark.parametrize("refusing", [0, 1])
def test_all_pollers_park_or_none(reactor: Reactor, refusing: int) -> None:
    pollers = [Fake(), Fake()]
    pollers[refusing].refusals = 1
    reactor.pollers += pollers
    assert not reactor.park()
    assert [one.is_awake for one in pollers] == [True, True]
    assert reactor.park()
    assert [one.is_awake for one in pollers] == [False, False]
    assert not reactor.is_awake
    reactor.unpark()
    assert [one.is_awake for one in pollers] == [True, True]


def test_deferred_calls_prevent_parking(reactor: Reactor) -> None:
    poller = Fake()
    reactor.pollers.append(poller)
    reactor.call_soon(int)
    assert not reactor.park()
    assert poller.is_awake
    reactor.progress()
    assert reactor.park()


def test_a_poller_that_fails_to_park_is_looked_at_again(reactor: Reactor) -> None:
    errors: list[BaseException] = []
    reactor.failed = errors.append
    failing, fine = Fake(), Fake()
    failing.park = lambda: bool(1 // 0)  # type: ignore[method-assign]
    reactor.pollers += [failing, fine]
    assert not reactor.park()
    assert isinstance(errors[0], ZeroDivisionError)
    assert failing.is_awake
    assert fine.is_awake
