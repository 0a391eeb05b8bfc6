import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kfcomm.common.version import PROTOCOL_VERSION, __version__
from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.join import JobStore, join, leave
from kfcomm.rendezvous.keyvalue import Exit, Why
from kfcomm.rendezvous.settings import Settings
from kfcomm.rendezvous.store import StoreServer
from kfcomm.rendezvous.worlds import ARGUMENTS, KFCOMM
from tests.conformance.worlds import until
from tests.support import free_port

TOKEN = b"the token of the job"
LONG_S = 1e6


class Job:
    """A store, and ranks that join it."""

    def __init__(self, server: StoreServer, client: StoreClient) -> None:
        self.server = server
        self.client = client

    def settings(self, rank: int, size: int) -> Settings:
        return Settings(rank=rank, size=size, store=self.server.url, token=TOKEN, source=KFCOMM)

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


@pytest.mark.asyncio
async def test_all_learn_of_all_whatever_the_order() -> None:
    async with opened_job() as job:
        first = asyncio.create_task(job.join(peer(2), 4))
        worlds = await asyncio.gather(first, *(job.join(peer(rank), 4) for rank in (3, 0, 1)))
        assert all(world == tuple(map(peer, range(4))) for world in worlds)


@pytest.mark.asyncio
async def test_a_second_process_with_the_rank_is_told_who_holds_it() -> None:
    async with opened_job() as job:
        first = asyncio.create_task(job.join(peer(0, pid=11, hostname="one"), 2))
        await job.client.get("world/0/0", LONG_S)
        with pytest.raises(RendezvousError, match=r"rank 0 is taken.*one, pid 11.*two, pid 22"):
            await job.join(peer(0, uid="other", pid=22, hostname="two"), 2)
        # the first one is not disturbed
        assert (await job.join(peer(1), 2))[0].pid == 11
        await first


@pytest.mark.asyncio
async def test_the_same_process_may_join_again() -> None:
    async with opened_job() as job:
        for _ in range(3):
            worlds = await asyncio.gather(*(job.join(peer(rank), 2) for rank in range(2)))
            assert worlds == [(peer(0), peer(1))] * 2


@pytest.mark.asyncio
async def test_rank_can_be_claimed_after_its_holder_left() -> None:
    async with opened_job() as job:
        await asyncio.gather(*(job.join(peer(rank), 2) for rank in range(2)))
        for rank in range(2):
            await leave(peer(rank), job.client)
        later = [peer(rank, uid=f"later {rank}") for rank in range(2)]
        assert await asyncio.gather(*(job.join(each, 2) for each in later)) == [tuple(later)] * 2


@pytest.mark.asyncio
async def test_ranks_that_disagree_on_the_size_all_fail_and_show_both() -> None:
    async with opened_job() as job:
        sizes = {0: 3, 1: 3, 2: 4}
        found = await asyncio.gather(
            *(job.join(peer(rank), size) for rank, size in sizes.items()), return_exceptions=True
        )
        for error in found:
            assert isinstance(error, RendezvousError)
            assert "says 3" in str(error)
            assert "says 4" in str(error)


@pytest.mark.asyncio
async def test_missing_ranks_are_named() -> None:
    async with opened_job() as job:
        with pytest.raises(RendezvousError, match=r"2 of 3 ranks have not joined.*missing 0, 2; joined 1"):
            await job.join(peer(1), 3, timeout_s=0.01)
    async with opened_job() as job:
        with pytest.raises(RendezvousError, match=r"missing 0-1, 3-299; joined 2"):
            await job.join(peer(2), 300, timeout_s=0.01)


@pytest.mark.asyncio
async def test_peers_of_another_protocol_are_refused() -> None:
    async with opened_job() as job:
        found = await asyncio.gather(
            job.join(peer(0), 2), job.join(peer(1, versions=("9.9", 99)), 2), return_exceptions=True
        )
        sides = (
            f"rank 0 runs kfcomm {__version__} (protocol {PROTOCOL_VERSION})",
            "rank 1 runs kfcomm 9.9 (protocol 99)",
        )
        assert all(side in str(error) for side in sides for error in found), found


@pytest.mark.asyncio
async def test_peers_of_another_version_are_refused_by_all_with_both_named() -> None:
    async with opened_job() as job:
        versions = [__version__, "9.9.0", __version__, "9.9.0"]
        joining = (job.join(peer(rank, versions=(one, PROTOCOL_VERSION)), 4) for rank, one in enumerate(versions))
        found = await asyncio.gather(*joining, return_exceptions=True)
    sides = (f"ranks 0, 2 run kfcomm {__version__} ", "ranks 1, 3 run kfcomm 9.9.0 ", "Install the same version on all")
    for error in found:
        assert isinstance(error, RendezvousError)
        assert all(side in str(error) for side in sides), error


