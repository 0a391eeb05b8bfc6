"""Engine over links that release a payload at once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kfcomm import testing
from kfcomm.core.graph import Graph
from kfcomm.transports.shm.segment import Arena
from tests.conformance.worlds import turns, works

X = np.ones(3)


@pytest.mark.asyncio
async def test_call_that_ends_in_its_post_has_released_its_payload() -> None:
    """Its caller may block the loop from now on: the others must not wait for its next turn."""
    async with testing.world(2, strategy="star", transport="shm") as comms:
        await works(comms)
        leaf = comms[1].all_reduce(X, "x")
        while not any(key.early for key in comms[0]._session.engine.router.names):
            await turns(1)
        root = comms[0].all_reduce(X, "x")
        assert root.done()
        assert not comms[0]._session.engine.links.dirty
        assert (await leaf).tolist() == root.result().tolist() == [2.0] * 3


@pytest.mark.asyncio
async def test_a_partial_result_is_made_where_it_is_sent_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chain, and of several children; not where little is sent, or where what is sent is converted."""
    made: list[int] = []
    reserve = Arena.reserve

    def counted(arena: Arena, nbytes: int) -> memoryview | None:
        made.append(nbytes)
        return reserve(arena, nbytes)

    monkeypatch.setattr(Arena, "reserve", counted)
    count = 3000
    for edges, partials in (([(0, 1), (1, 2), (2, 3)], 2), ([(0, 1), (1, 2), (1, 3)], 1)):
        async with testing.world(4, strategy=Graph.from_edges(4, edges), transport="shm") as comms:
            await works(comms)
            for dtype, itemsize in (("f4", 4), ("f2", 4), ("f8", 8)):
                made.clear()
                x = np.arange(count, dtype=dtype) % 100
                sums = await asyncio.gather(*(comm.all_reduce(x * (comm.rank + 1), dtype) for comm in comms))
                assert all((one == x * 10).all() for one in sums)
                assert made == [count * itemsize] * partials
            made.clear()
            await asyncio.gather(*(comm.all_reduce(x[:100], "little") for comm in comms))
            await asyncio.gather(*(comm.all_reduce(x, "converted", wire_dtype="float16") for comm in comms))
            assert not made
