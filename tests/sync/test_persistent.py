"""Persistent collectives of blocking communicators."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import numpy as np
import pytest

from kfcomm.core import deadlines
from kfcomm.errors import CollectiveAborted, CollectiveTimeout, ConfigError, SessionClosed, WouldDeadlock
from kfcomm.sync import Communicator
from kfcomm.testing import run_threads, sync_world
from tests.collectives.test_persistent import CASES, OUTS, _never, assert_same
from tests.sync.worlds import TRANSPORTS, Call, joined, until

SIZE = 3


@pytest.mark.parametrize("case", [*sorted(OUTS.keys() - {"scatter", "all_gather, concat"}), "barrier"])
def test_from_the_second_start_on_nothing_is_looked_up(case: str) -> None:
    one = CASES[case]

    def main(comm: Communicator) -> None:
        arrays = one.arrays(comm.rank)
        wanted = one.plain(comm, arrays, "plain")
        prepared = one.prepared(comm, arrays, "x")
        prepared.start().wait()
        prepared._inner._call = _never
        for _ in range(3):
            assert_same(prepared.start().wait(), wanted)

    with sync_world(SIZE) as comms:
        run_threads(comms, main)


def both(comms: Any, name: str = "x", **options: Any) -> tuple[Any, Any]:
    first, second = (comm.all_reduce_init(np.ones(1), name, **options) for comm in comms)
    return first, second


def assert_sums(*prepared: Any) -> None:
    for each in prepared:
        each.start()
    assert [each.wait().tolist() for each in prepared] == [[2]] * len(prepared)


@pytest.mark.parametrize("rounds", [0, 2])
def test_it_cannot_be_started_while_it_is_in_flight(rounds: int) -> None:
    with sync_world(2) as comms:
        first, second = both(comms)
        with pytest.raises(ConfigError, match="all_reduce 'x' was never started"):
            first.wait()
        assert first.done()
        assert not first.cancel()
        for _ in range(rounds):
            assert_sums(first, second)
        assert first.start() is first
        with pytest.raises(ConfigError, match="all_reduce 'x' is still in flight"):
            first.start()
        with pytest.raises(TimeoutError, match="the call continues"):
            first.wait(0.01)
        assert not first.done()
        assert repr(first) == "<PersistentCollective all_reduce 'x', in flight>"
        assert (second.start().wait() == 2).all()
        assert (first.wait() == 2).all()
        assert_sums(first, second)
        assert (first.name, both(comms, None)[0].name) == ("x", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("rounds", [0, 2])
def test_after_a_failure_it_can_be_started_again(rounds: int) -> None:
    with sync_world(2) as comms:
        first, second = both(comms)
        for _ in range(rounds):
            assert_sums(first, second)
        for _ in range(2):
            first.start()
            assert first.cancel()
            assert not first.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                first.wait()
            with pytest.raises(CollectiveAborted):
                second.start().wait()
            assert_sums(first, second)
        timely, other = both(comms, "y", timeout=0.3)
        with pytest.raises(CollectiveTimeout):
            timely.start().wait()
        with pytest.raises(CollectiveTimeout):
            other.start().wait()


def test_run_is_a_start_and_a_wait() -> None:
    with sync_world(2) as comms:
        first, second = prepared = both(comms)
        for _ in range(3):
            results = run_threads(comms, lambda comm: prepared[comm.rank].run())
            assert [one.tolist() for one in results] == [[2], [2]]
        first.start()
        with pytest.raises(ConfigError, match="in flight"):
            first.run()
        assert (second.run() == first.wait()).all()


@pytest.mark.parametrize("rounds", [0, 2])
def test_another_thread_may_cancel_what_this_one_waits_for(rounds: int) -> None:
    with sync_world(2) as comms:
        first, second = both(comms)
        for _ in range(rounds):
            assert_sums(first, second)
        for wait in (first.run, lambda: first.start().wait()):
            call = Call(wait)
            until(lambda: not first.done())
            assert first.cancel()
            assert type(call.error()) is concurrent.futures.CancelledError
            with pytest.raises(CollectiveAborted):
                second.run()
            call = Call(wait)
            until(lambda: not first.done())
            with pytest.raises(ConfigError):  # what another rank does is an error of the collective
                comms[1].all_reduce(np.ones(1), "x", op="xor")
            assert type(call.error()) is CollectiveAborted
            assert_sums(first, second)


def test_a_start_after_a_swap_takes_the_new_graphs() -> None:
    def main(comm: Communicator) -> None:
        x = np.arange(3000, dtype=np.float32) / (comm.rank + 1)
        prepared = comm.all_reduce_init(x, "x")
        for strategy in ("ring", "star", "ring"):
            comm.set_strategy(strategy)
            for _ in range(3):
                assert_same(prepared.start().wait(), comm.all_reduce(x, "x"))
            assert prepared._inner._among is comm._inner._group.compiled

    with sync_world(SIZE) as comms:
        run_threads(comms, main)


def test_it_cannot_be_started_on_a_closed_communicator() -> None:
    with sync_world(2) as comms:
        first, second = both(comms)
        for _ in range(2):
            assert_sums(first, second)
        comms[0].close()
        with pytest.raises(SessionClosed):
            first.start()
        assert (first.wait() == 2).all()
        with pytest.raises(SessionClosed):
            comms[0].all_reduce_init(np.ones(1), "y")


def test_first_start_checks_the_arguments() -> None:
    """And the other ranks hear of it, as they do of a call; a name, a timeout and a priority are checked before."""
    with sync_world(2) as comms:
        with pytest.raises(ConfigError, match="a timeout"):
            comms[0].all_reduce_init(np.ones(1), "x", timeout=-1)
        wrong, right = comms[0].all_reduce_init(np.ones(1), "x", op="xor"), comms[1].all_reduce_init(np.ones(1), "x")
        right.start()
        for start in (wrong.start, wrong.run):
            with pytest.raises(ConfigError, match="xor"):
                start()
            with pytest.raises(CollectiveAborted, match="xor"):
                right.wait()
            right.start()
        assert (comms[0].all_reduce(np.ones(1), "x") == right.wait()).all()


def test_messages() -> None:
    with sync_world(2) as comms:
        x = np.zeros(3)
        sent, received = comms[0].send_init(x, 1, "tag"), comms[1].recv_init(0, "tag")
        for _ in range(3):
            x += 1
            sent.start()
            assert_same(received.start().wait(), x)
            sent.wait()


def test_the_io_thread_may_start_it_and_not_wait_for_it() -> None:
    """And while no caller waits, that thread drives it."""
    with joined("shm") as comms:
        first, second = both(comms)
        assert_sums(first, second)
        errors: list[BaseException] = []
        told = threading.Event()

        def again(_: object) -> None:
            try:
                first.start().wait()
            except WouldDeadlock as error:
                errors.append(error)
            told.set()

        comms[0].barrier_async("go").add_done_callback(again)
        comms[1].barrier("go")
        assert told.wait(60)
        assert len(errors) == 1
        assert (second.start().wait() == 2).all()
        assert (first.wait() == 2).all()


def test_many_threads_start_what_is_theirs() -> None:
    def main(comm: Communicator) -> None:
        def one(number: int) -> list[float]:
            prepared = comm.all_reduce_init(x := np.zeros(1), f"x{number}")
            found = []
            for step in range(20):
                x[0] = step + number
                found.append(float(prepared.start().wait()[0]))
            return found

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert list(pool.map(one, range(4))) == [[2.0 * (s + n) for s in range(20)] for n in range(4)]

    with joined("shm") as comms:
        run_threads(comms, main)


@pytest.fixture
def no_inquiries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting callers do not tell the others: data that is not moved stays, and stops the test."""
    monkeypatch.setattr(deadlines, "QUIET_AFTER_S", 1e6)
    monkeypatch.setattr(deadlines, "ASK_BEFORE_S", 0.0)


@pytest.mark.usefixtures("no_inquiries")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_started_collective_progresses_without_a_waiter(transport: str) -> None:
    with joined(transport) as (one, other):
        for comm, peer in ((one, other), (other, one)):
            name = f"of rank {comm.rank}"
            prepared = comm.all_reduce_init(np.ones(2), name)
            for _ in range(4):
                prepared.start()
                assert peer.all_reduce(np.ones(2), name).tolist() == [2.0, 2.0]
                until(prepared.done)


@pytest.mark.usefixtures("no_inquiries")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collective_started_in_a_callback_progresses(transport: str) -> None:
    with joined(transport) as (one, other):
        prepared = one.all_reduce_init(np.ones(2), "x")
        for number in range(4):
            before = one.all_reduce_async(1, "before")
            before.add_done_callback(lambda _: prepared.start())
            assert int(other.all_reduce(1, "before")) == 2
            assert other.all_reduce(np.ones(2), "x").tolist() == [2.0, 2.0], number
            until(prepared.done)