@pytest.mark.asyncio
async def test_malformed_peer_in_the_store_is_refused() -> None:
    async with opened_job() as job:
        await job.client.set("world/0/1", b"garbage")
        with pytest.raises(RendezvousError, match="not msgpack"):
            await job.join(peer(0), 2)


@pytest.mark.asyncio
async def test_rank_0_serves_where_no_launcher_does() -> None:
    async def rank(settings: Settings) -> tuple[PeerInfo, ...]:
        store = await JobStore.open(settings)
        assert (store.server is not None) == (settings.rank == 0)
        me = peer(settings.rank)
        try:
            return await join(settings, me, store.client)
        finally:
            await store.leave(settings, me, timeout_s=LONG_S)
            await store.close()

    url = f"http://127.0.0.1:{free_port()}"
    worlds = await asyncio.gather(
        *(rank(Settings(rank=each, size=3, store=url, token=TOKEN, serve=True)) for each in range(3))
    )
    assert worlds == [tuple(map(peer, range(3)))] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("is_same_process", [True, False])
async def test_a_rank_waits_for_the_next_store_of_rank_0(is_same_process: bool) -> None:
    """It comes to the next world while rank 0 still serves the store of the one before."""

    async def opened(rank: int) -> tuple[JobStore, PeerInfo]:
        store = await JobStore.open(settings[rank])
        return store, peer(rank) if is_same_process else peer(rank, uid=secrets.token_hex(16))

    async def joined(rank: int, store: JobStore, me: PeerInfo) -> tuple[PeerInfo, ...]:
        return await join(settings[rank], me, store.client, timeout_s=LONG_S)

    url = f"http://127.0.0.1:{free_port()}"
    settings = [Settings(rank=rank, size=2, store=url, token=TOKEN, serve=True) for rank in range(2)]
    ranks = [await opened(rank) for rank in range(2)]
    await asyncio.gather(*(joined(rank, *one) for rank, one in enumerate(ranks)))
    await ranks[1][0].leave(settings[1], ranks[1][1])
    await ranks[1][0].close()

    early = await opened(1)
    world = asyncio.create_task(joined(1, *early))
    await until(lambda: "world before" in early[0].client.trouble or world.done())
    await ranks[0][0].leave(settings[0], ranks[0][1])
    await ranks[0][0].close()
    late = await opened(0)
    assert await joined(0, *late) == await world
    for store, _ in (early, late):
        await store.close()


@pytest.mark.asyncio
async def test_a_world_that_rank_0_does_not_leave_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    settings = [Settings(rank=rank, size=2, store=url, token=TOKEN, serve=True) for rank in range(2)]
    stores = [await JobStore.open(one) for one in settings]
    await asyncio.gather(*(join(one, peer(one.rank), stores[one.rank].client) for one in settings))
    with pytest.raises(RendezvousError, match="that of the world before this one; rank 0 has not closed it"):
        await join(settings[1], peer(1), stores[1].client, timeout_s=0.1)
    for store in stores:
        await store.close()


@pytest.mark.asyncio
async def test_a_launched_rank_0_does_not_serve() -> None:
    store = await JobStore.open(Settings(rank=0, size=2, store="http://127.0.0.1:1", token=TOKEN))
    assert store.server is None
    await store.close()


@pytest.mark.asyncio
async def test_a_world_of_one_has_no_store() -> None:
    with pytest.raises(ConfigError, match="world of one"):
        await JobStore.open(Settings())


@pytest.mark.asyncio
async def test_leaving_when_the_store_is_gone_is_no_error() -> None:
    async with opened_job() as job:
        await job.join(peer(0), 1)
        await job.server.close()
        store = JobStore(StoreClient(job.server.url, TOKEN, timeout_s=0.01))
        await store.leave(job.settings(0, 1), peer(0))
        await store.close()


@pytest.mark.asyncio
async def test_no_request_after_the_last_rank_left() -> None:
    async with opened_job() as job:
        await job.join(peer(0), 1)
        claim = job.server.store.contents.claim

        def claim_and_close(key: str, value: bytes) -> bytes:
            held = claim(key, value)
            job.server.store.contents.close()
            return held

        job.server.store.contents.claim = claim_and_close  # type: ignore[method-assign]
        assert await leave(peer(0), job.client) == 0


@pytest.mark.asyncio
async def test_leaving_takes_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_job() as job:
        await job.join(peer(0), 1)
        calls: list[str] = []
        call = StoreClient._call
        monkeypatch.setattr(StoreClient, "_call", lambda *args, **kw: (calls.append(args[1]), call(*args, **kw))[1])
        assert await leave(peer(0), job.client) == 0
        assert calls == ["claim"]


