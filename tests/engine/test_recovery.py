"""Broken links: calls that wait for lost chunks fail, later calls do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kfcomm.core.frame import Kind
from kfcomm.errors import CollectiveError, TransportError
from kfcomm.transports.memory import MemoryLink, MemoryNetwork
from tests.conformance.worlds import turns, works, world

X = np.ones(4)


@contextmanager
def losing_chunks(peer: int) -> Iterator[None]:
    """Links to ``peer`` say that they have sent what they lose."""
    send = MemoryLink.send

    def lose(link: MemoryLink, header: Any, *payload: Any) -> bool:
        return True if header[0] == Kind.CHUNK and link.peer == peer else send(link, header, *payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryLink, "send", lose)
        yield


@contextmanager
def no_connection(times: int) -> Iterator[None]:
    """So many attempts to open a link fail."""
    connect = MemoryNetwork.connect
    left = times

    def refuse(network: MemoryNetwork, rank: int, peer: int) -> MemoryLink:
        nonlocal left
        left -= 1
        if left >= 0:
            raise TransportError("no way")
        return connect(network, rank, peer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryNetwork, "connect", refuse)
        yield


async def lost_on_the_way(comms: Any) -> asyncio.Future[Any]:
    """Rank 0 has its result, rank 1 waits for it: what its handle waits for is lost."""
    await works(comms, "k")
    with losing_chunks(1):
        handles = [comm.all_reduce(X, "k") for comm in comms]
        await handles[0]
        await turns()
    assert not handles[1].done()
    waiting: asyncio.Future[Any] = handles[1]
    return waiting


def break_link(comms: Any, rank: int, peer: int) -> None:
    """The link that ``rank`` has opened to ``peer`` breaks; the one back does not."""
    link = comms[rank]._session.engine.links.by_peer[peer].link
    link.end(TransportError("it was cut"))


@pytest.mark.asyncio
@pytest.mark.parametrize("refusals", [0, 3])
async def test_next_link_fails_calls_that_wait_for_lost_chunks(refusals: int) -> None:
    async with world(2, strategy="star", aborted=True) as comms:
        waiting = await lost_on_the_way(comms)
        with no_connection(refusals):
            break_link(comms, 0, 1)
            with pytest.raises(CollectiveError, match="the link between ranks 0 and 1 broke"):
                await waiting
        await works(comms, "k")


@pytest.mark.asyncio
async def test_calls_posted_after_the_break_are_not_failed() -> None:
    async with world(2, strategy="star", aborted=True) as comms:
        waiting = await lost_on_the_way(comms)
        sizes = []
        for _ in range(3):
            break_link(comms, 0, 1)
            await turns(2)  # by now both ends have noticed; nobody has told anybody yet
            sizes += await asyncio.gather(*(comm.all_reduce(X, "next") for comm in comms))
        assert [size.tolist() for size in sizes] == [[2.0] * 4] * 6
        with pytest.raises(CollectiveError):
            await waiting


@pytest.mark.asyncio
async def test_a_break_that_only_the_receiver_notices() -> None:
    async with world(2, strategy="star", aborted=True) as comms:
        waiting = await lost_on_the_way(comms)
        engine = comms[1]._session.engine
        (incoming,) = engine.links.incoming
        engine.recovery.incoming_broke(incoming, "it is deaf")
        with pytest.raises(CollectiveError, match="the link between ranks 0 and 1 broke"):
            await waiting
        (newer,) = engine.links.incoming
        assert newer is not incoming
        handles = [comm.all_reduce(X, "k") for comm in comms]
        for _ in range(2):
            engine.recovery.incoming_broke(incoming, "as was said before")
        assert [y.tolist() for y in await asyncio.gather(*handles)] == [[2.0] * 4] * 2
        assert list(engine.links.incoming) == [newer]


@pytest.mark.asyncio
async def test_a_rank_that_has_left_sends_nothing_any_more() -> None:
    async with world(2, strategy="star", quiet=False) as comms:
        waiting = await lost_on_the_way(comms)
        with no_connection(1000):
            break_link(comms, 0, 1)
            await asyncio.gather(comms[0].close(), turns())
            with pytest.raises(CollectiveError, match="closed before all had come"):
                await waiting


@pytest.mark.asyncio
async def test_links_may_be_heard_of_in_the_wrong_order() -> None:
    async with world(2, strategy="star", aborted=True) as comms:
        await works(comms, "k")
        engine = comms[1]._session.engine
        (current,) = engine.links.incoming
        links = comms._first.links._network
        late, newer = links.connect(0, 1), links.connect(0, 1)
        for link, number in ((newer, 3), (late, 2)):
            link.send((int(Kind.OPEN), number))
            link.flush()
            await turns()
        assert [incoming.number for incoming in engine.links.incoming] == [3]
        assert current.number == 1
        newer.abort()
        await turns()
        await works(comms, "k")
