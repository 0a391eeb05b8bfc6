"""A strategy for one call in an elastic job: a call that fewer ranks repeat takes graphs that these can have."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.elastic import Elastic, State
from kfcomm.errors import ConfigError
from kfcomm.strategies import from_edges
from tests.elastic.support import die

CHAIN = from_edges(4, [(0, 1), (1, 2), (2, 3)], name="chain of four")


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", ["ring", "direct", {"<=1KiB": "star", "else": "ring"}, CHAIN], ids=str)
@pytest.mark.parametrize("length", [3, 50_000])
async def test_call_with_a_strategy_survives_the_loss_of_a_rank(strategy: Any, length: int) -> None:
    async with testing.world(4, transport="memory", elastic=True, timeout=60) as comms:
        begun = asyncio.Barrier(4)

        async def main(comm: Any) -> Any:
            async with Elastic(comm, State(x=np.zeros(1))) as elastic:
                x = np.full(length, comm.rank + 1.0)
                first = await comm.all_reduce(x, "x", strategy=strategy)
                await begun.wait()
                if comm.rank == 2:
                    die(comms, comm)
                handle = comm.all_reduce(x, "y", strategy=strategy)
                second = await handle
                many = await comm.all_reduce_many({"a": x}, "z", strategy=strategy)
                assert handle.contributors is not None
                assert elastic.num_changes == 1
                return first[0], second[0], many["a"][0], handle.contributors

        found = await asyncio.gather(*map(main, comms), return_exceptions=True)
        rest = [one for rank, one in enumerate(found) if rank != 2]
        assert rest == [(10.0, 7.0, 7.0, (0, 1, 3))] * 3


@pytest.mark.asyncio
async def test_graphs_of_other_sizes_are_refused_when_no_rank_was_lost() -> None:
    async with testing.world(2, transport="memory", elastic=True, timeout=60) as comms:

        async def main(comm: Any) -> None:
            async with Elastic(comm, State(x=np.zeros(1))):
                with pytest.raises(ConfigError, match="is for 4 ranks, not for 2"):
                    await comm.all_reduce(np.ones(2), "x", strategy=CHAIN)
                assert (await comm.all_reduce(np.ones(2), "y", strategy="ring")).tolist() == [2, 2]

        await asyncio.gather(*map(main, comms))
