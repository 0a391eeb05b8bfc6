"""Callers that drive the engine: who leads, who follows, and no caller sleeps through news.

No wait here is ever ended by its bound (``LOOK_EVERY_S``): a wake-up that is lost stops the test.
"""

from __future__ import annotations

import contextlib
import random
import select
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.core import deadlines
from kfcomm.sync import Communicator, driver, handle, thread, turns
from kfcomm.testing import run_threads, sync_world
from kfcomm.transports import loop_driver, reactor
from kfcomm.transports.shm import hub, link, receiver, sender
from tests.launch.launched import environ
from tests.sync.interrupts import AtMoment
from tests.sync.worlds import TRANSPORTS, Call, at_rest, driver_of, following, hub_of, joined, leading, until


@pytest.fixture(autouse=True)
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (turns, thread):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 1e6)


@pytest.fixture
def no_inquiries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting callers do not wake up to tell others or to ask them."""
    monkeypatch.setattr(deadlines, "QUIET_AFTER_S", 1e6)
    monkeypatch.setattr(deadlines, "ASK_BEFORE_S", 0.0)


# ---------------------------------------------------------------- leader and followers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_follower_leads_when_the_call_of_the_leader_ends_first(transport: str) -> None:
    with joined(transport) as (one, other):
        calls = [leading(one, "0"), *(following(one, str(number)) for number in range(1, 4))]
        for number, call in enumerate(calls):
            assert int(other.all_reduce(number, str(number))) == number + 1
            assert int(call.result()) == number + 1
            left = calls[number + 1 :]
            if left:
                until(lambda left=left: driver_of(one).turns.leader in [each.ident for each in left])
        until(lambda: at_rest(one))


def test_a_follower_may_go_in_the_moment_in_which_it_is_to_lead() -> None:
    class Leaving(dict[Any, Any]):
        """There was one, and it goes: followers take themselves off the list without the lock."""

        def __bool__(self) -> bool:
            return True

    with joined("shm") as (one, _):
        driving = driver_of(one)
        driving.io.lock.take()
        driving.turns.followers = Leaving()
        driving.turns.leave()
        driving.turns.followers = {}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_reach_followers_in_whatever_order_they_come(transport: str) -> None:
    with joined(transport) as (one, other):
        for seed in range(5):
            order = random.Random(seed).sample(range(5), 5)
            calls = [leading(one, "0"), *(following(one, str(number)) for number in range(1, 5))]
            for number in order:
                assert int(other.all_reduce(number, str(number))) == number + 1
                assert int(calls[number].result()) == number + 1
        until(lambda: at_rest(one))


@pytest.mark.usefixtures("no_inquiries")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_ends_with_its_own_send_is_not_slept_over(transport: str) -> None:
    """The other's chunk is there before: what is left to do is to send, and no descriptor wakes anybody then."""

    def program(comm: Communicator) -> None:
        for number in range(100):
            assert comm.all_reduce(np.ones(16), "a").sum() == 32
            assert comm.broadcast_object(number if comm.rank == 0 else None, 0, "b") == number

    with joined(transport) as comms:
        run_threads(comms, program)


def test_errors_reach_followers() -> None:
    with joined("shm") as (one, other):
        lead = leading(one, "a")
        mismatch, aborted = following(one, "b"), following(one, "c")
        with pytest.raises(kfcomm.CollectiveMismatch):
            other.all_reduce(np.ones(3), "b")
        assert isinstance(mismatch.error(), kfcomm.CollectiveMismatch)
        theirs = other.all_reduce_async(1, "c")
        theirs.cancel()
        error = aborted.error()
        assert error is None or isinstance(error, kfcomm.CollectiveAborted)  # it may have been complete here
        assert not lead.done()
        other.all_reduce(1, "a")
        assert int(lead.result()) == 2


def test_a_wait_ends_in_time_while_another_leads() -> None:
    with joined("shm") as (one, other):
        waited = one.all_reduce_async(1, "b")
        lead = leading(one, "a")
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError):
                waited.wait(timeout)
        assert not driver_of(one).turns.followers
        other.all_reduce(1, "b")
        assert int(waited.wait(1e6)) == 2
        other.all_reduce(1, "a")
        assert int(lead.result()) == 2
        until(lambda: at_rest(one))


