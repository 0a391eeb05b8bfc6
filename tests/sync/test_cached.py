"""Blocking calls like the one before: every verb that can be compiled, in every form of parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import ConfigError, InternalError
from kfcomm.sync import Communicator, adapter
from kfcomm.testing import run_threads, sync_world
from tests.conformance.worlds import same_bits
from tests.sync.worlds import Call, joined

SIZE, ROOT = 2, 1
XS = [np.arange(8, dtype=np.float32).reshape(4, 2) * (rank + 1) for rank in range(SIZE)]
SUM = XS[0] + XS[1]
STACKED = np.stack(XS)
SHARED = np.concatenate

CALLS: dict[str, tuple[Callable[[Communicator, Any], Any], list[Any]]] = {
    "all_reduce": (lambda comm, x: comm.all_reduce(x, "x"), [SUM, SUM]),
    "all_reduce, op": (lambda comm, x: comm.all_reduce(x, name="x", op="max"), [XS[1], XS[1]]),
    "reduce": (lambda comm, x: comm.reduce(x, ROOT, "x"), [None, SUM]),
    "reduce, op": (lambda comm, x: comm.reduce(x, root=ROOT, name="x", op="min"), [None, XS[0]]),
    "broadcast": (lambda comm, x: comm.broadcast(x, ROOT, "x"), [XS[1], XS[1]]),
    "gather": (lambda comm, x: comm.gather(x, ROOT, name="x"), [None, STACKED]),
    "all_gather": (lambda comm, x: comm.all_gather(x, "x"), [STACKED, STACKED]),
    "reduce_scatter": (lambda comm, x: comm.reduce_scatter(x, "x"), [SUM[:2], SUM[2:]]),
    "all_to_all": (lambda comm, x: comm.all_to_all(x, "x"), [SHARED([x[:2] for x in XS]), SHARED([x[2:] for x in XS])]),
    "barrier": (lambda comm, x: comm.barrier("x"), [None, None]),
    "out": (lambda comm, x: comm.all_gather(x, "x", out=np.empty_like(STACKED)), [STACKED, STACKED]),
    "out, axes joined": (
        lambda comm, x: comm.all_gather(x, "x", out=np.empty(16, np.float32)),
        [STACKED.reshape(-1)] * 2,
    ),
    "out, axes split": (lambda comm, x: comm.all_reduce(x.reshape(-1), "x", out=np.empty_like(x)), [SUM, SUM]),
    "in place": (lambda comm, x: comm.all_reduce(y := x.copy(), "x", out=y), [SUM, SUM]),
}


def assert_right(result: Any, wanted: Any) -> None:
    assert result is None if wanted is None else same_bits(result, wanted)


class Begun:
    """A communicator whose verbs begin and wait."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, verb: str) -> Any:
        return lambda *args, **options: getattr(self._comm, f"{verb}_async")(*args, **options).wait()


@pytest.mark.parametrize("form", [lambda comm: comm, Begun], ids=["blocking", "begun"])
@pytest.mark.parametrize("case", CALLS)
def test_a_call_like_the_one_before_goes_the_short_way(case: str, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call, wanted = CALLS[case]

    def never(*_: Any) -> Any:
        raise AssertionError("this call goes the long way")

    with sync_world(SIZE) as comms:
        for number in range(4):
            if number == 1:
                monkeypatch.setattr(adapter, "_bound", never)
            results = run_threads(comms, lambda comm: call(form(comm), XS[comm.rank]))
            for result, one in zip(results, wanted, strict=True):
                assert_right(result, one)


@pytest.mark.parametrize("is_late", [False, True])
def test_failing_fold_in_a_slot_fails_everywhere(is_late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At the first look, if this rank is late, or at a later one."""

    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    x = XS[0].reshape(-1)
    with joined("shm") as (one, other):
        run_threads([one, other], lambda comm: comm.set_strategy("direct"))
        for _ in range(4):
            run_threads([one, other], lambda comm: comm.all_reduce(x, "x"))
        slot = one._inner._group.compiled["x"].series.slot
        assert slot is not None
        slot.combine = broken
        if is_late:
            theirs = other.all_reduce_async(x, "x").wait
        else:
            theirs = Call(other.all_reduce, x, "x").result
        with pytest.raises(InternalError, match="no room") as failed:
            one.all_reduce(x, "x")
        del failed
        with contextlib.suppress(InternalError):  # it may have been complete there
            theirs()
        caplog.clear()  # the error's frames hold the slot
        for result in run_threads([one, other], lambda comm: comm.all_reduce(x, "x")):
            assert_right(result, 2 * x)


def test_calls_of_all_kinds_under_one_name_and_none() -> None:
    with sync_world(SIZE) as comms:
        for case in [*CALLS, *reversed(CALLS)]:
            call, wanted = CALLS[case]
            for _ in range(2):
                results = run_threads(comms, lambda comm, call=call: call(comm, XS[comm.rank]))
                for result, one in zip(results, wanted, strict=True):
                    assert_right(result, one)


MPI_OUTS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "scatter": (lambda comm, rows, out: comm.scatter(rows if comm.rank == 0 else None, out=out), (4,)),
    "reduce_scatter": (lambda comm, rows, out: comm.reduce_scatter(rows, out=out), (4,)),
    "all_to_all": (lambda comm, rows, out: comm.all_to_all(rows, out=out), (4 * SIZE,)),
    "all_gather": (lambda comm, rows, out: comm.all_gather(rows, out=out), (4 * SIZE * SIZE,)),
    "a group": (lambda comm, rows, out: comm.group(range(SIZE)).reduce_scatter(rows, out=out), (4,)),
    "async": (lambda comm, rows, out: comm.reduce_scatter_async(rows, out=out).wait(), (4,)),
    "persistent": (lambda comm, rows, out: _started_twice(comm.reduce_scatter_init(rows, out=out)), (4,)),
    "persistent scatter": (lambda comm, rows, out: _started_twice(comm.scatter_init(rows, out=out)), (4,)),
}


def _started_twice(exchange: Any) -> Any:
    exchange.run()
    return exchange.run()


@pytest.mark.parametrize("case", MPI_OUTS)
def test_out_has_the_shape_that_mpi_gives_it(case: str) -> None:
    call, shape = MPI_OUTS[case]
    given = [np.arange(4 * SIZE, dtype=np.int64).reshape(SIZE, 4) + 100 * rank for rank in range(SIZE)]
    wanted: dict[str, Any] = {
        "all_to_all": [np.stack([rows[rank] for rows in given]) for rank in range(SIZE)],
        "all_gather": [np.stack(given)] * SIZE,
        "scatter": list(given[0]),
        "persistent scatter": list(given[0]),
    }
    with sync_world(SIZE) as comms:
        outs = [np.zeros(shape, np.int64) for _ in range(SIZE)]
        for _ in range(3):
            results = run_threads(comms, lambda comm: call(comm, given[comm.rank], outs[comm.rank]))
            for result, out, one in zip(results, outs, wanted.get(case, list(sum(given))), strict=True):
                assert result is out
                assert np.array_equal(out, one.reshape(-1))


def test_invalid_arguments_are_refused_each_time() -> None:
    with sync_world(1) as comms:
        for _ in range(3):
            comms[0].reduce(XS[0], 0, "x")
            with pytest.raises(ConfigError, match="not a rank"):
                comms[0].reduce(XS[0], 0.0, "x")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="has shape"):
                comms[0].reduce(XS[0], 0, "x", out=np.empty(3, np.float32))
            with pytest.raises(ConfigError, match="timeout"):
                comms[0].barrier("x", timeout=-1)
