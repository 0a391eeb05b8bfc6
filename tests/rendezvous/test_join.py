import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.join import close_store, join, leave, open_store
from kfcomm.rendezvous.settings import Settings
from kfcomm.rendezvous.store import StoreServer
from tests.support import run

TOKEN = b"the token of the job"
LONG_S = 1e6


class Job:
    """A store, and ranks that join it."""

    def __init__(self, server: StoreServer, client: StoreClient) -> None:
        self.server = server
        self.client = client

    def settings(self, rank: int, size: int) -> Settings:
        return Settings(rank=rank, size=size, store=self.server.url, token=TOKEN)

    async def join(self, me: PeerInfo, size: int, timeout_s: float = LONG_S) -> tuple[PeerInfo, ...]:
        return await join(self.settings(me.rank, size), me, self.client, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def opened_job() -> AsyncIterator[Job]:
    server = await StoreServer.start("127.0.0.1", token=TOKEN)
    client = StoreClient(server.url, TOKEN)
    try:
        yield Job(server, client)
    finally:
        await client.close()
        await server.close()


def peer(rank: int, **other: object) -> PeerInfo:
    return replace(PeerInfo.here(rank=rank, address="127.0.0.1", port=1000 + rank), **other)  # type: ignore[arg-type]


def test_all_learn_of_all_whatever_the_order() -> None:
    async def check() -> None:
        async with opened_job() as job:
            first = asyncio.create_task(job.join(peer(2), 4))
            worlds = await asyncio.gather(first, *(job.join(peer(rank), 4) for rank in (3, 0, 1)))
            assert all(world == tuple(map(peer, range(4))) for world in worlds)

    run(check())


def test_a_second_process_with_the_rank_is_told_who_holds_it() -> None:
    async def check() -> None:
        async with opened_job() as job:
            first = asyncio.create_task(job.join(peer(0, pid=11, hostname="one"), 2))
            await job.client.get("world/0/0", LONG_S)
            with pytest.raises(RendezvousError, match=r"rank 0 is taken.*one, pid 11.*two, pid 22"):
                await job.join(peer(0, uid="other", pid=22, hostname="two"), 2)
            # the first one is not disturbed
            assert (await job.join(peer(1), 2))[0].pid == 11
            await first

    run(check())


def test_the_same_process_may_join_again() -> None:
    async def check() -> None:
        async with opened_job() as job:
            for _ in range(3):
                worlds = await asyncio.gather(*(job.join(peer(rank), 2) for rank in range(2)))
                assert worlds == [(peer(0), peer(1))] * 2

    run(check())


def test_who_has_left_makes_room_for_another_process() -> None:
    async def check() -> None:
        async with opened_job() as job:
            await asyncio.gather(*(job.join(peer(rank), 2) for rank in range(2)))
            for rank in range(2):
                await leave(peer(rank), job.client)
            later = [peer(rank, uid=f"later {rank}") for rank in range(2)]
            assert await asyncio.gather(*(job.join(each, 2) for each in later)) == [tuple(later)] * 2

    run(check())


def test_ranks_that_disagree_on_the_size_all_fail_and_show_both() -> None:
    async def check() -> None:
        async with opened_job() as job:
            sizes = {0: 3, 1: 3, 2: 4}
            found = await asyncio.gather(
                *(job.join(peer(rank), size) for rank, size in sizes.items()), return_exceptions=True
            )
            for error in found:
                assert isinstance(error, RendezvousError)
                assert "says 3" in str(error)
                assert "says 4" in str(error)

    run(check())


def test_missing_ranks_are_named() -> None:
    async def check() -> None:
        async with opened_job() as job:
            with pytest.raises(RendezvousError, match=r"2 of 3 ranks have not joined.*missing 0, 2; joined 1"):
                await job.join(peer(1), 3, timeout_s=0.01)
        async with opened_job() as job:
            with pytest.raises(RendezvousError, match=r"and 267 more"):
                await job.join(peer(2), 300, timeout_s=0.01)

    run(check())


def test_peers_of_another_protocol_are_refused() -> None:
    async def check() -> None:
        async with opened_job() as job:
            found = await asyncio.gather(
                job.join(peer(0), 2), job.join(peer(1, versions=("9.9", 99)), 2), return_exceptions=True
            )
            assert all("protocol 99 (kfcomm 9.9)" in str(error) or "speaks 99" in str(error) for error in found)

    run(check())


def test_what_is_no_peer_in_the_store_is_refused() -> None:
    async def check() -> None:
        async with opened_job() as job:
            await job.client.set("world/0/1", b"garbage")
            with pytest.raises(RendezvousError, match="no peer"):
                await job.join(peer(0), 2)

    run(check())


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def test_rank_0_serves_where_no_launcher_does() -> None:
    async def rank(settings: Settings) -> tuple[PeerInfo, ...]:
        client, server = await open_store(settings)
        assert (server is not None) == (settings.rank == 0)
        me = peer(settings.rank)
        try:
            return await join(settings, me, client)
        finally:
            await close_store(settings, me, client, server, timeout_s=LONG_S)

    async def check() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        worlds = await asyncio.gather(
            *(rank(Settings(rank=each, size=3, store=url, token=TOKEN, serve=True)) for each in range(3))
        )
        assert worlds == [tuple(map(peer, range(3)))] * 3

    run(check())


def test_a_launched_rank_0_does_not_serve() -> None:
    async def check() -> None:
        client, server = await open_store(Settings(rank=0, size=2, store="http://127.0.0.1:1", token=TOKEN))
        assert server is None
        await client.close()

    run(check())


def test_a_world_of_one_has_no_store() -> None:
    with pytest.raises(ConfigError, match="world of one"):
        run(open_store(Settings()))


def test_leaving_when_the_store_is_gone_is_no_error() -> None:
    async def check() -> None:
        async with opened_job() as job:
            await job.join(peer(0), 1)
            await job.server.close()
            client = StoreClient(job.server.url, TOKEN, timeout_s=0.01)
            await close_store(job.settings(0, 1), peer(0), client, None)

    run(check())


def test_nothing_is_asked_of_the_store_after_the_last_rank_has_left() -> None:
    async def check() -> None:
        async with opened_job() as job:
            await job.join(peer(0), 1)
            claim = job.server.board.claim

            def claim_and_close(key: str, value: bytes) -> bytes:
                held = claim(key, value)
                job.server.board.close()
                return held

            job.server.board.claim = claim_and_close  # type: ignore[method-assign]
            assert await leave(peer(0), job.client) == 0

    run(check())


def test_who_never_joined_leaves_nothing() -> None:
    async def check() -> None:
        async with opened_job() as job:
            assert await leave(peer(0), job.client) is None
            await job.join(peer(0), 1)
            assert await leave(peer(0), job.client) == 0

    run(check())