def test_a_leader_that_runs_out_of_time_hands_over() -> None:
    with joined("shm") as (one, other):
        short = one.all_reduce_async(1, "a")
        lead = Call(short.wait, 0.1)
        until(lambda: driver_of(one).turns.leader == lead.ident or lead.done())
        follow = Call(one.all_reduce, 1, "b")
        assert isinstance(lead.error(), TimeoutError)
        other.all_reduce(1, "b")
        assert int(follow.result()) == 2
        other.all_reduce(1, "a")
        assert int(short.wait()) == 2
        until(lambda: at_rest(one))


def test_many_wait_for_one_handle() -> None:
    with joined("shm") as (one, other):
        shared = one.all_reduce_async(1, "a")
        waits = [Call(shared.wait) for _ in range(4)]
        until(lambda: len(driver_of(one).turns.followers) == 3)
        other.all_reduce(1, "a")
        assert [int(wait.result()) for wait in waits] == [2] * 4


def test_a_call_that_another_thread_ends_wakes_its_leader() -> None:
    with joined("shm") as (one, _):
        waited = one.all_reduce_async(1, "a")
        lead = Call(waited.wait)
        until(lambda: driver_of(one).turns.is_resting)
        assert waited.cancel()
        assert isinstance(lead.error(), BaseException)
        until(lambda: at_rest(one))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_wakes_leader_and_followers(transport: str) -> None:
    with joined(transport) as (one, _):
        calls = [leading(one, "a"), following(one, "b"), following(one, "c")]
        one.close()
        assert [type(call.error()) for call in calls] == [kfcomm.CollectiveAborted] * 3
        until(lambda: at_rest(one))


@pytest.mark.usefixtures("no_inquiries")
def test_a_link_that_is_opened_wakes_the_leader_whose_last_frame_it_takes() -> None:
    """Whichever rank is the root of a name sends the result on links that may have yet to be opened."""
    with joined("tcp", 4) as comms:
        for number in range(12):
            run_threads(comms, lambda comm, name=f"{number}": comm.barrier(name))


def test_posting_wakes_a_leader_that_sleeps() -> None:
    """The leader sends what it posts, and has to hear of it."""
    with joined("tcp") as (one, other):
        lead = leading(one, "a")
        begun = [one.all_reduce_async(1, f"{number}") for number in range(3)]
        assert [int(other.all_reduce(1, f"{number}")) for number in range(3)] == [2] * 3
        assert [int(each.wait()) for each in begun] == [2] * 3
        with pytest.raises(kfcomm.CollectiveTimeout):
            one.all_reduce(1, "late", timeout=0.01)  # a deadline earlier than any that the leader knows
        other.all_reduce(1, "a")
        assert int(lead.result()) == 2


# ---------------------------------------------------------------- no wake-up is lost


