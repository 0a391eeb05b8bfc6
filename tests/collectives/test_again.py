"""A call like one before goes a shorter way: it gives what the first one gave, wherever the result goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.errors import ConfigError
from tests.conformance.worlds import everywhere, on_loop, same_bits, world

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


@pytest.mark.parametrize("place", PLACES)
@on_loop
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


@on_loop
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
@on_loop
async def test_an_out_that_cannot_be_is_refused_each_time(out: Any, message: str) -> None:
    async with world(1) as comms:
        for _ in range(3):
            await comms[0].all_reduce(given(0), "x")
            with pytest.raises(ConfigError, match=message):
                await comms[0].all_reduce(given(0), "x", out=out)


@on_loop
async def test_an_input_that_is_read_only_is_no_out() -> None:
    x = _read_only(given(0))
    async with world(1) as comms:
        for _ in range(3):
            await comms[0].all_reduce(x, "x")
            with pytest.raises(ConfigError, match="read-only"):
                await comms[0].all_reduce(x, "x", out=x)
