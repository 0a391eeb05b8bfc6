"""The blocking interface: the async verbs, from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.sync import Communicator, Handle
from kfcomm.testing import run_threads, sync_world
from kfcomm.transports.reactor import Reactor
from tests.launch.launched import environ
from tests.stubs import Broken, broken

NOT_VERBS = {
    "close", "dump", "empty", "group", "mismatched", "queue", "refuse", "save", "set_timeout", "shrink", "split",
    "statistics",
}  # fmt: skip
PROPERTIES = {
    "births", "epoch", "layout", "local_rank", "local_size", "name", "outlives", "rank", "route", "shares_memory",
    "size", "strategy",
}  # fmt: skip


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(verb: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(verb).parameters.values()][1:]


# ---------------------------------------------------------------- the same verbs


def test_every_verb_is_there_in_both_forms_with_the_same_parameters() -> None:
    persistent = {name for name in public(kfcomm.Communicator) if name.endswith("_init")}
    verbs = public(kfcomm.Communicator) - NOT_VERBS - PROPERTIES - persistent
    expected = verbs | {f"{verb}_async" for verb in verbs} | NOT_VERBS | PROPERTIES | persistent
    assert public(Communicator) == expected
    for name in verbs | NOT_VERBS | persistent:
        assert parameters(getattr(Communicator, name)) == parameters(getattr(kfcomm.Communicator, name)), name
    for name in verbs:
        assert parameters(getattr(Communicator, f"{name}_async")) == parameters(getattr(kfcomm.Communicator, name))


def test_help_shows_the_verbs_own_text() -> None:
    assert "element by element" in (Communicator.all_reduce.__doc__ or "")
    assert Communicator.all_reduce.__name__ == "all_reduce"
    assert Communicator.all_reduce_async.__name__ == "all_reduce_async"


def test_groups_share_the_thread_and_have_ranks_of_their_own() -> None:
    def main(comm: Communicator) -> tuple[Any, ...]:
        pair = comm.split(comm.rank % 2, key=-comm.rank)
        assert pair is not None
        nobody = comm.split(None)
        ends = comm.group(iter([3, 0]), "ends") if comm.rank in (0, 3) else None
        shown = None if ends is None else (ends.rank, ends.size, ends.name, int(ends.all_reduce(comm.rank)))
        pair.close()
        pair.close()
        with pytest.raises(kfcomm.SessionClosed, match="'split/"):
            pair.barrier()
        return pair.rank, pair.size, nobody, shown, int(comm.all_reduce(1))

    with sync_world(4) as comms:
        assert run_threads(comms, main) == [
            (1, 2, None, (1, 2, "ends", 3), 4),
            (1, 2, None, None, 4),
            (0, 2, None, None, 4),
            (0, 2, None, (0, 2, "ends", 3), 4),
        ]


def test_properties_and_words() -> None:
    with sync_world(4, hosts=2, strategy="ring") as comms:
        comm = comms[3]
        assert (comm.rank, comm.size, comm.local_rank, comm.local_size, comm.epoch) == (3, 4, 1, 2, 0)
        assert comm.layout.hosts == (0, 0, 1, 1)
        assert comm.strategy.name == "ring"
        assert repr(comm) == "<Communicator 'world', rank 3 of 4, open>"
        assert comm.dump()["rank"] == 3


# ---------------------------------------------------------------- order


def test_unnamed_calls_of_one_thread_match_in_the_order_of_the_program() -> None:
    def main(comm: Communicator) -> list[int]:
        handles: list[Handle[Any]] = []
        for number in range(300):
            handles.append(comm.all_reduce_async(np.array([number])))
            if number % 3 == 0:
                handles.append(comm.all_gather_object_async(number))
        return [int(np.ravel(handle.wait())[0]) for handle in handles]

    expected = [one for n in range(300) for one in ([3 * n, n] if n % 3 == 0 else [3 * n])]
    with sync_world(3) as comms:
        assert run_threads(comms, main) == [expected] * 3


def test_many_threads_use_one_communicator_at_once() -> None:
    with sync_world(2) as comms, concurrent.futures.ThreadPoolExecutor(16) as pool:
        sums = [pool.submit(comms[rank].all_reduce, n, f"{n}") for n in range(8) for rank in range(2)]
        assert [int(one.result()) for one in sums] == [2 * n for n in range(8) for _ in range(2)]


# ---------------------------------------------------------------- what is read when, and where


def test_objects_are_taken_when_the_verb_is_called() -> None:
    def main(comm: Communicator) -> Any:
        value = {"step": [1]}
        handle = comm.all_gather_object_async(value)
        value["step"].append(2)
        return handle.wait()

    with sync_world(2) as comms:
        assert run_threads(comms, main) == [[{"step": [1]}] * 2] * 2


class Foreign:
    """An array of some library, which notes on which thread it is read."""

    def __init__(self) -> None:
        self.array = np.arange(3.0)
        self.threads: list[int] = []

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        self.threads.append(threading.get_ident())
        return self.array.__dlpack__(**options)


def test_arrays_are_read_on_the_callers_thread() -> None:
    def main(comm: Communicator) -> bool:
        arrays = [Foreign() for _ in range(4)]
        comm.all_reduce(arrays[0])
        comm.all_reduce_async(x=arrays[1]).wait()
        comm.all_reduce_many({"x": arrays[2]})
        comm.save("kept", arrays[3])
        return all(set(one.threads) == {threading.get_ident()} for one in arrays)

    with sync_world(2) as comms:
        assert run_threads(comms, main) == [True, True]


def test_the_result_is_of_the_callers_kind_and_out_is_filled() -> None:
    def main(comm: Communicator) -> tuple[Any, ...]:
        out = np.zeros((2, 2), np.int64)
        given = comm.all_reduce([[1, 2], [3, 4]], out=out)
        return given is out, out.tolist(), comm.all_reduce(bytearray(b"\x01\x02"))

    with sync_world(2) as comms:
        assert run_threads(comms, main) == [(True, [[2, 4], [6, 8]], bytearray(b"\x02\x04"))] * 2


# ---------------------------------------------------------------- handles


def test_a_wait_that_is_too_short_leaves_the_collective_alone() -> None:
    with sync_world(2) as comms:
        handle = comms[0].all_reduce_async(1, "a")
        for wait in (handle.wait, handle.result, handle.exception):
            with pytest.raises(TimeoutError):
                wait(timeout=0)
        assert not handle.done()
        assert int(comms[1].all_reduce(2, "a")) == 3
        assert int(handle.wait(timeout=60)) == 3
        assert handle.exception() is None
        assert not handle.cancel()


def test_handles_are_futures() -> None:
    with sync_world(2) as comms:
        ours = [comms[0].all_reduce_async(n, f"{n}") for n in range(5)]
        theirs = [comms[1].all_reduce_async(n, f"{n}") for n in range(5)]
        assert {int(one.result()) for one in concurrent.futures.as_completed([*ours, *theirs])} == {0, 2, 4, 6, 8}

        async def awaited() -> int:
            later = asyncio.wrap_future(comms[0].all_reduce_async(1, "later"))
            comms[1].all_reduce_async(1, "later")
            return int(await later)

        assert asyncio.run(awaited()) == 2


def test_cancelling_ends_the_call_everywhere_and_frees_the_name() -> None:
    with sync_world(2) as comms:
        x = np.ones(4)
        handle = comms[0].all_reduce_async(x, "a")
        assert handle.cancel()
        assert handle.done()
        assert handle.cancelled()
        assert not handle.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            handle.wait()
        assert concurrent.futures.wait([handle]).done == {handle}
        with pytest.raises(kfcomm.CollectiveAborted, match="'a' was cancelled on rank 0"):
            comms[1].all_reduce(x, "a")
        assert run_threads(comms, lambda comm: float(comm.all_reduce(x, "a")[0])) == [2.0, 2.0]


def test_a_task_can_be_cancelled_too() -> None:
    with sync_world(2) as comms:
        queue = comms[1].queue("q", 0, 1)
        handle = queue.get_async()
        handle.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            handle.wait()


def test_in_a_callback_nothing_may_block_but_everything_may_begin() -> None:
    met: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
    with sync_world(2) as comms:

        def callback(done: Handle[Any]) -> None:
            found: list[Any] = [done.wait()]
            next_one = comms[0].all_reduce_async(5, "next")
            for blocks in (next_one.wait, next_one.exception, comms[0].barrier, comms[0].close):
                try:
                    blocks()
                except kfcomm.WouldDeadlock as error:
                    found.append(error)
            found += [comms[0].save("x", 1), comms[0].dump()["rank"], next_one]
            met.set_result(found)

        first = comms[0].all_reduce_async(1, "first")
        first.add_done_callback(callback)  # type: ignore[arg-type]
        comms[1].all_reduce(1, "first")
        result, *refusals, version, rank, after = met.result()
        assert (int(result), len(refusals), version, rank) == (2, 4, 0, 0)
        assert isinstance(refusals[0], RuntimeError)
        assert "I/O thread" in str(refusals[0])
        # the refused barrier took no number: the ranks still agree on the next unnamed call
        assert int(comms[1].all_reduce(5, "next")) == int(after.wait()) == 10
        assert run_threads(comms, lambda comm: int(comm.all_reduce(1))) == [2, 2]


def test_a_thread_with_a_loop_of_its_own_may_block_that_loop() -> None:
    async def main(comm: Communicator) -> int:
        return int(comm.all_reduce(1))

    with sync_world(2) as comms:
        assert run_threads(comms, lambda comm: asyncio.run(main(comm))) == [2, 2]


# ---------------------------------------------------------------- failures


def test_errors_keep_their_types_and_show_the_callers_line() -> None:
    with sync_world(2) as comms:
        with pytest.raises(kfcomm.ConfigError, match="'noop'") as refused:
            comms[0].all_reduce(1, "a", op="noop")
        assert Path(__file__).name in "".join(traceback.format_tb(refused.tb))
        with pytest.raises(kfcomm.CollectiveAborted, match="rank 0 refused its call of 'a'"):
            comms[1].all_reduce(1, "a")
        with pytest.raises(Broken):
            comms[0].all_reduce(broken("__array__"), "a")
        with pytest.raises(kfcomm.CollectiveAborted, match="rank 0 refused its call of 'a': the device is on fire"):
            comms[1].all_reduce(1, "a")
        early = comms[0].all_reduce_async(object(), "b")
        assert isinstance(early.exception(), kfcomm.ConfigError)
        with pytest.raises(kfcomm.CollectiveAborted):
            comms[1].all_reduce(1, "b")
        one = comms[0].all_reduce_async(np.ones(2), "c")
        with pytest.raises(kfcomm.CollectiveMismatch):
            comms[1].all_reduce(np.ones(3), "c")
        assert isinstance(one.exception(), kfcomm.CollectiveMismatch)
        with pytest.raises(kfcomm.CollectiveTimeout) as late:
            comms[0].all_reduce(1, "d", timeout=0.01)
        assert late.value.missing == (1,)
        with pytest.raises(kfcomm.ConfigError, match="members"):
            comms[0].group([1])


def test_a_lost_rank_fails_the_calls_that_wait_for_it() -> None:
    with sync_world(3) as comms:
        waiting = [comms[rank].all_reduce_async(1, "a") for rank in range(2)]
        comms.kill(2)
        assert [type(one.exception()) for one in waiting] == [kfcomm.PeerLost] * 2
        comms.unplug(1)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes as soon as a caller rests."""
    wait = Reactor.wait

    def interrupted(reactor: Reactor, timeout_s: float) -> None:
        interrupt()
        wait(reactor, timeout_s)

    monkeypatch.setattr(Reactor, "wait", interrupted)


