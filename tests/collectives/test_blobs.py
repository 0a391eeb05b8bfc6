"""Blobs: named, versioned, fetched whole, and without a trace when a request is given up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveTimeout, PeerLost
from kfcomm.transports.shm.heap import Heap
from tests.conformance.worlds import assert_kinds, ends, same_bits, turns, until, works, world

SHORT_S = 0.05
X = np.arange(5)


def messages(comm: Any) -> int:
    """Messages that this process has sent."""
    return sum(peer.sent_messages for peer in comm.statistics().peers)


def received(comm: Any) -> int:
    """Bytes that this process has received."""
    return sum(peer.received_nbytes for peer in comm.statistics().peers)


@pytest.mark.asyncio
async def test_versions() -> None:
    async with world(2) as comms:
        a, b = comms
        with pytest.raises(CollectiveError, match="saved nothing as 'w'"):
            await b.request("w", 0)
        assert [a.save("w", X + number) for number in range(4)] == [0, 1, 2, 3]
        assert same_bits(await b.request("w", 0), X + 3)
        assert same_bits(await b.request("w", 0, version=2), X + 2)
        assert same_bits(await a.request("w", 0, version=2), X + 2)
        for asker in comms:
            with pytest.raises(CollectiveError, match=r"versions \[2, 3\] of 'w', not 1"):
                await asker.request("w", 0, version=1)
        assert a.save("w", np.empty((0, 3), np.float32), version=10) == 10
        assert (await b.request("w", 0)).shape == (0, 3)
        assert a.save("w", np.float16(2.5)) == 11
        assert same_bits(await b.request("w", 0), np.float16(2.5))
        # A copy both ways: neither side can change the other's.
        mine = X.copy()
        b.save("x", mine)
        mine[:] = -1
        got = await a.request("x", 1)
        got[:] = -2
        assert same_bits(await a.request("x", 1), X)
        (await b.request("x", 1))[:] = -3
        assert same_bits(await b.request("x", 1), X)


@pytest.mark.asyncio
async def test_many_requests_at_once_are_never_torn() -> None:
    async with world(3) as comms:
        big = 200_000
        for comm in comms:
            comm.save("w", np.full(big, 0))

        async def ask(comm: Any, number: int) -> Any:
            return await comm.request("w", (comm.rank + 1 + number % 2) % 3)

        async def keep_saving(comm: Any) -> None:
            for number in range(1, 40):
                comm.save("w", np.full(big, number))
                await turns(3)

        answers = await asyncio.gather(
            *(ask(comm, number) for number in range(12) for comm in comms), *map(keep_saving, comms)
        )
        for got in answers[:-3]:
            assert got.size == big
            assert got.min() == got.max()


@pytest.mark.asyncio
async def test_a_request_that_is_given_up() -> None:
    """Cancelled at any moment, or out of time: nothing stays behind, and the next one gets its own answer."""
    async with world(2, aborted=True) as comms:
        comms[0].save("big", np.ones(1_000_000))
        comms[0].save("small", X)
        comms[0].save("not asked for before", X)  # what was may be there at once
        for count in range(0, 24, 2):
            asking = asyncio.ensure_future(comms[1].request("big", 0))
            await turns(count)
            asking.cancel()
            assert same_bits(await comms[1].request("small", 0), X)
            await asyncio.gather(asking, return_exceptions=True)
        with pytest.raises(CollectiveTimeout):
            await comms[1].request("not asked for before", 0, timeout=0)
        for _ in range(3):
            assert same_bits(await comms[1].request("small", 0), X)
            with pytest.raises(CollectiveError, match="saved nothing"):
                await comms[1].request("other", 0)
        await works(comms)


@pytest.mark.asyncio
async def test_requests_by_polling_use_no_memory() -> None:
    async with world(2) as comms:
        for number in range(60):
            with pytest.raises(CollectiveError):
                await comms[1].request("later", 0)
            if number == 20:
                before = comms[1]._session.engine.router.num_keys
        assert comms[1]._session.engine.router.num_keys == before


@pytest.mark.asyncio
async def test_a_peer_is_lost_while_it_is_asked() -> None:
    async with world(3, aborted=True) as comms:
        comms[1].save("w", np.ones(1_000_000))
        asking = [asyncio.ensure_future(comms[rank].request("w", 1)) for rank in (0, 2)]
        await turns(3)
        comms.kill(1)
        assert_kinds(await asyncio.gather(*asking, return_exceptions=True), PeerLost)


@pytest.mark.asyncio
async def test_groups_have_messages_of_their_own() -> None:
    async with world(3) as comms:
        group = await asyncio.gather(*(comms[rank].group([2, 0]) for rank in (2, 0)))
        sent = [comms[2].send([1], 0), group[0].send([2], 1)]
        assert (await group[1].recv(0)).tolist() == [2]
        assert (await comms[0].recv(2)).tolist() == [1]
        await asyncio.gather(*sent)
        comms[2].save("w", [1])
        group[0].save("w", [2])
        assert (await group[1].request("w", 0)).tolist() == [2]
        assert (await comms[0].request("w", 2)).tolist() == [1]
        assert_kinds(await ends([group[1]], lambda comm: comm.recv(0, timeout=0)), CollectiveTimeout)


@pytest.mark.asyncio
async def test_requests_of_a_name_known_before_send_nothing_on_one_host() -> None:
    async with world(2) as comms:
        a, b = comms
        is_shared = a.shares_memory
        a.save("w", X)
        assert same_bits(await b.request("w", 0), X)
        before = messages(b)
        for number in range(20):  # of another size and dtype each time
            x = np.full(number * 1000, number, [np.float64, np.int8, np.float32][number % 3])
            assert a.save("w", x) == number + 1
            got = await b.request("w", 0)
            assert same_bits(got, x)
            assert got.dtype == x.dtype
            assert (await b.request("w", 0, version=number)).size == (5 if number == 0 else (number - 1) * 1000)
        assert (messages(b) == before) == is_shared
        with pytest.raises(CollectiveError, match=r"versions \[19, 20\] of 'w', not 7"):
            await b.request("w", 0, version=7)
        assert same_bits(await b.request("w", 0, version=20), x)


@pytest.mark.asyncio
async def test_bytes_read_in_memory_are_counted() -> None:
    async with world(2) as comms:
        a, b = comms
        a.save("w", np.zeros(10_000))
        await b.request("w", 0)
        before = received(b)
        await b.request("w", 0)
        assert received(b) - before >= 80_000


@pytest.mark.asyncio
async def test_requests_of_a_rank_that_has_closed_its_group_or_is_lost() -> None:
    async with world(3, aborted=True) as comms:
        group = await asyncio.gather(*(comm.group([0, 1, 2]) for comm in comms))
        for some in (group, comms):
            some[1].save("w", X)
            assert same_bits(await some[0].request("w", 1), X)
        await group[1].close()
        with pytest.raises((CollectiveTimeout, CollectiveAborted), match="rank 1"):
            await group[0].request("w", 1, timeout=SHORT_S)
        assert same_bits(await comms[0].request("w", 1), X)
        comms.kill(1)
        await until(lambda: comms[0]._session.engine.router.lost)
        with pytest.raises(PeerLost, match="rank 1"):
            await comms[0].request("w", 1)


@pytest.mark.asyncio
async def test_requests_after_a_change_of_ranks() -> None:
    async with world(3, quiet=False) as comms:
        for comm in comms:
            comm.save("w", X + comm.rank)
        for comm in comms:
            assert same_bits(await comm.request("w", 2), X + 2)
        await works(comms)  # by then answers are acknowledged: else their failure is logged
        comms.kill(1)
        left = await asyncio.gather(*(comms[rank].shrink() for rank in (0, 2)))
        for comm in left:
            with pytest.raises(CollectiveError, match="saved nothing"):  # it was of another epoch
                await comm.request("w", 1 - comm.rank)
        for comm in left:
            comm.save("w", X * 10 + comm.rank)
        for _ in range(3):
            for comm in left:
                assert same_bits(await comm.request("w", 1 - comm.rank), X * 10 + 1 - comm.rank)
        for comm in left:
            await comm.close()


@pytest.mark.asyncio
async def test_blobs_and_adasum_where_the_system_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heap, "__init__", broken)
    async with world(2) as comms:
        comms[0].save("w", X)
        for _ in range(3):
            assert same_bits(await comms[1].request("w", 0), X)
            found = await asyncio.gather(*(comm.all_reduce(np.ones(3), "g", op="adasum") for comm in comms))
            assert found[0].tolist() == [1, 1, 1]


def broken(_: Heap) -> None:
    raise AttributeError("module 'os' has no attribute 'memfd_create'")
