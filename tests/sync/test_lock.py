"""Engine lock: one holder at a time, waiting threads first, and locks left by an interrupt."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.sync import thread as locks
from kfcomm.sync.thread import EngineLock
from tests.sync.interrupts import AtMoment


def elsewhere(function: object) -> None:
    """Call it on another thread, to its end."""
    thread = threading.Thread(target=function)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def taken_elsewhere(lock: EngineLock) -> None:
    """Another thread has had it; waits for ever if it cannot."""

    def other() -> None:
        assert lock.take()
        lock.lay_down()

    elsewhere(other)


def test_waiting_thread_gets_the_lock_before_the_releasing_one() -> None:
    lock = EngineLock()
    order: list[int] = []

    def other() -> None:
        lock.take()
        order.append(0)
        lock.lay_down()

    lock.take()
    for turn in range(1, 20):
        thread = threading.Thread(target=other)
        thread.start()
        while not lock.is_wanted():
            pass
        lock.lay_down()
        lock.take()
        order.append(turn)
        thread.join()
    lock.lay_down()
    assert order == [one for turn in range(1, 20) for one in (0, turn)]


def test_one_at_a_time_and_no_thread_starves() -> None:
    lock = EngineLock()
    inside: list[int] = []
    turns: list[int] = []

    def main(number: int) -> None:
        start.wait()
        for _ in range(200):
            assert lock.take()
            assert lock.is_mine()
            inside.append(number)
            assert inside == [number]
            turns.append(number)
            inside.pop()
            lock.lay_down()
            assert not lock.is_mine()

    start = threading.Barrier(4)
    threads = [threading.Thread(target=main, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turns) == sorted([*range(4)] * 200)


def test_release_without_holding_does_nothing() -> None:
    lock = EngineLock()
    lock.lay_down()
    lock.take()
    elsewhere(lock.lay_down)
    assert lock.is_mine()
    lock.lay_down()
    lock.lay_down()
    taken_elsewhere(lock)


def test_a_lock_that_was_left_taken_is_found_out() -> None:
    lock = EngineLock()
    assert lock.take()
    assert not lock.take()
    lock.lay_down()
    assert not lock.is_mine()
    taken_elsewhere(lock)


@given(st.integers(0, 20))
def test_an_interrupt_at_any_moment_leaves_a_lock_that_its_thread_can_lay_down(line: int) -> None:
    lock = EngineLock()
    interrupt = AtMoment(line, locks)

    def both() -> None:
        lock.take()
        lock.lay_down()

    try:
        interrupt.run(both)
    except KeyboardInterrupt:
        assert interrupt.came
        assert not lock.is_wanted()
        lock.lay_down()  # it knows whether it is this thread's
    assert lock.take()
    lock.lay_down()
    taken_elsewhere(lock)


@pytest.mark.parametrize("line", range(10))
def test_an_interrupt_while_waiting_for_it_leaves_it_to_its_owner(line: int) -> None:
    lock = EngineLock()
    lock.take()

    def other() -> None:
        interrupt = AtMoment(line, locks)
        try:
            interrupt.run(lock.take)
        except KeyboardInterrupt:
            pass
        finally:
            lock.lay_down()

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive() and not lock.is_wanted():
        pass
    assert lock.is_mine()
    lock.lay_down()
    thread.join()
    taken_elsewhere(lock)
