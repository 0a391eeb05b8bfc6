"""Collectives leave no reference cycles."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from kfcomm.engine.operation import Operation
from tests.conformance.worlds import everywhere, world

NUMBER = 200


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def operations() -> int:
    # by their types: asked for their class, objects of other libraries may run code, which may warn
    return sum(issubclass(type(one), Operation) for one in gc.get_objects())


@pytest.mark.asyncio
async def test_collectives_that_are_done_are_in_no_cycle() -> None:
    async with world(3) as comms:
        for verb in (
            lambda comm, name: comm.all_reduce(np.ones(8, np.float32), name),
            lambda comm, name: comm.all_reduce(np.ones((2, 4), np.float16), name, out=np.empty((2, 4), np.float16)),
            lambda comm, name: comm.broadcast(np.ones(8), 1, name),
            lambda comm, name: comm.gather(np.ones(8), 1, name),
            lambda comm, name: comm.barrier(name),
        ):
            await everywhere(comms, lambda comm, verb=verb: verb(comm, "first"))
            gc.collect()
            for number in range(NUMBER):
                await asyncio.gather(*(verb(comm, f"k{number % 3}") for comm in comms))
            assert operations() == 0
            assert gc.collect() < NUMBER


@pytest.mark.asyncio
async def test_a_handle_that_is_kept_keeps_no_collective() -> None:
    async with world(2) as comms:
        handles = [comm.all_reduce(np.ones(8), f"k{number}") for comm in comms for number in range(NUMBER)]
        assert operations() == 2 * NUMBER
        await asyncio.gather(*handles)
        assert operations() == 0


@pytest.mark.asyncio
async def test_collectives_that_were_cancelled_are_in_no_cycle() -> None:
    async with world(2) as comms:
        for number in range(NUMBER):
            handles = [comm.all_reduce(np.ones(8), "k") for comm in comms]
            handles[number % 2].cancel()
            await asyncio.gather(*handles, return_exceptions=True)
        del handles
        assert operations() == 0
