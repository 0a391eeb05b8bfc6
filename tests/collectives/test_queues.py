"""Queues between two ranks: ordered, bounded, and broken for good once an array is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kfcomm.errors import CollectiveTimeout, ConfigError, PeerLost
from tests.conformance.worlds import assert_kinds, same_bits, turns, until, world

SHORT_S = 0.05
X = np.arange(5)


@pytest.mark.asyncio
async def test_queue_order_and_bound() -> None:
    async with world(2) as comms:
        ways = [comm.queue("q", 0, 1, capacity=3) for comm in comms]
        put: list[int] = []

        async def fill() -> None:
            for number in range(20):
                await ways[0].put(np.full(number, number))
                put.append(number)

        filling = asyncio.ensure_future(fill())
        await turns(100)
        assert put == [0, 1, 2], "put waits once the queue is full"
        for number in range(20):
            assert (await ways[1].get()).tolist() == [number] * number
            await until(lambda: len(put) >= min(20, number + 4))  # noqa: B023  called in this turn alone
            await turns()
            assert len(put) == min(20, number + 4)
        await filling


@pytest.mark.asyncio
async def test_a_queue_takes_copies() -> None:
    async with world(2) as comms:
        ways = [comm.queue("q", 1, 0) for comm in comms]
        x = np.zeros(3)
        for number in range(4):
            x[:] = number
            await ways[1].put(x)
        x[:] = -1
        assert [(await ways[0].get())[0] for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_queues_by_name_and_their_ends() -> None:
    async with world(2) as comms:
        a, b = ([comm.queue(name, 0, 1) for comm in comms] for name in ("a", "b"))
        back = [comm.queue("a", 1, 0) for comm in comms]
        await a[0].put([1])
        await b[0].put([2])
        await back[1].put([3])
        assert [(await one.get()).tolist() for one in (b[1], a[1], back[0])] == [[2], [1], [3]]
        with pytest.raises(ConfigError, match="source"):
            await a[1].put([1])
        with pytest.raises(ConfigError, match="target"):
            await a[0].get()


@pytest.mark.asyncio
async def test_array_refused_by_a_queue_uses_no_capacity() -> None:
    async with world(2) as comms:
        ways = [comm.queue("q", 0, 1, capacity=1) for comm in comms]
        for _ in range(3):
            with pytest.raises(ConfigError):
                await ways[0].put(np.array(["x"]))
        await ways[0].put(X)
        waiting = asyncio.ensure_future(ways[0].put(X + 1))
        await turns()
        waiting.cancel()
        with pytest.raises(CollectiveTimeout, match="is still full"):
            await ways[0].put(X, timeout=SHORT_S)
        with pytest.raises(CollectiveTimeout):
            await comms[1].recv(0, timeout=0)
        assert same_bits(await ways[1].get(), X)
        await ways[0].put(X + 2)
        assert same_bits(await ways[1].get(), X + 2)


@pytest.mark.asyncio
async def test_a_queue_that_breaks() -> None:
    """Present and later calls of ``put`` raise, and asyncio reports no unretrieved error."""
    async with world(2, aborted=True) as comms:
        ways = [comm.queue("q", 0, 1, capacity=2) for comm in comms]
        await ways[0].put(X)
        await ways[0].put(X)
        waiting = [asyncio.ensure_future(ways[0].put(X)) for _ in range(3)]
        await turns()
        comms.kill(1)
        assert_kinds(await asyncio.gather(*waiting, return_exceptions=True), PeerLost)
        with pytest.raises(PeerLost):
            await ways[0].put(X)
