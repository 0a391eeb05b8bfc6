"""A call like one before goes a shorter way: it gives what the first one gave, wherever the result goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, ConfigError
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import ends, everywhere, same_bits, world

SIZE = 3


def given(rank: int) -> Any:
    return np.arange(12, dtype=np.float32).reshape(3, 4) + rank


WANTED = sum(given(rank) for rank in range(SIZE))


def _strided(x: Any) -> Any:
    return np.empty((4, 3), np.float32).T


def _read_only(x: Any) -> Any:
    out = np.empty_like(x)
    out.flags.writeable = False
    return out


PLACES = {
    "nowhere": lambda x: None,
    "the input": lambda x: x,
    "another array": np.empty_like,
    "a view of the input": lambda x: x[:],
    "a strided array": _strided,
    "the other byte order": lambda x: np.empty(x.shape, ">f4"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("place", PLACES)
async def test_the_result_goes_where_it_should_each_time(place: str) -> None:
    async with world(SIZE) as comms:
        for _ in range(3):
            xs = [given(rank) for rank in range(SIZE)]
            outs = [PLACES[place](x) for x in xs]
            results = await everywhere(
                comms, lambda comm, xs=xs, outs=outs: comm.all_reduce(xs[comm.rank], "x", out=outs[comm.rank])
            )
            for result, out, x, rank in zip(results, outs, xs, range(SIZE), strict=True):
                assert same_bits(np.asarray(result, np.float32), WANTED)
                assert out is None or result is out
                assert place in ("the input", "a view of the input") or same_bits(x, given(rank))


@pytest.mark.asyncio
async def test_an_out_that_overlaps_its_input_is_right_each_time() -> None:
    async with world(SIZE) as comms:
        for _ in range(3):
            memory = [np.arange(13, dtype=np.float32) + rank for rank in range(SIZE)]
            results = await everywhere(
                comms,
                lambda comm, memory=memory: comm.all_reduce(memory[comm.rank][:12], "x", out=memory[comm.rank][1:]),
            )
            for result in results:
                assert same_bits(result, SIZE * np.arange(12, dtype=np.float32) + 3)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.empty((4, 3), np.float32), "has shape"),
        (np.empty((3, 4)), "has dtype"),
        (_read_only(given(0)), "read-only"),
        ("text", "str"),
    ],
    ids=["shape", "dtype", "read-only", "no array"],
)
async def test_an_out_that_cannot_be_is_refused_each_time(out: Any, message: str) -> None:
    async with world(1) as comms:
        for _ in range(3):
            await comms[0].all_reduce(given(0), "x")
            with pytest.raises(ConfigError, match=message):
                await comms[0].all_reduce(given(0), "x", out=out)


@pytest.mark.asyncio
async def test_an_input_that_is_read_only_is_no_out() -> None:
    x = _read_only(given(0))
    async with world(1) as comms:
        for _ in range(3):
            await comms[0].all_reduce(x, "x")
            with pytest.raises(ConfigError, match="read-only"):
                await comms[0].all_reduce(x, "x", out=x)


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
        for _ in range(2):
            assert_got(verb, await everywhere(comms, lambda comm: called(verb, comm)))
        with pytest.raises(AssertionError, match="long way"):
            called(verb, comms[0], timeout=5)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "barrier"])
@pytest.mark.parametrize("make", [np.empty_like, lambda x: np.empty(x.shape[::-1], x.dtype).T], ids=["new", "strided"])
async def test_the_result_of_every_verb_goes_where_it_should(verb: str, make: Callable[[Any], Any]) -> None:
    async with world(SIZE) as comms:
        for _ in range(3):
            outs = [None if wanted is None else make(wanted) for wanted in VERBS[verb][1]]
            results = await everywhere(comms, lambda comm, outs=outs: called(verb, comm, out=outs[comm.rank]))
            assert_got(verb, results)
            assert all(result is out for result, out in zip(results, outs, strict=True))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_reduce"])
async def test_a_result_may_overlap_the_input(verb: str) -> None:
    """An ``out`` that overlaps the input is written after the input was read."""
    async with world(SIZE) as comms:
        for shift in (0, 0, 0, 1, 1, 1):
            memory = [np.zeros(40, np.float32) for _ in comms]

            def call(comm: Communicator, memory: list[Any] = memory, shift: int = shift) -> Any:
                x = memory[comm.rank][:12].reshape(3, 4)
                x[...] = XS[comm.rank]
                wanted = VERBS[verb][1][comm.rank]
                out = memory[comm.rank][shift : shift + wanted.size].reshape(wanted.shape)
                return getattr(comm, verb)(x, name="x", out=out, **VERBS[verb][0])

            assert_got(verb, await everywhere(comms, call))


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
    async with world(SIZE, tombstones=True) as comms:
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
