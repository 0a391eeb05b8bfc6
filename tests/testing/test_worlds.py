"""`kfcomm.testing`: what users get for their own tests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.errors import ConfigError, PeerLost, SessionClosed
from kfcomm.testing import MemoryWorld, run_ranks, world
from tests.conformance.worlds import turns


@pytest.mark.asyncio
async def test_a_world_is_a_sequence_of_communicators() -> None:
    async with world(3, hosts=2) as comms:
        assert len(comms) == 3
        assert [comm.rank for comm in comms] == [0, 1, 2]
        assert comms[-1].rank == 2
        assert [comm.rank for comm in comms[1:]] == [1, 2]
        assert comms[0].layout.hosts == (0, 0, 1)
        assert {comm.epoch for comm in comms} == {0}
        assert [(comm.local_rank, comm.local_size) for comm in comms] == [(0, 2), (1, 2), (0, 1)]
        assert repr(comms[1]) == "<Communicator 'world', rank 1 of 3, open>"


@pytest.mark.asyncio
async def test_a_world_of_one() -> None:
    async with world(1) as (comm,):
        x = np.arange(4)
        assert (await comm.all_reduce(x)).tolist() == [0, 1, 2, 3]
        assert (await comm.all_gather(x)).tolist() == [[0, 1, 2, 3]]
        assert await comm.all_gather_object("x") == ["x"]
        assert (await comm.all_to_all([x]))[0].tolist() == [0, 1, 2, 3]
        assert await comm.barrier() is None
        await comm.set_strategy("ring")
        sub = await comm.split(1)
        assert sub is not None
        assert (await sub.reduce_scatter(x)).tolist() == [0, 1, 2, 3]
        comm.save("b", x)
        assert (await comm.request("b", 0)).tolist() == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_run_ranks() -> None:
    async with world(3) as comms:

        async def main(comm: kfcomm.Communicator) -> Any:
            return (await comm.all_reduce([comm.rank])).tolist()

        assert await run_ranks(comms, main) == [[3]] * 3
        assert [one.tolist() for one in await run_ranks(comms, lambda comm: comm.all_reduce([1]))] == [[3]] * 3

        async def fails(comm: kfcomm.Communicator) -> None:
            if comm.rank == 1:
                raise OSError("disk full")
            await comm.barrier("k")

        with pytest.raises(OSError, match="disk full"):
            await run_ranks(comms, fails)


@pytest.mark.asyncio
async def test_the_error_that_all_ranks_share_is_raised_itself() -> None:
    async with world(2) as comms:

        async def alike(comm: kfcomm.Communicator) -> None:
            try:
                raise KeyError(comm.rank)
            except KeyError as error:
                raise OSError("disk full") from error

        with pytest.raises(OSError, match="disk full") as raised:
            await run_ranks(comms, alike)
        assert isinstance(raised.value.__cause__, KeyError)

        async def unlike(comm: kfcomm.Communicator) -> None:
            raise OSError if comm.rank else KeyError

        with pytest.raises(ExceptionGroup):
            await run_ranks(comms, unlike)


@pytest.mark.asyncio
async def test_worlds_side_by_side() -> None:
    async with world(2) as one, world(3) as other:
        handles = [comm.all_reduce([1], "same") for comm in (*one, *other)]
        assert [got.tolist() for got in await asyncio.gather(*handles)] == [[2], [2], [3], [3], [3]]
        one.kill(0)
        await turns()
        with pytest.raises(PeerLost):
            await one[1].barrier()
        assert len(await asyncio.gather(*(comm.barrier() for comm in other))) == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [{"size": 0}, {"size": 2, "hosts": 3}, {"size": 2, "strategy": "rign"}])
async def test_worlds_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  a ConfigError or a ValueError of the layout: the type is the point
        async with world(**bad):
            pass


@pytest.mark.asyncio
async def test_killed_twice_and_closed_after() -> None:
    comms = MemoryWorld(3)
    mine = comms[1].all_reduce([1])
    comms.kill(1)
    comms.kill(1)
    with pytest.raises(PeerLost, match="rank 1"):
        await comms[0].barrier()
    await comms.close()
    await asyncio.gather(mine, return_exceptions=True)
    for comm in comms:
        with pytest.raises(SessionClosed):
            comm.barrier()
    await comms.close()


@pytest.mark.asyncio
async def test_an_error_in_the_body_closes_the_world() -> None:
    begun: list[asyncio.Future[None]] = []

    async def body() -> None:
        async with world(2) as comms:
            begun.append(comms[0].barrier())
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await body()
    assert isinstance(begun[0].exception(), kfcomm.KfcommError)


@pytest.mark.asyncio
async def test_alone_through_init() -> None:
    async with kfcomm.init() as comm:
        assert (comm.rank, comm.size) == (0, 1)
        assert (await comm.all_reduce(np.ones(2))).tolist() == [1.0, 1.0]
        with pytest.raises(ConfigError):
            comm.send(1.0, 0)
    with pytest.raises(SessionClosed):
        comm.barrier()
