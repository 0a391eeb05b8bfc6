"""Handles used in place of their results: the error names the call, and says what to write."""

from __future__ import annotations

import asyncio
import copy
import operator
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.testing import sync_world, world

X = np.ones(2)

USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda handle: handle + 1,
    "sum from the right": lambda handle: 1 + handle,
    "sum with an array": lambda handle: X + handle,
    "difference in place": lambda handle: operator.isub(handle, 1),
    "matrix product": lambda handle: X @ handle,
    "sign": operator.neg,
    "comparison": lambda handle: handle < 1,
    "float": float,
    "int": int,
    "index": lambda handle: [1, 2][handle],
    "item": lambda handle: handle[0],
    "assignment": lambda handle: operator.setitem(handle, 0, 1),
    "length": len,
    "iteration": list,
    "membership": lambda handle: 1 in handle,
    "array": np.asarray,
    "array of several": lambda handle: np.array([handle, handle]),
    "mean": np.mean,
    "format": lambda handle: f"{handle:.3f}",
    "shape": lambda handle: handle.shape,
    "method": lambda handle: handle.tolist(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.asyncio
async def test_a_forgotten_await_is_told(use: str) -> None:
    async with world(2) as (one, other):
        handle = one.all_reduce(X, "grad/0")
        with pytest.raises((TypeError, AttributeError), match=r"the handle of all_reduce 'grad/0'.*y = await handle"):
            USES[use](handle)
        await asyncio.gather(handle, other.all_reduce(X, "grad/0"))
        with pytest.raises((TypeError, AttributeError), match="y = await handle"):
            USES[use](handle)


@pytest.mark.asyncio
async def test_a_handle_is_true_as_other_futures_are() -> None:
    async with world(1) as (comm,):
        handle = comm.barrier()
        assert handle
        assert (handle or None) is handle
        await handle


@pytest.mark.parametrize("use", USES)
def test_a_forgotten_wait_is_told(use: str) -> None:
    with sync_world(1) as (comm,):
        handle = comm.all_reduce_async(X)
        with pytest.raises((TypeError, AttributeError), match=r"of all_reduce.*handle.wait\(\).*or call all_reduce"):
            USES[use](handle)
        handle.wait()


def test_a_handle_is_no_array_of_a_verb() -> None:
    with sync_world(1) as (comm,), pytest.raises(kfcomm.ConfigError, match=r"handle.wait\(\)"):
        comm.all_reduce(comm.all_reduce_async(X))


@pytest.mark.asyncio
async def test_handles_are_futures_nevertheless() -> None:
    async with world(2) as comms:
        done, pending = await asyncio.wait([asyncio.ensure_future(comm.barrier()) for comm in comms])
        assert (len(done), len(pending)) == (2, 0)
        assert await asyncio.wait_for(asyncio.gather(*(comm.barrier() for comm in comms)), None) == [None, None]
        handle = comms[0].barrier()
        assert handle == handle

        assert not hasattr(handle, "shape")
        assert copy.copy([handle]) == [handle]
        await asyncio.gather(handle, comms[1].barrier())
    with sync_world(1) as (comm,):
        begun = comm.all_reduce_async(X)
        assert futures.wait([begun]).done == {begun}
        assert list(futures.as_completed([begun])) == [begun]
        assert (await asyncio.wrap_future(begun)).tolist() == X.tolist()
        assert str(begun) == f"{begun}"