@pytest.mark.usefixtures("resting")
def test_ctrl_c_in_a_blocking_call_cancels_the_collective() -> None:
    with sync_world(2) as comms:
        with pytest.raises(KeyboardInterrupt):
            comms[0].all_reduce(1, "a")
        with pytest.raises(kfcomm.CollectiveAborted, match="'a' was cancelled on rank 0"):
            comms[1].all_reduce(1, "a")


@pytest.mark.usefixtures("resting")
@pytest.mark.parametrize("wait", [Handle.wait, Handle.result, Handle.exception])
def test_ctrl_c_in_the_wait_for_a_handle_cancels_the_collective(wait: Callable[[Handle[Any]], Any]) -> None:
    with sync_world(2) as comms:
        handle = comms[0].all_reduce_async(1, "a")
        with pytest.raises(KeyboardInterrupt):
            wait(handle)
        with pytest.raises(kfcomm.CollectiveAborted, match="'a' was cancelled on rank 0"):
            comms[1].all_reduce(1, "a")


def test_ctrl_c_in_the_midst_of_the_work_closes_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    with sync_world(2) as comms:
        engine = comms[0]._inner._session.engine
        post = engine.post

        def posted(*args: Any, **kwargs: Any) -> None:
            post(*args, **kwargs)
            interrupt()

        monkeypatch.setattr(engine, "post", posted)
        with pytest.raises(KeyboardInterrupt):
            comms[0].all_reduce(1, "a")
        with pytest.raises(kfcomm.CollectiveAborted, match="interrupted at its work"):
            comms[1].all_reduce(1, "a")
        with pytest.raises(kfcomm.SessionClosed, match="interrupted at its work"):
            comms[0].barrier()


