"""The store: a small HTTP server that the launcher or rank 0 runs, where peers register and learn the world.

It binds one address. Whoever cannot prove the token learns only that this is a store: a request is judged by
its headers, before its body is read. Connections, bodies and what is remembered are bounded; waits are long
polls, which end when their client goes away.

Requests are ``POST /v1/NAME`` with a msgpack map as body; answers are msgpack. See `signing` for the headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgpack
from aiohttp import web

from kfcomm.errors import LocalProtocolError
from kfcomm.rendezvous.board import MAX_BODY_NBYTES, Board, Closed
from kfcomm.rendezvous.gate import Gate
from kfcomm.rendezvous.listening import BACKLOG, listen, url_of
from kfcomm.rendezvous.signing import ANSWER_HEADER, GREETING, REQUEST_HEADER, Ticket, answer_header, digest_of

MAX_CONNECTIONS = 1 << 14
MAX_WAIT_S = 20.0

_CLOSE_WITHIN_S = 2.0


class StoreServer:
    """A running store. Made by `start` or `serve`; `close` it when the job is over.

    Attributes:
        url: ``http://address:port``.
        board: what it remembers; the process that runs the store may use it directly.
    """

    def __init__(self, token: bytes) -> None:
        self.url = ""
        self.board = Board()
        self._gate = Gate(token, secrets.token_bytes(32))
        self._http = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._listener: asyncio.Server | None = None

    @classmethod
    async def start(cls, host: str, port: int = 0, *, token: bytes) -> StoreServer:
        """Listen at ``host`` (an IP address) and ``port`` (0: any that is free), and serve.

        Raises:
            RendezvousError: see ``listening.listen``.
        """
        return await cls.serve(listen(host, port), token=token)

    @classmethod
    async def serve(cls, listener: socket.socket, *, token: bytes) -> StoreServer:
        """Serve whoever has connected to ``listener``, or will; it belongs to the store from now on."""
        store = cls(token)
        store.url = url_of(listener)
        loop = asyncio.get_running_loop()
        store._listener = await loop.create_server(store._connection, sock=listener, backlog=BACKLOG)
        return store

    async def report_exit(self, rank: int, code: int) -> None:
        """As `StoreClient.report_exit`, without a way over HTTP."""
        self.board.report_exit(rank, code)

    async def watch_exits(self) -> AsyncIterator[tuple[int, int]]:
        """As `StoreClient.watch_exits`, without a way over HTTP."""
        seen = 0
        with contextlib.suppress(Closed):
            while True:
                for rank, code in await self.board.exits_since(seen, MAX_WAIT_S):
                    seen += 1
                    yield rank, code

    async def close(self) -> None:
        """Stop listening and end every wait; returns when nothing is open any more. May be called twice."""
        self.board.close()
        if self._listener is not None:
            self._listener.close()
            self._http.pre_shutdown()  # idle connections end at once, the others after their answer
            await self._http.shutdown(_CLOSE_WITHIN_S)
            await self._listener.wait_closed()
            self._listener = None

    def _connection(self) -> asyncio.Protocol:
        return _Refuse() if len(self._http.connections) >= MAX_CONNECTIONS else self._http()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == "/v1/hello":
            return web.Response(body=GREETING + self._gate.nonce.hex().encode())
        ticket = self._gate.admit(request.path, request.headers.get(REQUEST_HEADER, ""))
        if ticket is None or request.method != "POST":
            # the body has not been read: the connection cannot be used again
            return web.Response(status=401, text="not signed with this job's token\n", headers={"Connection": "close"})
        status, body = await self._answer(request, ticket)
        signature = answer_header(self._gate.token, self._gate.nonce, ticket, status, body)
        return web.Response(status=status, body=body, headers={ANSWER_HEADER: signature})

    async def _answer(self, request: web.BaseRequest, ticket: Ticket) -> tuple[int, bytes]:
        answer: Any
        try:
            fields = await _read(request, ticket)
            status, answer = 200, await self._call(ticket.path.removeprefix("/v1/"), fields)
        except Closed:
            status, answer = 503, "the store is closing"
        except (LocalProtocolError, LookupError, TypeError, ValueError) as error:
            status, answer = 400, f"{type(error).__name__}: {error}"
        encoded: bytes = msgpack.packb(answer)
        return status, encoded

    async def _call(self, name: str, fields: Mapping[str, Any]) -> Any:
        verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "get": self._get,
            "set": self._set,
            "claim": self._claim,
            "collect": self._collect,
            "exit": self._exit,
            "exits": self._exits,
        }
        return await verbs[name](**fields)

    async def _get(self, *, key: str, wait_s: float) -> bytes | None:
        return await self.board.get(_text(key), _wait_s(wait_s))

    async def _set(self, *, key: str, value: bytes) -> None:
        self.board.set(_text(key), _bytes(value))

    async def _claim(self, *, key: str, value: bytes) -> bytes:
        return self.board.claim(_text(key), _bytes(value))

    async def _collect(self, *, folder: str, count: int, unless: str | None, wait_s: float) -> dict[str, bytes]:
        return await self.board.collect(_text(folder), int(count), unless, _wait_s(wait_s))

    async def _exit(self, *, rank: int, code: int) -> None:
        self.board.report_exit(int(rank), int(code))

    async def _exits(self, *, since: int, wait_s: float) -> list[tuple[int, int]]:
        return await self.board.exits_since(max(0, int(since)), _wait_s(wait_s))


class _Refuse(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with contextlib.suppress(OSError):
            transport.abort() if isinstance(transport, asyncio.WriteTransport) else transport.close()


async def _read(request: web.BaseRequest, ticket: Ticket) -> Mapping[str, Any]:
    nbytes = request.content_length
    if nbytes is None or nbytes > MAX_BODY_NBYTES:
        raise LocalProtocolError(f"a body needs a length of at most {MAX_BODY_NBYTES} bytes")
    body = await request.content.readexactly(nbytes)
    if digest_of(body) != ticket.digest:
        raise LocalProtocolError("the body is not the one that was signed")
    fields = msgpack.unpackb(body)
    if not isinstance(fields, dict):
        raise LocalProtocolError("a body must be a map")
    return fields


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a key must be a text")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a value must be bytes")
    return value


def _wait_s(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("a wait must be a number of seconds")
    return min(max(0.0, float(value)), MAX_WAIT_S)