@pytest.mark.asyncio
async def test_leaving_finds_what_another_client_of_the_process_has_joined() -> None:
    async with opened_job() as job:
        await job.join(peer(0), 1)
        other = StoreClient(job.server.url, TOKEN)
        assert await leave(peer(0), other) == 0
        await other.close()


@pytest.mark.asyncio
async def test_leaving_without_joining_is_a_no_op() -> None:
    async with opened_job() as job:
        assert await leave(peer(0), job.client) is None
        await job.join(peer(0), 1)
        assert await leave(peer(0), job.client) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("claimed", "end", "text"),
    [
        (False, Exit(1, 0), "the process of rank 1 ended (exit code 0) before it joined"),
        (True, Exit(1, -9), "the process of rank 1 ended (SIGKILL) while the others joined"),
        (False, Exit(1, 1, Why.ABSENT), "the launcher of rank 1 did not come before it joined"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
async def test_the_end_of_a_rank_ends_the_joining_of_all(claimed: bool, end: Exit, text: str, first: bool) -> None:
    async with opened_job() as job:
        if claimed:
            claim = asyncio.create_task(job.join(peer(1), 3))
            assert await job.server.store.contents.get("world/0/1", LONG_S) is not None
        if first:
            job.server.store.contents.report_exit(end)
        joins = [asyncio.create_task(job.join(peer(rank), 3)) for rank in (0, 2) if not (rank == 2 and claimed)]
        if not first:
            assert await job.server.store.contents.get("world/0/0", LONG_S) is not None
            job.server.store.contents.report_exit(end)
        for join_ in joins:
            with pytest.raises(RendezvousError) as caught:
                await join_
            assert caught.value.rank == 1
            assert text in str(caught.value)
        if claimed:
            with pytest.raises(RendezvousError):
                await claim


@pytest.mark.asyncio
async def test_an_end_among_ranks_that_the_program_numbers_itself_is_not_heeded() -> None:
    async with opened_job() as job:
        job.server.store.contents.report_exit(Exit(1, 0))
        settings = [job.settings(rank, 2)._replace(source=ARGUMENTS) for rank in range(2)]
        worlds = await asyncio.gather(*(join(mine, peer(mine.rank), job.client, timeout_s=LONG_S) for mine in settings))
        assert len(worlds[0]) == 2


@pytest.mark.asyncio
async def test_the_end_of_one_that_was_started_later_is_none_of_the_worlds() -> None:
    async with opened_job() as job:
        job.server.store.contents.report_exit(Exit(2, -9))
        worlds = await asyncio.gather(*(job.join(peer(rank), 2) for rank in range(2)))
        assert len(worlds[0]) == 2


@pytest.mark.asyncio
async def test_a_rank_whose_connection_ends_while_it_joins_is_told_to_the_others() -> None:
    async with opened_job() as job:
        own = StoreClient(job.server.url, TOKEN)
        gone = asyncio.create_task(join(job.settings(1, 3), peer(1), own, timeout_s=LONG_S))
        joins = [asyncio.create_task(job.join(peer(0), 3))]
        assert await job.server.store.contents.get("world/0/1", LONG_S) is not None
        assert await job.server.store.contents.get("world/0/0", LONG_S) is not None
        while len(job.server.store.contents.asked) < 2:  # noqa: ASYNC110  the client has no news of it
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await own.close()
        for join_ in joins:
            with pytest.raises(RendezvousError, match="rank 1 went away while the world was joined") as caught:
                await join_
            assert caught.value.rank == 1


@pytest.mark.asyncio
async def test_missing_ranks_are_reported_during_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    async with opened_job() as job:
        settings = job.settings(0, 3)._replace(stall_after_s=0.01)
        joining = asyncio.create_task(join(settings, peer(0), job.client, timeout_s=LONG_S))
        while "rank 0 has waited for 0.01 s to join: missing 1-2; joined 0" not in caplog.text:  # noqa: ASYNC110  the log has no event
            await asyncio.sleep(0.001)
        await asyncio.gather(joining, *(job.join(peer(rank), 3) for rank in (1, 2)))
        assert caplog.text.count("missing") == 1


@pytest.mark.asyncio
async def test_a_store_that_is_not_there_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    client = StoreClient(f"http://127.0.0.1:{free_port()}", TOKEN)
    settings = Settings(rank=1, size=2, store=client.url, token=TOKEN, stall_after_s=0.01)
    client.trouble = "Connection refused"  # as it is once it was tried, which a busy machine may not have by then
    with pytest.raises(RendezvousError, match="Connection refused"):
        await join(settings, peer(1), client, timeout_s=0.5)
    assert "rank 1 has not reached the store at http://127.0.0.1" in caplog.text
    assert "Connection refused" in caplog.text
    await client.close()
