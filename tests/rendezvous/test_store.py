"""Store and client together, over loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.authentication import GREETING
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.client import StoreClient, StoreClosed
from kfcomm.rendezvous.host import host_and_port, listen, url_of
from kfcomm.rendezvous.keyvalue import BOUNDS, Exit, MeetRequest, Why
from kfcomm.rendezvous.store import MAX_UNAUTHENTICATED, StoreServer
from kfcomm.types import Wanted
from tests.cutting import cutting
from tests.support import free_port

TOKEN = b"the token of the job"


@contextlib.asynccontextmanager
async def opened_store(token: bytes = TOKEN) -> AsyncIterator[tuple[StoreServer, StoreClient]]:
    server = await StoreServer.start("127.0.0.1", token=TOKEN)
    client = StoreClient(server.url, token)
    try:
        yield server, client
    finally:
        await client.close()
        await server.close()


@pytest_asyncio.fixture
async def opened() -> AsyncIterator[tuple[StoreServer, StoreClient]]:
    async with opened_store() as both:
        yield both


@pytest.fixture
def server(opened: tuple[StoreServer, StoreClient]) -> StoreServer:
    return opened[0]


@pytest.fixture
def client(opened: tuple[StoreServer, StoreClient]) -> StoreClient:
    return opened[1]


@pytest.mark.asyncio
async def test_get_returns_what_was_set(server: StoreServer, client: StoreClient) -> None:
    await client.set("a", b"\0\xff")
    assert await client.get("a", 1) == b"\0\xff"
    assert await client.find("b") is None
    assert await client.claim("a", b"mine") == b"\0\xff"
    assert await client.claim("b", b"mine") == b"mine"


@pytest.mark.asyncio
async def test_get_waits_for_another_client(server: StoreServer, client: StoreClient) -> None:
    other = StoreClient(server.url, TOKEN)
    waiting = asyncio.create_task(client.get("later", 1e6))
    await other.set("later", b"now")
    assert await waiting == b"now"
    await other.close()


@pytest.mark.asyncio
async def test_get_gives_up_in_time_and_names_the_key(server: StoreServer, client: StoreClient) -> None:
    with pytest.raises(RendezvousError, match="'never'"):
        await client.get("never", 0.01)


@pytest.mark.asyncio
async def test_exits_reach_those_who_watch(server: StoreServer, client: StoreClient) -> None:
    watching = client.watch_exits()
    first = asyncio.ensure_future(anext(watching))
    await client.report_exit(Exit(2, -9, Why.ELSEWHERE))
    assert await first == Exit(2, -9, Why.ELSEWHERE)
    await server.store.report_exit(Exit(0, 3))
    assert await anext(watching) == Exit(0, 3)
    await server.close()
    assert [each async for each in watching] == []


@pytest.mark.asyncio
async def test_the_server_tells_exits_as_its_clients_do(server: StoreServer, client: StoreClient) -> None:
    await client.report_exit(Exit(1, 0))
    watching = server.store.watch_exits()
    assert await anext(watching) == Exit(1, 0)
    server.store.contents.close()
    assert [each async for each in watching] == []


def told(event: asyncio.Event, wait: Callable[[str], Awaitable[None]]) -> Callable[[str], Awaitable[None]]:
    """The same wait, which sets ``event`` when it begins."""

    def told_wait(folder: str) -> Awaitable[None]:
        event.set()
        return wait(folder)

    return told_wait


@pytest.mark.asyncio
async def test_closing_ends_waits_of_clients(server: StoreServer, client: StoreClient) -> None:
    await client.set("a", b"")
    asked = asyncio.Event()
    server.store.contents._waits._changed = told(asked, server.store.contents._waits._changed)  # type: ignore[method-assign]
    waiting = asyncio.create_task(client.get("never", 1e6))
    await asked.wait()
    await server.close()
    with pytest.raises(StoreClosed):
        await waiting


@pytest.mark.asyncio
async def test_requests_out_of_bounds_are_refused_with_a_reason(server: StoreServer, client: StoreClient) -> None:
    with pytest.raises(RendezvousError, match="key"):
        await client.set("x" * 1000, b"")
    with pytest.raises(RendezvousError, match="bytes to send"):
        await client.set("a", b"x" * (2 << 20))
    with pytest.raises(RendezvousError, match="bytes"):
        await client.set("a", b"x" * ((1 << 19) + 1))
    await client.set("a", b"still well")


@pytest.mark.asyncio
async def test_a_wrong_token_is_refused_at_once() -> None:
    async with opened_store(b"not the token") as (server, client):
        with pytest.raises(RendezvousError, match="token is not the job's"):
            await client.set("a", b"")
        assert await server.store.contents.get("a", 0) is None


@pytest.mark.asyncio
async def test_the_token_does_not_travel_and_nothing_is_told_without_it(
    server: StoreServer, client: StoreClient
) -> None:
    async with aiohttp.ClientSession() as http:
        for method, path in (("POST", "/v1/get"), ("POST", "/v1/set"), ("GET", "/"), ("DELETE", "/v1/hello")):
            async with http.request(method, server.url + path, data=b"\x80") as answer:
                assert answer.status == 401
                assert TOKEN not in await answer.read()
        async with http.get(f"{server.url}/v1/hello") as answer:
            assert TOKEN not in await answer.read()


@pytest.mark.asyncio
async def test_garbage_costs_its_own_connection_only(server: StoreServer, client: StoreClient) -> None:
    host, port = host_and_port(server.url)
    for garbage in (b"\0" * 1000, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000, b"POST /v1/get HTTP/9.9\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, port)
        with contextlib.suppress(ConnectionError):
            writer.write(garbage)
            writer.write_eof()
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await client.set("a", b"still well")


async def closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""


@pytest.mark.asyncio
@pytest.mark.parametrize("said", [b"", b"GET /v1/hello HTTP/1.1\r\nHost", b"GET /v1/hello HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_unauthenticated_connections_are_closed_in_time(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.rendezvous.store.REQUEST_WITHIN_S", 0.1)
    async with opened_store() as (server, client):
        reader, writer = await asyncio.open_connection(*host_and_port(server.url))
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with pytest.raises(RendezvousError, match="later"):
            await client.get("later", 0.5)  # signed, and may wait for longer


@pytest.mark.asyncio
async def test_oldest_unauthenticated_connections_are_closed(server: StoreServer, client: StoreClient) -> None:
    most = MAX_UNAUTHENTICATED // 2  # from one address
    connections = [await asyncio.open_connection(*host_and_port(server.url)) for _ in range(3 * most)]
    for reader, _ in connections[: 2 * most]:
        await closed(reader)
    await client.set("a", b"still there")
    assert await client.get("a", 10) == b"still there"
    for _, writer in connections:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.asyncio
async def test_a_flood_of_garbage_is_one_line_in_the_log(
    server: StoreServer, client: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        reader, writer = await asyncio.open_connection(*host_and_port(server.url))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" if _ % 2 else b"\0\r\n\r\n")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
    await client.set("a", b"still well")
    assert len(caplog.records) < 25
    assert "Traceback" not in caplog.text


@pytest.mark.asyncio
async def test_a_client_that_came_first_waits_for_the_store() -> None:
    port = free_port()
    client = StoreClient(f"http://127.0.0.1:{port}", TOKEN)
    setting = asyncio.create_task(client.set("a", b"1"))
    await asyncio.sleep(0)
    server = await StoreServer.start("127.0.0.1", port, token=TOKEN)
    await setting
    assert await client.find("a") == b"1"
    await client.close()
    await server.close()


@pytest.mark.asyncio
async def test_early_connections_are_served() -> None:
    listener = listen("127.0.0.1")
    url, (reader, writer) = url_of(listener), await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET /v1/hello HTTP/1.1\r\nHost: store\r\n\r\n")
    server = await StoreServer.serve(listener, token=TOKEN)
    assert server.url == url
    assert await reader.readuntil(GREETING)
    writer.close()
    await writer.wait_closed()
    await server.close()


@pytest.mark.asyncio
async def test_leavers_stay_asked_to_leave_after_a_resize(server: StoreServer, client: StoreClient) -> None:
    asked, sizes = client.watch_wanted(), client.watch_sizes()
    await client.ask_to_go(3)
    assert await anext(asked) == Wanted(leavers=(3,))
    await client.ask_size(4)
    assert await anext(asked) == Wanted(4, (3,))
    assert await anext(sizes) == 4
    await client.ask_to_go(1)
    await server.store.ask_size(5)
    assert await anext(asked) == Wanted(5, (3, 1))
    await client.hold(Wanted(2, (1,)))
    assert await anext(asked) == Wanted(2, (1,))
    await client.ask_size(6)
    assert await anext(asked) == Wanted(6, (1,))
    assert await anext(sizes) == 6
    await asked.aclose()
    await sizes.aclose()


@pytest.mark.asyncio
async def test_a_store_that_came_back_is_greeted_anew() -> None:
    async with opened_store() as (server, client):
        await client.set("a", b"1")
        await server.close()
        store = LocalStore()
        store.identity = server.store.identity
        again = await StoreServer.start(*host_and_port(server.url), token=TOKEN, store=store)
        assert await client.find("a") is None
        await again.close()


@pytest.mark.asyncio
async def test_the_store_of_another_job_is_not_taken_for_that_of_this_one() -> None:
    async with opened_store() as (server, client):
        await client.set("a", b"1")
        await server.close()
        another = await StoreServer.start(*host_and_port(server.url), token=TOKEN)
        with pytest.raises(StoreClosed, match="of another job"):
            await client.find("a")
        assert [size async for size in client.watch_sizes()] == []
        await another.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("url", "cause"),
    [("http://127.0.0.1:1", "Connection refused"), ("http://no-such-host.invalid:1", "no-such-host")],
)
async def test_a_store_that_is_not_there_is_named_with_the_cause(url: str, cause: str) -> None:
    client = StoreClient(url, TOKEN, timeout_s=0.05)
    try:
        with pytest.raises(RendezvousError) as caught:
            await client.set("a", b"")
    finally:
        await client.close()
    assert url in str(caught.value)
    assert cause in str(caught.value) or "resol" in str(caught.value) or "known" in str(caught.value)


async def serve_once(answer: bytes) -> tuple[asyncio.Server, str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"It works!", "not a store of kfcomm"),
        # it answers like a store, but every answer lacks the proof
        (b"kfcomm store " + b"0" * 64, "does not have the job's token"),
    ],
)
async def test_another_server_is_not_taken_for_the_store(body: bytes, message: str) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    server, url = await serve_once(head.encode() + body)
    client = StoreClient(url, TOKEN)
    with pytest.raises(RendezvousError, match=message):
        await client.set("a", b"")
    await client.close()
    server.close()
    await server.wait_closed()


@pytest.mark.asyncio
async def test_a_port_in_use_is_named() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"{port}.*in use.*KFCOMM_PORT"):
            await StoreServer.start("127.0.0.1", port, token=TOKEN)


@pytest.mark.asyncio
async def test_only_the_chosen_address_is_bound() -> None:
    server = await StoreServer.start("127.0.0.2", token=TOKEN)
    host, port = host_and_port(server.url)
    assert host == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await server.close()


@pytest.mark.asyncio
async def test_closing_twice_is_no_error() -> None:
    async with opened_store() as (server, client):
        await server.close()
        await client.close()


async def gathered(*work: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*work))


@pytest.mark.asyncio
async def test_many_requests_at_once(server: StoreServer, client: StoreClient) -> None:
    await gathered(*(client.set(f"k/{number}", b"%d" % number) for number in range(300)))
    found = await client.collect("k", 300, unless=None, timeout_s=1e6)
    assert found == {str(number): b"%d" % number for number in range(300)}


async def _spoken(url: str, launcher: StoreClient) -> list[object]:
    """Make the requests of a process with its own client, and return the answers."""
    client = StoreClient(url, TOKEN)
    try:
        return [
            await client.claim("world/0/0", b""),
            await client.claim("world/0/0", b"other"),
            await client.set("silent/0", b"x"),
            await client.get("silent/0", 60),
            await client.find("nothing"),
            await client.collect("world/0", 1, timeout_s=60),
            await client.meet(MeetRequest("world/0", 0, 1, "fault", True), 60),
            await client.arrive(1),
            await client.report_exit(Exit(3, -9)),
            await client.ask_size(2),
            await client.ask_to_go(1),
            await client.want_size(3),
            await launcher.collect("sizes", 0, timeout_s=0.0),
            await client.watch_exits().__anext__(),
        ]
    finally:
        await client.close()


@pytest.mark.asyncio
async def test_lost_answers_change_no_outcome() -> None:
    right: list[object] = []
    lost, count = 0, 1
    while lost <= count:
        server = await StoreServer.start("127.0.0.1", token=TOKEN)
        await server.store.set(BOUNDS, b"1:4")
        launcher = StoreClient(server.url, TOKEN)
        async with cutting(int(server.url.rpartition(":")[2]), {lost}) as relay:
            told = await _spoken(f"http://127.0.0.1:{relay.port}", launcher)
        if not lost:
            right, count = told, relay.num_requests
        assert (told, relay.num_lost) == (right, min(lost, 1)), lost
        await launcher.close()
        await server.close()
        lost += 1
    assert count > 14
