"""The client of HTTP/1.1, against servers that do what they like."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kfcomm.rendezvous import http1
from kfcomm.rendezvous.http1 import MAX_BODY_NBYTES, MAX_CONNECTIONS, MAX_HEAD_NBYTES, HttpClient


class Server:
    """Answers every request with the same bytes.

    Attributes:
        heads, bodies: of the requests, in order.
        num_connections: that were ever opened.
        hold: what every answer waits for.
    """

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.hangs_up = False
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.num_connections = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked = asyncio.Event()
        self.left = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ") for line in head.split("\r\n")[1:-2])
                self.bodies.append(await reader.readexactly(int(fields["Content-Length"])))
                self.heads.append(head)
                self.asked.set()
                await self.hold.wait()
                writer.write(self.answer)
                await writer.drain()
                if self.hangs_up:
                    break
        writer.close()
        self.left.set()


@contextlib.asynccontextmanager
async def opened(answer: bytes) -> AsyncIterator[tuple[Server, HttpClient]]:
    played = Server(answer)
    server = await asyncio.start_server(played.handle, "127.0.0.1", 0)
    client = HttpClient(*server.sockets[0].getsockname())
    try:
        yield played, client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


def answered(body: bytes = b"yes", status: str = "200 OK", *fields: str) -> bytes:
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", ""))
    return head.encode() + body


@pytest.mark.asyncio
async def test_a_request_and_its_answer() -> None:
    async with opened(answered(b"\0yes", "418 I'm a teapot", "X-Proof:  abc ")) as (server, client):
        response = await client.request("POST", "/v1/get", {"X-Mine": "1"}, b"what?")
        assert (response.status, response.body) == (418, b"\0yes")
        assert response.fields["x-proof"] == "abc"
        assert server.heads[0].startswith("POST /v1/get HTTP/1.1\r\nHost: 127.0.0.1:")
        assert "\r\nX-Mine: 1\r\n" in server.heads[0]
        assert server.bodies == [b"what?"]


@pytest.mark.asyncio
async def test_a_connection_is_used_again_after_a_whole_exchange() -> None:
    async with opened(answered()) as (server, client):
        for _ in range(5):
            assert (await client.request("GET", "/", {})).body == b"yes"
        assert server.num_connections == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        answered(b"yes", "200 OK", "Connection: close"),
        answered().replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["told to", "old"],
)
async def test_a_connection_is_closed_where_the_server_does_not_keep_it(answer: bytes) -> None:
    async with opened(answer) as (server, client):
        for _ in range(3):
            assert (await client.request("GET", "/", {})).body == b"yes"
        assert server.num_connections == 3


@pytest.mark.asyncio
async def test_a_connection_that_the_server_has_closed_meanwhile_is_replaced() -> None:
    async with opened(answered()) as (server, client):
        server.hangs_up = True
        assert (await client.request("GET", "/", {})).body == b"yes"
        (idle,) = client._idle
        assert await idle._reader.read() == b""
        assert (await client.request("GET", "/", {})).body == b"yes"
        assert server.num_connections == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nyes",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nyes\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nyes",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nyes" % (MAX_BODY_NBYTES + 1),
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 1000 + b"\r\n\r\nyes",
    ],
    ids=["none", "chunked", "negative", "too large", "too long"],
)
async def test_a_body_without_a_length_that_can_be_is_left_unread(answer: bytes) -> None:
    async with opened(answer) as (server, client):
        for _ in range(2):
            assert (await client.request("GET", "/", {})).body == b""
        assert server.num_connections == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP/1: 'SSH-2.0"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP/1"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2 * MAX_HEAD_NBYTES + b"\r\n\r\n", "head of an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Len", "before its answer was whole"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nyes", "before its answer was whole"),
        (b"", "closed without an answer: it may be for TLS"),
    ],
)
async def test_malformed_answer_raises_and_closes_the_connection(answer: bytes, message: str) -> None:
    async with opened(answer) as (server, client):
        server.hangs_up = True
        for number in (1, 2):
            with pytest.raises(ConnectionError, match=message):
                await client.request("GET", "/", {})
            assert server.num_connections == number


@pytest.mark.asyncio
async def test_a_cancelled_request_takes_its_connection_with_it() -> None:
    async with opened(answered()) as (server, client):
        server.hold.clear()
        asking = asyncio.create_task(client.request("GET", "/", {}))
        await server.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        server.hold.set()
        await server.left.wait()
        assert (await client.request("GET", "/", {})).body == b"yes"
        assert server.num_connections == 2


@pytest.mark.asyncio
async def test_closing_ends_what_is_under_way_and_refuses_the_rest() -> None:
    async with opened(answered()) as (server, client):
        server.hold.clear()
        asking = asyncio.create_task(client.request("GET", "/", {}))
        await server.asked.wait()
        await client.close()
        with pytest.raises(ConnectionError):
            await asking
        server.hold.set()
        with pytest.raises(ConnectionError, match="closed"):
            await client.request("GET", "/", {})


@pytest.mark.asyncio
async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "MAX_CONNECTIONS", 3)
    assert MAX_CONNECTIONS > 3
    async with opened(answered()) as (server, client):
        found = await asyncio.gather(*(client.request("GET", "/", {}, b"%d" % number) for number in range(20)))
        assert [one.body for one in found] == [b"yes"] * 20
        assert sorted(server.bodies, key=int) == [b"%d" % number for number in range(20)]
        assert server.num_connections == 3