# ---------------------------------------------------------------- the end


def test_a_world_of_one_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with kfcomm.sync.init(device="none") as comm:  # else a thread of the loop has looked for one
        assert {thread.name for thread in set(threading.enumerate()) - before} == {"kfcomm-io", "kfcomm-live"}
        assert (comm.rank, comm.size) == (0, 1)
        assert comm.all_reduce(np.ones(2)).tolist() == [1, 1]
    comm.close()
    assert set(threading.enumerate()) == before
    for refused in (comm.barrier, comm.barrier_async, lambda: comm.save("x", 1), lambda: comm.group([0])):
        with pytest.raises(kfcomm.SessionClosed):
            refused()


def test_settings_that_cannot_work_are_refused_before_a_thread_starts() -> None:
    with pytest.raises(kfcomm.ConfigError, match="strategy"):
        kfcomm.sync.init(strategy="nonsense")
    with pytest.raises(kfcomm.ConfigError, match="timeout"):
        kfcomm.sync.init(timeout=-1)
    assert not [thread for thread in threading.enumerate() if thread.name == "kfcomm-io"]


def test_closing_from_many_threads_at_once() -> None:
    comm = kfcomm.sync.init()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [one.result() for one in [pool.submit(comm.close) for _ in range(8)]] == [None] * 8