@pytest.mark.parametrize("transport", [*TRANSPORTS, "auto"])
@pytest.mark.parametrize("quiet_s", [0.0, 2e-3])
def test_threads_of_all_ranks_meet_as_often_as_they_like(
    transport: str, quiet_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads meet the same thread of the other ranks again and again, each in a way of its own."""
    monkeypatch.setattr(turns, "QUIET_S", quiet_s)
    monkeypatch.setattr(turns, "LULL_S", 0.0)

    def main(comm: Communicator, number: int) -> int:
        pick = random.Random(comm.rank * 100 + number)
        total = 0
        for step in range(120):
            name = f"{number}/{step % 3}"
            match pick.randrange(5):
                case 0 | 1:
                    total += int(comm.all_reduce(1, name))
                case 2:
                    begun = comm.all_reduce_async(1, name)
                    with_timeout = pick.random() < 0.5
                    if with_timeout:
                        with contextlib.suppress(TimeoutError):
                            begun.wait(pick.choice([0, 1e-4]))
                    total += int(begun.wait())
                case 3:  # by the I/O thread, or by whoever drives
                    begun, told = comm.all_reduce_async(1, name), threading.Event()
                    begun.add_done_callback(lambda _, told=told: told.set())
                    told.wait()
                    total += int(begun.result())
                case 4:
                    begun = comm.all_reduce_async(1, name)
                    comm.all_reduce(1, f"{name}/more") if step % 2 else None
                    total += int(begun.wait())
                    continue
            comm.all_reduce_async(1, f"{name}/more").wait() if step % 2 else None
        return total

    with joined(transport) as comms:
        calls = [Call(main, comm, number) for number in range(3) for comm in comms]
        assert [call.result() for call in calls] == [240] * 6
        until(lambda: all(at_rest(comm) for comm in comms))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_io_thread_completes_what_is_in_flight_while_the_program_computes(transport: str) -> None:
    with joined(transport) as comms:
        for size in (1, 100_000, 2_000_000):
            told = [threading.Event() for _ in comms]
            begun = [comm.all_reduce_async(np.ones(size), "x") for comm in comms]
            for each, event in zip(begun, told, strict=True):
                each.add_done_callback(lambda _, event=event: event.set())
            for event in told:
                event.wait()  # no call of kfcomm is made meanwhile
            assert all((each.result() == 2).all() for each in begun)


def test_callbacks_run_on_the_io_thread_and_may_begin_more() -> None:
    names: list[str] = []
    over = threading.Barrier(3)

    def go_on(comm: Communicator, left: int) -> None:
        def callback(done: Any) -> None:
            names.append(threading.current_thread().name)
            assert int(done.result()) == 2
            with pytest.raises(kfcomm.WouldDeadlock):
                comm.barrier()
            if left:
                go_on(comm, left - 1)
            else:
                threading.Thread(target=over.wait).start()

        comm.all_reduce_async(1, f"{left % 3}").add_done_callback(callback)

    with joined("shm") as comms:
        for comm in comms:
            go_on(comm, 20)
        over.wait()
        assert set(names) == {"kfcomm-io"}
        assert len(names) == 42
        assert run_threads(comms, lambda comm: int(comm.all_reduce(1))) == [2, 2]


# ---------------------------------------------------------------- between two calls


def called(*comms: Communicator) -> None:
    run_threads(comms, lambda comm: comm.all_reduce(1, "call"))


def test_a_rank_that_makes_no_more_calls_parks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LULL_S", 0.0)
    with joined("shm") as comms:
        for _ in range(3):
            called(*comms)
            for comm in comms:
                until(lambda comm=comm: not hub_of(comm).is_awake)


class QuietPoller(reactor.Poller):
    """One that has nothing to look at."""

    is_awake = is_needed = False

    def progress(self) -> bool:
        return False

    def park(self) -> bool:
        return True

    def unpark(self) -> None:
        pass


def test_a_rank_parks_beside_a_quiet_poller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LULL_S", 0.0)
    with joined("shm") as comms:
        for comm in comms:
            driving = driver_of(comm)
            driving.run(partial(driving.turns.reactor.pollers.append, QuietPoller()), comm._session)
        called(*comms)
        for comm in comms:
            until(lambda comm=comm: not hub_of(comm).is_awake)


class Needed(QuietPoller):
    """One that awaits news, which never come."""

    def __init__(self) -> None:
        self.is_awake = self.is_needed = True
        self.num_looks = 0

    def progress(self) -> bool:
        self.num_looks += 1
        return False

    def park(self) -> bool:
        self.is_awake = False
        return True


@pytest.mark.parametrize("is_full", [False, True])
def test_the_io_thread_leaves_processors_to_programs(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more programs and I/O threads than processors it looks once in a turn, and parks soon."""
    monkeypatch.setattr(loop_driver, "SPIN_S", 1e6)
    monkeypatch.setattr(turns, "LINGER_S", -1.0)
    io = thread.IoThread()
    driving, needed = turns.Turns(io), Needed()
    driving.reactor.is_full = is_full
    try:
        io.run(driving.reactor.pollers.append, needed)
        io.run(driving.io_driver.wake)
        if is_full:
            until(lambda: not needed.is_awake)
            assert needed.num_looks < loop_driver.LOOKS
        else:
            until(lambda: needed.num_looks > 100)
            assert needed.is_awake
        io.run(driving.io_driver.close)
    finally:
        io.stop()


def test_between_two_calls_no_thread_polls_or_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LULL_S", 0.0)
    with joined("shm") as (one, other):
        called(one, other)
        here, driving = hub_of(one), driver_of(one)
        io_driver = driving.turns.io_driver
        forget_deadlines(driving)
        until(lambda: not here.is_awake and not hub_of(other).is_awake)
        monkeypatch.setattr(turns, "LULL_S", 1e6)
        driving.run(here.unpark, one._session)  # a call that has looked, and waits for nothing any more
        assert io_driver.has_lull
        driving.io.run(lambda: None)  # it has begun to wait
        io_driver.calls += 1
        driving.io.run(io_driver._after_lull)  # there was another call
        assert io_driver.has_lull
        assert int(run_threads([one, other], lambda comm: comm.all_reduce(1, "x"))[0]) == 2
        until(lambda: io_driver.has_lull)
        monkeypatch.setattr(turns, "LULL_S", 0.0)
        driving.io.run(io_driver._after_lull)
        until(lambda: not here.is_awake)


def test_call_after_a_lull_wakes_a_parked_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined("shm") as (one, other):
        for lull_s in (0.0, 1e6):
            monkeypatch.setattr(turns, "LULL_S", lull_s)
            called(one, other)
            if not lull_s:
                until(lambda: not hub_of(one).is_awake and not hub_of(other).is_awake)
            begun = one.all_reduce_async(1, "x")
            assert int(other.all_reduce(1, "x")) == 2
            assert int(begun.wait()) == 2


def forget_deadlines(driving: driver.Driver) -> None:
    """No deadline wakes the I/O thread any more."""
    io_driver = driving.turns.io_driver

    def forget() -> None:
        io_driver.timer_s = 0.0
        if io_driver._timer is not None:
            io_driver._timer.cancel()

    driving.io.run(forget)


def mask(comm: Communicator) -> None:
    """As after a call in which it had to wait, once the I/O thread has done what it was told to."""
    driving = driver_of(comm)
    forget_deadlines(driving)
    until(lambda: not driving.turns.io_driver._is_scheduled)
    driving.run(lambda: driving.turns.io_driver.mask(is_masked=True), comm._session)


@pytest.mark.usefixtures("no_inquiries")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_news_between_two_calls_waits_for_the_next_call(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MASKED_S", 1e6)
    with joined(transport) as (one, other):
        run_threads([one, other], lambda comm: comm.reduce(1, 0, "x"))
        driving = driver_of(one)
        mask(one)
        for _ in range(5):
            begun = other.reduce_async(1, 0, "x")
            select.select(driving.reactor.descriptors(), (), ())  # it has come
            driving.io.loop.call_soon_threadsafe(int)  # the thread itself is awake, and does not hear of it
            assert driving.turns.io_driver.is_masked
            assert int(one.reduce(1, 0, "x")) == 2
            assert driving.turns.io_driver.is_masked
            begun.wait()


@pytest.mark.usefixtures("no_inquiries")
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_io_thread_listens_at_once_when_something_begins_there(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "MASKED_S", 1e6)

    async def nothing() -> None:
        pass

    with joined(transport) as (one, other):
        called(one, other)
        mask(one)
        driver_of(one).io.wait_for(nothing)
        until(lambda: not driver_of(one).turns.io_driver.is_masked)
        begun = one.recv_async(1)
        called(one, other)  # and goes on listening after a call
        assert not driver_of(one).turns.io_driver.is_masked
        other.send(np.ones(3), 0)
        assert begun.wait().sum() == 3


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_io_thread_listens_after_the_last_call(transport: str) -> None:
    with joined(transport) as (one, other):
        for _ in range(3):
            called(one, other)
            mask(one)
            until(lambda: not driver_of(one).turns.io_driver.is_masked)
            begun = other.all_reduce_async(1, "x")
            until(lambda: one._inner._group.engine.router.expected(one._inner._group.view.id, "x") is not None)
            assert int(one.all_reduce(1, "x")) == 2
            assert int(begun.wait()) == 2


def test_a_deadline_passes_while_others_want_the_lock_all_the_time() -> None:
    with joined("shm") as (one, _):
        lock, is_over = driver_of(one).io.lock, threading.Event()

        def wants() -> None:
            while not is_over.is_set():
                lock.take()
                lock.lay_down()

        wanting = Call(wants)
        with pytest.raises(kfcomm.CollectiveTimeout):
            one.all_reduce(1, "a", timeout=0.1)
        is_over.set()
        wanting.result()


class News:
    """A poller that always has news, until the I/O thread has had its turn, or for many looks."""

    is_needed = is_awake = True

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.num_looks = 0
        self.num_kept_waiting = 0  # looks while another thread wanted the lock
        self.is_over = False

    def progress(self) -> bool:
        self.num_looks += 1
        self.num_kept_waiting += self._lock.is_wanted()
        return not self.is_over and self.num_kept_waiting < 1000

    def park(self) -> bool:
        return True

    def unpark(self) -> None:
        pass


def test_a_leader_with_news_without_a_pause_gives_way_to_the_io_thread() -> None:
    """The news may be chunks on one link, while the I/O thread opens the link on which the call waits next."""
    with joined("shm") as (one, other):
        driving, lead = driver_of(one), leading(one, "a")
        news = News(driving.io.lock)
        driving.reactor.pollers.append(news)
        try:
            driving.reactor.ring()
            until(lambda: news.num_looks)
            driving.io.run(setattr, news, "is_over", True)
        finally:
            driving.reactor.pollers.remove(news)
        assert news.num_kept_waiting < 10
        other.all_reduce(1, "a")
        assert int(lead.result()) == 2
        until(lambda: at_rest(one))


# ---------------------------------------------------------------- interrupts

MODULES = driver, turns, thread, handle


def blocking(comm: Communicator) -> Any:
    return comm.all_reduce(1, "x")


def begun_and_waited_for(comm: Communicator) -> Any:
    return comm.all_reduce_async(1, "x").wait()


def with_a_timeout(comm: Communicator) -> Any:
    return comm.all_reduce_async(1, "x").wait(1e6)


@pytest.mark.slow
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("call", [blocking, begun_and_waited_for, with_a_timeout])
def test_an_interrupt_at_any_moment_ends_one_call_or_all_with_that_reason(call: Any, follows: bool) -> None:
    wanted = {"Turns._follow" if follows else "Turns._lead", "Turns.leave", "EngineLock.take"}
    places: list[str] = []
    reached: set[str] = set()
    num_missed = 0
    # How often a caller looks before it rests is not the same each time: beside a busy process it differs much.
    while num_missed < (5 if wanted <= reached else 100):
        with sync_world(2) as (one, other):
            lead = leading(one, "lead") if follows else None
            interrupt = AtMoment(len(places), *MODULES)
            is_closed = interrupted(interrupt, call, one, other, follows)
            if lead is not None:
                if not is_closed:
                    other.all_reduce(1, "lead")
                assert is_closed or int(lead.result()) == 2
                lead.error()
            until(lambda one=one: at_rest(one))
            assert not driver_of(one).io.lock.is_mine()
        if interrupt.came:
            places.append(interrupt.came)
            reached.add(interrupt.came.split(":")[0])
            num_missed = 0
        else:
            num_missed += 1
    assert wanted <= reached, places
    assert len(reached) > 7, places


@pytest.mark.parametrize("moment", [*range(0, 100, 9), 200, 400, 800, 1600])
def test_an_interrupt_in_the_midst_of_the_engine(moment: int) -> None:
    with joined("shm") as (one, other):
        interrupt = AtMoment(moment, *MODULES, reactor, hub, link, sender, receiver)
        interrupted(interrupt, blocking, one, other, follows=False)
        until(lambda: at_rest(one))


def interrupted(interrupt: AtMoment, call: Any, one: Communicator, other: Communicator, follows: bool) -> bool:
    """One call that may be interrupted, and what may come of it; whether that has closed the communicator."""
    over, driving, reason = threading.Event(), driver_of(one), ""

    def answer() -> Any:
        until(lambda: over.is_set() or (driving.turns.followers if follows else driving.turns.is_resting))
        return other.all_reduce(1, "x")

    answering = Call(answer)
    try:
        assert int(interrupt.run(lambda: call(one))) == 2
    except KeyboardInterrupt:
        assert interrupt.came
    except kfcomm.CollectiveAborted:  # it has ended with the others
        assert interrupt.came
    over.set()
    driving.heal(one._session)  # as the next call of this thread does, and ``close``
    try:
        one.all_reduce_async(1, "after")
        one.all_reduce_async(1, "x")  # nobody may have begun it
        assert int(other.all_reduce(1, "after")) == 2
    except kfcomm.SessionClosed as error:
        reason = str(error)
        one.close()
    assert not reason or "interrupted at its work by KeyboardInterrupt" in reason
    assert sys.exception() is None  # raised where no signal can arrive, an error would stay for the tests that follow
    theirs = answering.error()
    assert theirs is None or isinstance(theirs, (kfcomm.CollectiveAborted, kfcomm.PeerLost)), theirs
    return bool(reason)


# ---------------------------------------------------------------- real processes


def run(ranks: int, program: str, *flags: str, **settings: str) -> Any:
    python = [sys.executable, "-W", "error", *flags]
    head = "import os, sys, threading, numpy as np, kfcomm\ncomm = kfcomm.sync.init()\n"
    return subprocess.run(
        [*python, "-m", "kfcomm", "run", "-n", str(ranks), *python, "-c", head + program],
        env=environ(**settings), capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


BUSY = """
def main(number):
    for step in range(20):
        assert comm.all_reduce(np.ones(1000), f"{number}/{step % 2}")[0] == comm.size
        assert comm.all_reduce_async(np.ones(100_000), f"{number}").wait()[0] == comm.size

threads = [threading.Thread(target=main, args=(number,)) for number in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
told = threading.Event()
comm.all_gather_object_async(comm.rank).add_done_callback(lambda done: told.set())
told.wait()
pair = comm.split(0)
assert pair.all_gather_object("x") == ["x"] * comm.size
comm.barrier()
comm.close()
print("done")
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_debug_mode_has_nothing_to_complain_of(transport: str) -> None:
    done = run(2, BUSY, "-X", "dev", KFCOMM_TRANSPORT=transport, PYTHONASYNCIODEBUG="1")
    said = [line for line in done.stderr.splitlines() if not ("Executing" in line and "seconds" in line)]
    assert (done.returncode, said) == (0, [])
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"]


def test_in_a_forked_child_nothing_waits_for_a_lock_that_nobody_will_lay_down() -> None:
    done = run(
        2,
        "import numpy as np\nx = np.ones(4)\n"
        "for _ in range(3):\n    comm.all_reduce(x, 'again')\n"
        "handle = comm.all_reduce_async(1, 'a') if comm.rank == 0 else None\n"
        "lock, taken, forked = comm._driver.io.lock, threading.Event(), threading.Event()\n"
        "def hold():\n    lock.take()\n    taken.set()\n    forked.wait()\n    lock.lay_down()\n"
        "thread = threading.Thread(target=hold)\n"
        "thread.start()\n"
        "taken.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    told = 0\n"
        "    calls = [comm.barrier, comm.barrier_async, lambda: comm.save('x', 1), lambda: comm.group([0])]\n"
        "    calls += [lambda: comm.all_reduce(x, 'again')] + ([] if handle is None else [handle.wait])\n"
        "    for call in calls:\n"
        "        try:\n            call()\n"
        "        except kfcomm.SessionClosed as error:\n            told += 'parent' in str(error)\n"
        "    assert handle is None or not handle.cancel()\n"
        "    comm.close()\n"
        "    os._exit(0 if told == len(calls) else 1)\n"
        "forked.set()\n"
        "thread.join()\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "comm.barrier('forked')\n"  # else the handle might be done before the fork
        "print(int(comm.all_reduce(1, 'a') if handle is None else handle.wait()))\n"
        "comm.close()\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"]
