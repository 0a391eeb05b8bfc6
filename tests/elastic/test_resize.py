"""Other numbers of ranks by a call of all, without an Elastic."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, State
from kfcomm.errors import CollectiveTimeout, ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from tests.elastic.support import Died


async def total(comm: Any) -> float:
    return float((await comm.all_reduce(np.full(3, comm.births[comm.rank] + 1.0), "x"))[0])


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.asyncio
async def test_more_and_fewer(transport: Any) -> None:
    async with world(2, elastic=True, transport=transport) as comms:

        async def old(comm: Any) -> Any:
            assert await comm.resize(2)
            assert comm.epoch == 0  # nothing was to be done
            assert await comm.resize(4)
            found = [comm.size, comm.epoch, await total(comm)]
            return [*found, comm.size, await total(comm)] if await comm.resize(1) else found

        async def new(birth: int) -> Any:
            comm: Any = await comms.join(birth)
            found = [comm.size, comm.epoch, await total(comm)]
            assert not await comm.resize(1)
            return found

        members = list(comms)
        said = await asyncio.gather(*map(old, members), *map(new, (5, 7)))
        assert said == [[4, 1, 17.0, 1, 1.0], *[[4, 1, 17.0]] * 3]


@pytest.mark.asyncio
async def test_resize_times_out_without_joining_ranks() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> float:
            with pytest.raises(CollectiveTimeout, match=r"resize\(3\): 0 of 1 new ranks have come within 1 s"):
                await comm.resize(3, timeout=1.0)
            return await total(comm)

        assert await run_ranks(comms, main) == [3.0, 3.0]


@pytest.mark.asyncio
async def test_a_rank_dies_in_its_midst() -> None:
    """Of two that were to go one is dead by the time of the agreement."""
    async with world(4, elastic=True) as comms:
        doomed: Any = comms[3]._session

        async def main(comm: Any) -> Any:
            if comm.rank == 3:

                async def open_door(epoch: int) -> Any:
                    comms.kill(3)
                    raise Died

                doomed.network.open_door = open_door
                with pytest.raises(Died):
                    await comm.resize(2)
                return None
            stays = await comm.resize(2)
            return stays, comm.births if stays else None

        assert await run_ranks(comms, main) == [(True, (0, 1)), (True, (0, 1)), (False, None), None]


@pytest.mark.asyncio
async def test_invalid_sizes_are_refused() -> None:
    async with world(1, elastic=True) as comms:
        comm: Any = comms[0]
        for size in (0, -1, True, "2"):
            with pytest.raises(ConfigError, match="a size is a whole number"):
                await comm.resize(size)
        async with Elastic(comm, State()):
            with pytest.raises(ConfigError, match="while an Elastic is open"):
                await comm.resize(2)


def test_without_a_loop() -> None:
    with sync_world(3, elastic=True) as comms:

        def main(comm: Any) -> Any:
            return comm.resize(2) and comm.all_reduce(np.ones(1))[0]

        assert run_threads(list(comms), main) == [2.0, 2.0, False]