def test_closing_ends_every_wait() -> None:
    with sync_world(2) as comms:
        sub = run_threads(comms, lambda comm: comm.group([0, 1], "sub"))
        waits = [
            comms[0].all_reduce_async(1, "a"),
            comms[0].recv_async(1),
            comms[0].queue("q", 1, 0).get_async(),
            sub[0].all_reduce_async(1, "a"),
            sub[0].recv_async(1),
        ]
        run_threads(comms, lambda comm: comm.close())
        ends = [type(wait.exception(timeout=60)) for wait in waits[:-1]]
    assert ends == [kfcomm.CollectiveAborted, kfcomm.SessionClosed, kfcomm.SessionClosed, kfcomm.CollectiveAborted]
    assert isinstance(waits[-1].exception(), kfcomm.SessionClosed)


def test_the_first_rank_that_fails_ends_the_others() -> None:
    def main(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError
        comm.barrier()

    with sync_world(3) as comms, pytest.raises(ZeroDivisionError):
        run_threads(comms, main)


# ---------------------------------------------------------------- real processes

HEAD = "import os, sys, numpy as np, kfcomm\ncomm = kfcomm.sync.init()\n"


def run(ranks: int, program: str) -> Any:
    python = [sys.executable, "-W", "error"]
    return subprocess.run(
        [*python, "-m", "kfcomm", "run", "-n", str(ranks), *python, "-c", HEAD + program],
        env=environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_program_that_never_closes_ends_quietly() -> None:
    done = run(3, "print(int(comm.all_reduce(1)))")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] 3", "[1] 3", "[2] 3"]


def test_a_program_that_fails_shows_its_own_error_only() -> None:
    done = run(1, "comm.all_reduce_async(1)\nraise SystemExit('no more')")
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "[0] no more")
    assert "Traceback" not in done.stderr


def test_the_goodbye_of_a_program_that_ends_comes_at_once_to_those_who_wait() -> None:
    done = run(
        2,
        "if comm.rank == 0:\n"
        "    try:\n        comm.all_reduce(1, 'a')\n"
        "    except kfcomm.PeerLost as error:\n        print(error)\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 1 has left" in done.stdout


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    done = run(
        2,
        "handle = comm.all_reduce_async(1, 'a') if comm.rank == 0 else None\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    calls = [lambda: comm.all_reduce(1, 'a'), comm.barrier_async, lambda: comm.save('x', 1)]\n"
        "    calls += [] if handle is None else [handle.wait]\n"
        "    told = 0\n"
        "    for call in calls:\n"
        "        try:\n            call()\n"
        "        except kfcomm.SessionClosed as error:\n            told += 'parent' in str(error)\n"
        "    comm.close()\n"
        "    sys.exit(0 if told == len(calls) else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "print(int(comm.all_reduce(1, 'a') if handle is None else handle.wait()))\n"
        "comm.close()\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"]
