"""Small messages are copied, and their senders go on; how much there may be of it, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives.eager import EAGER_NBYTES, ROOM_MESSAGES, ROOM_NBYTES
from kfcomm.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from kfcomm.testing.worlds import run_threads, sync_world
from tests.conformance.worlds import same_bits, turns, until, world

X = np.arange(5)
LARGEST = np.arange(EAGER_NBYTES, dtype=np.uint8)


@pytest.mark.asyncio
@pytest.mark.parametrize("x", [X, LARGEST, np.float64(3.0), np.zeros(0)], ids=["small", "largest", "scalar", "empty"])
async def test_a_small_send_is_done_before_anybody_receives_and_its_array_is_free(x: Any) -> None:
    async with world(2) as comms:
        mine = np.array(x)
        sent = comms[0].send(mine, 1)
        assert sent.done()
        await sent
        mine += 1
        assert same_bits(await comms[1].recv(0), np.array(x))


@pytest.mark.asyncio
async def test_a_synchronous_or_large_send_is_done_when_it_is_received() -> None:
    async with world(2) as comms:
        for sent in (
            comms[0].send(X, 1, synchronous=True),
            comms[0].send_object({"a": 1}, 1, synchronous=True),
            comms[0].send(np.zeros(EAGER_NBYTES + 1, np.uint8), 1, "large"),
        ):
            await turns()
            assert not sent.done()
        await comms[1].recv(0)
        await comms[1].recv_object(0)
        await comms[1].recv(0, "large")


@pytest.mark.asyncio
async def test_messages_keep_their_order_whatever_their_size() -> None:
    async with world(2) as comms:
        sizes = [1, 100_000, 3, EAGER_NBYTES // 8, 200_000, 0, 7]
        sent = [comms[0].send(np.full(size, number), 1, synchronous=number == 3) for number, size in enumerate(sizes)]
        for number, size in enumerate(sizes):
            assert same_bits(await comms[1].recv(0), np.full(size, number))
        await asyncio.gather(*sent)


@pytest.mark.asyncio
@pytest.mark.parametrize(("x", "fit"), [(LARGEST, ROOM_NBYTES // EAGER_NBYTES), (X, ROOM_MESSAGES)])
async def test_send_beyond_the_limit_waits_for_its_receiver(x: Any, fit: int) -> None:
    async with world(3) as comms:
        sent = [comms[0].send(x, 1) for _ in range(fit + 1)]
        assert [one.done() for one in sent] == [True] * fit + [False]
        assert comms[0].send(x, 2).done()  # another receiver has room of its own
        for _ in range(fit):
            assert same_bits(await comms[1].recv(0), x)
        assert same_bits(await comms[1].recv(0), x)
        await sent[-1]
        assert comms[0].send(x, 1).done()
        await comms[1].recv(0)
        await comms[2].recv(0)


@pytest.mark.asyncio
async def test_late_failure_raises_at_the_receiver_and_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2) as comms:
        await comms[0].send(X, 1)
        with pytest.raises(CollectiveMismatch):
            await comms[1].recv(0, out=np.zeros(7))
        await until(lambda: "a message with tag 0 to rank 1 was sent and not received" in caplog.text)
        caplog.clear()
        await comms[0].send(X, 1, timeout=0.01)
        await until(lambda: "was sent and not received" in caplog.text)
        with pytest.raises(CollectiveTimeout):
            await comms[1].recv(0)


@pytest.mark.asyncio
async def test_a_receiver_that_is_lost_is_no_harm_to_who_has_sent(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2, aborted=True) as comms:
        await comms[0].send(X, 1)
        comms.kill(1)
        await until(lambda: "rank 1 is lost" in caplog.text)
        with pytest.raises(PeerLost):
            await comms[0].send(X, 1)


@pytest.mark.asyncio
async def test_a_sender_that_closes_sees_to_it_that_its_messages_are_received() -> None:
    async with world(2) as comms:
        await comms[0].send(X, 1)
        closing = asyncio.ensure_future(comms[0].close())
        await turns()
        assert not closing.done()
        assert same_bits(await comms[1].recv(0), X)
        await comms[1].close()
        await closing


@pytest.mark.asyncio
async def test_a_group_that_closes_does_too() -> None:
    async with world(2) as comms:
        pairs = await asyncio.gather(*(comm.group([0, 1]) for comm in comms))
        await pairs[0].send(X, 1)
        closing = asyncio.ensure_future(pairs[0].close())
        await turns()
        assert not closing.done()
        assert same_bits(await pairs[1].recv(0), X)
        await closing
        await pairs[1].close()


@pytest.mark.asyncio
async def test_rank_that_leaves_without_receiving_blocks_no_sender(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2) as comms:
        await comms[0].send(X, 1)
        await asyncio.gather(comms[0].close(), comms[1].close())
    assert "rank 1 has left" in caplog.text


def test_a_blocking_send_returns_too() -> None:
    def work(comm: Any) -> Any:
        if comm.rank == 0:
            comm.send(X, 1)  # before the other has begun to receive
            comm.barrier()
            comm.send(X + 1, 1, synchronous=True)
            return None
        comm.barrier()
        return [comm.recv(0).tolist(), comm.recv(0).tolist()]

    with sync_world(2) as comms:
        assert run_threads(comms, work)[1] == [X.tolist(), (X + 1).tolist()]
