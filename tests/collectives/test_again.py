"""A call like one before goes a shorter way: it gives what the first one gave, wherever the result goes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, ConfigError
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import ends, everywhere, same_bits, world

SIZE = 3


def given(rank: int) -> Any:
    return np.arange(12, dtype=np.float32).reshape(3, 4) + rank


WANTED = sum(given(rank) for rank in range(SIZE))


# ---------------------------------------------------------------- every verb that can be compiled

XS = [given(rank) for rank in range(SIZE)]
ROOT = 1


def _at_root(result: Any) -> list[Any]:
    return [result if rank == ROOT else None for rank in range(SIZE)]


VERBS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "all_reduce": ({"op": "sum"}, [WANTED] * SIZE),
    "reduce": ({"root": ROOT}, _at_root(WANTED)),
    "broadcast": ({"root": ROOT}, [XS[ROOT]] * SIZE),
    "gather": ({"root": ROOT}, _at_root(np.stack(XS))),
    "all_gather": ({}, [np.stack(XS)] * SIZE),
    "reduce_scatter": ({}, [WANTED[rank : rank + 1] for rank in range(SIZE)]),
    "all_to_all": ({}, [np.stack([x[rank] for x in XS]) for rank in range(SIZE)]),
    "barrier": ({}, [None] * SIZE),
}
"""What each is called with, and what each rank gets."""


def called(verb: str, comm: Communicator, **options: Any) -> Any:
    """One call with the input of this rank."""
    arrays = () if verb == "barrier" else (XS[comm.rank].copy(),)
    return getattr(comm, verb)(*arrays, name="x", **(VERBS[verb][0] | options))


def assert_got(verb: str, results: list[Any]) -> None:
    for result, wanted in zip(results, VERBS[verb][1], strict=True):
        assert result is None if wanted is None else same_bits(result, wanted)


def _never(*args: Any, **options: Any) -> Any:
    raise AssertionError("this call goes the long way")


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_a_call_like_the_one_before_goes_the_short_way(verb: str) -> None:
    async with world(SIZE) as comms:
        assert_got(verb, await everywhere(comms, lambda comm: called(verb, comm)))
        for comm in comms:
            comm._begin = _never  # type: ignore[method-assign]
        for limits in ({}, {}, {"timeout": 50}, {"timeout": timedelta(minutes=1)}, {"timeout": 50, "priority": 3}, {}):
            assert_got(verb, await everywhere(comms, lambda comm, limits=limits: called(verb, comm, **limits)))
        with pytest.raises(AssertionError, match="long way"):
            called(verb, comms[0], strategy="clique")


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_each_call_has_its_own_timeout(verb: str) -> None:
    async with world(SIZE, aborted=True) as comms:
        for timeout in (None, 60, None, 60):  # the last two in the short way
            await everywhere(comms, lambda comm, timeout=timeout: called(verb, comm, timeout=timeout))
        calls = [called(verb, comm, timeout=0.1) for comm in comms[:-1]]
        with pytest.raises(CollectiveTimeout, match=rf"within 0.1 s: .*missing ranks \[{SIZE - 1}\]"):
            await calls[0]
        for call in calls[1:]:
            with pytest.raises(CollectiveError):
                await call
        with pytest.raises(CollectiveError):
            await called(verb, comms[-1])
        for timeout in (None, 60):
            assert_got(verb, await everywhere(comms, lambda comm, timeout=timeout: called(verb, comm, timeout=timeout)))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "limits", [{"timeout": -1}, {"timeout": "5"}, {"priority": 1 << 20}, {"priority": 2.5}], ids=repr
)
async def test_limits_that_cannot_be_are_refused_each_time(limits: dict[str, Any]) -> None:
    async with world(SIZE, aborted=True) as comms:
        for _ in range(2):
            assert_got("all_reduce", await everywhere(comms, lambda comm: called("all_reduce", comm, timeout=50)))
            with pytest.raises(ConfigError):
                called("all_reduce", comms[0], **limits)
            rest = await ends(comms[1:], lambda comm: called("all_reduce", comm))
            assert [type(one) for one in rest] == [CollectiveAborted] * (SIZE - 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("other", VERBS)
async def test_one_name_serves_several_verbs(verb: str, other: str) -> None:
    async with world(SIZE) as comms:
        for each in (verb, other, other, verb, verb, other):
            assert_got(each, await everywhere(comms, lambda comm, each=each: called(each, comm)))


@pytest.mark.asyncio
@pytest.mark.parametrize("root", [1.0, np.array([1, 1]), "1", -1, SIZE, None, np.float64(1)], ids=repr)
@pytest.mark.parametrize("verb", ["reduce", "broadcast", "gather"])
async def test_a_root_that_is_no_rank_is_refused_each_time(verb: str, root: Any) -> None:
    async with world(SIZE, aborted=True) as comms:
        for name in ("x", "y"):
            assert_got(verb, await everywhere(comms, lambda comm: called(verb, comm)))
            with pytest.raises(ConfigError, match="is not a rank"):
                getattr(comms[0], verb)(XS[0], root, name)
            rest = await ends(comms[1:], lambda comm, name=name: getattr(comm, verb)(XS[comm.rank], ROOT, name))
            assert [type(one) for one in rest] == [CollectiveAborted] * (SIZE - 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["reduce", "broadcast", "gather"])
async def test_another_root_or_op_is_another_kind_of_call(verb: str) -> None:
    ops = ("sum", "max", "sum", "sum", "max") if verb == "reduce" else (None,) * 5
    async with world(SIZE) as comms:
        for root, op in zip((0, 0, 1, np.int64(1), 1), ops, strict=True):
            options = {} if op is None else {"op": op}
            results = await everywhere(
                comms, lambda comm, r=root, options=options: getattr(comm, verb)(XS[comm.rank], r, "x", **options)
            )
            whole = {"reduce": WANTED if op == "sum" else XS[-1], "broadcast": XS[root], "gather": np.stack(XS)}[verb]
            for rank, result in enumerate(results):
                assert same_bits(result, whole) if verb == "broadcast" or rank == root else result is None


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_reduce", "reduce", "reduce_scatter"])
async def test_an_op_of_another_library_goes_the_short_way(verb: str) -> None:
    async with world(SIZE) as comms:
        for op, want in ((np.add, "sum"), ("MAX", "max"), (min, "min"), ("mean", "avg")):
            usual = await everywhere(comms, lambda comm, op=want: called(verb, comm, op=op))
            await everywhere(comms, lambda comm, op=op: called(verb, comm, op=op))
            with pytest.MonkeyPatch.context() as patch:
                for comm in comms:
                    patch.setattr(comm, "_begin", _never)
                results = await everywhere(comms, lambda comm, op=op: called(verb, comm, op=op))
            assert all(np.array_equal(one, other) for one, other in zip(results, usual, strict=True))
