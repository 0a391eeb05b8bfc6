"""HTTP server of a store, run by the launcher or rank 0, where peers register and learn the world.

It binds one address. A client without the token learns only that this is a store: a request is judged by its headers,
before its body is read. Connections, bodies and memory are bounded; waits are long polls, which end when their client
disconnects. A connection without a signed request is closed after seconds, and the oldest of many at once: see
`kfcomm.core.auth`.

Requests are ``POST /v1/NAME`` with a msgpack map as body; answers are msgpack. ``PUT /v1/size``, for autoscalers, has a
number in text as its body, and a line of text as its answer. See `signing` for the headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgpack
from aiohttp import web

from kfcomm.common.sockets import accept_all, host_of
from kfcomm.core.auth import Unauthenticated
from kfcomm.errors import ConfigError, LocalProtocolError
from kfcomm.rendezvous.authentication import (
    ANSWER_HEADER,
    GREETING,
    IDENTITY_NBYTES,
    REQUEST_HEADER,
    SHOWN_PATH,
    Authenticator,
    Ticket,
    answer_header,
    digest_of,
    nonce_of,
)
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.host import listen, url_of
from kfcomm.rendezvous.keyvalue import BOUNDS, MAX_BODY_NBYTES, Exit, MeetRequest, StoreClosed, Why
from kfcomm.rendezvous.worlds import MAX_RANKS
from kfcomm.transports.tls import Tls
from kfcomm.types import override

SIZE_PATH = "/v1/size"
MAX_CONNECTIONS = 1 << 14
MAX_WAIT_S = 20.0

LOG_EVERY_S = 1.0
REQUEST_WITHIN_S = 5.0
"""Seconds from connecting to a signed request, and from there to the last byte of its body."""

MAX_UNAUTHENTICATED = 1 << 9
"""Connections without a signed request, and half as many from one address: all ranks of a host may come at once."""
_CLOSE_WITHIN_S = 2.0
_MAX_SHOWN = 32


class RateLimitFilter(logging.Filter):
    """At most one log record per second, with the number left out since, and without a traceback."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_s = 0.0
        self._left_out = 0

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        if now_s < self._next_s:
            self._left_out += 1
            return False
        self._next_s = now_s + LOG_EVERY_S
        more = f" (and {self._left_out} such lines before)" if self._left_out else ""
        cause = f": {record.exc_info[1]!r:.200}" if record.exc_info and record.exc_info[1] is not None else ""
        record.msg, record.args = f"{record.getMessage()}{cause}{more}", ()
        # A traceback would multiply what a remote process can write into the log.
        record.exc_info = record.exc_text = None
        self._left_out = 0
        return True


_LOG = logging.getLogger("kfcomm.store")
_LOG.addFilter(RateLimitFilter())


class StoreServer:
    """A store that is served over HTTP. Made by `start` or `serve`; `close` it when the job is over."""

    def __init__(self, token: bytes, tls: Tls | None = None, store: LocalStore | None = None) -> None:
        self.url = ""  # ``http://address:port``
        self.shown = b""  # what anyone may read: see `channels`
        self.store = store or LocalStore()
        self.store.contents.later = lambda key, value: self._keep(_quietly(self.store.claim(key, value)))
        self._calls = _Calls(self.store)
        self._token = token
        self._authenticator = Authenticator(token, nonce_of(self.store.identity))
        self._http = web.Server(self._handle, handler_cancellation=True)
        bounds = MAX_UNAUTHENTICATED, MAX_UNAUTHENTICATED // 2
        self._unauthenticated: Unauthenticated[_ServedConnection] = Unauthenticated(*bounds)
        self._tls = None if tls is None else tls.server
        self._greeted: Unauthenticated[asyncio.Task[Any]] = Unauthenticated(*bounds)
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    async def start(
        cls, host: str, port: int = 0, *, token: bytes, tls: Tls | None = None, store: LocalStore | None = None
    ) -> StoreServer:
        """Listen at ``host`` (an IP address) and ``port`` (0: any that is free), and serve.

        Raises:
            RendezvousError: the port is in use, or the address is not this host's.
        """
        return await cls.serve(listen(host, port), token=token, tls=tls, store=store)

    @classmethod
    async def serve(
        cls, listener: socket.socket, *, token: bytes, tls: Tls | None = None, store: LocalStore | None = None
    ) -> StoreServer:
        """Serve early and new connections of ``listener``, which belongs to the server from now on."""
        server = cls(token, tls, store)
        server.url = url_of(listener)
        listener.setblocking(False)
        server._listener = listener
        accepting = accept_all(listener, server._begin, turn_away=_say_used_up, failed=server._not_accepted)
        server._keep(accepting)
        return server

    async def begin_anew(self, *folders: str) -> None:
        """Become the store of another job, with nothing left of the previous one but these folders.

        Clients of the previous job get `StoreClosed`.
        """
        await self.store.clear(*folders)
        self.store.identity = secrets.token_bytes(IDENTITY_NBYTES)
        self._authenticator = Authenticator(self._token, nonce_of(self.store.identity))

    async def close(self) -> None:
        """Stop listening and end every wait; return when all connections are closed. May be called twice."""
        self.store.contents.close()
        if self._listener is not None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._listener.close()
            self._http.pre_shutdown()  # idle connections end at once, others after their answer
            await self._http.shutdown(_CLOSE_WITHIN_S)
            self._listener = None

    def _begin(self, sock: socket.socket) -> bool:
        if len(self._http.connections) >= MAX_CONNECTIONS:
            sock.close()
            return True
        sock.setblocking(False)
        self._keep(self._connect(sock))
        return self._unauthenticated.is_flood or self._greeted.is_flood

    async def _connect(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.connect_accepted_socket(self._connection, sock)
            return
        greeted = loop.create_task(
            loop.connect_accepted_socket(self._connection, sock, ssl=self._tls, ssl_handshake_timeout=REQUEST_WITHIN_S)
        )
        too_many = self._greeted.add(greeted, host_of(sock))
        if too_many is not None:
            too_many.cancel()
        try:
            await greeted
        except (OSError, asyncio.CancelledError) as error:
            _LOG.debug("no TLS with somebody: %s", error)
        finally:
            self._greeted.remove(greeted)

    def _connection(self) -> asyncio.Protocol:
        return _ServedConnection(self._http, self._unauthenticated)

    def _keep(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _not_accepted(self, error: OSError) -> None:
        _LOG.warning("the store cannot accept a connection: %s", error.strerror)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == "/v1/hello":
            return web.Response(body=GREETING + self._authenticator.nonce.hex().encode())
        if request.method == "GET" and request.path == SHOWN_PATH:
            return web.Response(body=self.shown)
        # Before the body is read: an unauthenticated client must not cost memory for one.
        ticket = self._authenticator.admit(request.path, request.headers.get(REQUEST_HEADER, ""))
        if ticket is None or request.method != ("PUT" if request.path == SIZE_PATH else "POST"):
            # the body is unread: the connection cannot be reused
            return web.Response(status=401, text="not signed with this job's token\n", headers={"Connection": "close"})
        if isinstance(request.protocol, _ServedConnection):
            request.protocol.is_known()
        answered = self._resize if request.method == "PUT" else self._answer
        status, body = await answered(request, ticket)
        signature = answer_header(self._authenticator.nonce, ticket, status, body)
        return web.Response(status=status, body=body, headers={ANSWER_HEADER: signature})

    async def _answer(self, request: web.BaseRequest, ticket: Ticket) -> tuple[int, bytes]:
        answer: Any
        try:
            fields = await _read(request, ticket)
            status, answer = 200, await self._calls(ticket.path.removeprefix("/v1/"), fields)
        except StoreClosed:
            status, answer = 503, "the store is closing"
        except (LocalProtocolError, LookupError, TimeoutError, TypeError, ValueError) as error:
            status, answer = 400, f"{type(error).__name__}: {error}"
        encoded: bytes = msgpack.packb(answer)
        return status, encoded

    async def _resize(self, request: web.BaseRequest, ticket: Ticket) -> tuple[int, bytes]:
        """Handle a request for another number of ranks of an elastic job."""
        try:
            text = (await _body(request, ticket)).decode(errors="replace").strip()
            size = await self.want_size(text)
        except StoreClosed:
            return 503, b"the job is over\n"
        except (ConfigError, LocalProtocolError) as error:
            return 400, f"{error}\n".encode()
        return 200, b"%d ranks are wanted\n" % size

    async def want_size(self, text: str) -> int:
        """Request a number of ranks; return it.

        Raises:
            ConfigError: it is not a number, or out of the job's bounds.
            RendezvousError: the store is closed.
        """
        size = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_RANKS)) else 0
        bounds = self.store.contents.held(BOUNDS)
        if bounds is None:
            raise ConfigError("the ranks of this job do not change: it was not started with --elastic")
        least, most = map(int, bounds.split(b":"))
        if not least <= size <= most:
            raise ConfigError(f"size {text[:_MAX_SHOWN]!r} is outside the job's range {least}..{most}")
        await self.store.ask_size(size)
        return size


class _Calls:
    """Requests of `StoreClient`, by name, with their fields checked."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "get": self._get,
            "set": self._set,
            "claim": self._claim,
            "collect": self._collect,
            "meet": self._meet,
            "exit": self._exit,
            "exits": self._exits,
        }

    async def __call__(self, name: str, fields: Mapping[str, Any]) -> Any:
        return await self._calls[name](**fields)

    async def _get(self, *, key: str, wait_s: float) -> bytes | None:
        return await self._store.contents.get(_text(key), _wait_s(wait_s))

    async def _set(self, *, key: str, value: bytes) -> None:
        await self._store.set(_text(key), _bytes(value))

    async def _claim(self, *, key: str, value: bytes) -> bytes:
        return await self._store.claim(_text(key), _bytes(value))

    async def _collect(self, *, folder: str, count: int, unless: str | None, wait_s: float) -> dict[str, bytes]:
        return await self._store.contents.collect(_text(folder), int(count), unless, _wait_s(wait_s))

    async def _meet(self, *, wait_s: float, **fields: Any) -> tuple[dict[str, bytes], list[Exit]]:
        asked = MeetRequest(**fields)
        checked = MeetRequest(
            _text(asked.folder), _rank(asked.rank), int(asked.count), _text(asked.unless), bool(asked.heeds_ends)
        )
        return await self._store.contents.meet(checked, _wait_s(wait_s))

    async def _exit(self, *, rank: int, code: int, why: str) -> None:
        await self._store.report_exit(Exit(int(rank), int(code), Why(why)))

    async def _exits(self, *, since: int, wait_s: float, host: int | None) -> list[Exit]:
        asking = None if host is None else int(host)
        return await self._store.contents.exits_since(max(0, int(since)), _wait_s(wait_s), asking)


class _ServedConnection(web.RequestHandler):
    """A connection; unauthenticated until its first signed request."""

    __slots__ = ("_deadline", "_unauthenticated")

    def __init__(self, server: web.Server, unauthenticated: Unauthenticated[_ServedConnection]) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, access_log=None, logger=_LOG)  # type: ignore[arg-type]  # as web.Server does
        self._unauthenticated = unauthenticated
        self._deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        too_many = self._unauthenticated.add(self, peer[0] if peer else "")
        if too_many is not None:
            too_many.cut()
        self._deadline = asyncio.get_running_loop().call_later(REQUEST_WITHIN_S, self.cut)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_known()
        super().connection_lost(exc)

    def is_known(self) -> None:
        """Note that it has sent a signed request, or is closed."""
        self._unauthenticated.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def cut(self) -> None:
        """Close the connection."""
        if self.transport is not None:
            self.transport.abort()


async def _quietly(work: Awaitable[object]) -> None:
    """Run in the background, without errors of the store."""
    with contextlib.suppress(StoreClosed, LocalProtocolError):
        await work


def _say_used_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.send(b"HTTP/1.1 503 No descriptors left (ulimit -n)\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


async def _read(request: web.BaseRequest, ticket: Ticket) -> Mapping[str, Any]:
    fields = msgpack.unpackb(await _body(request, ticket))
    if not isinstance(fields, dict):
        raise LocalProtocolError("a body must be a map")
    return fields


async def _body(request: web.BaseRequest, ticket: Ticket) -> bytes:
    nbytes = request.content_length
    if nbytes is None or nbytes > MAX_BODY_NBYTES:
        raise LocalProtocolError(f"a body needs a length of at most {MAX_BODY_NBYTES} bytes")
    async with asyncio.timeout(REQUEST_WITHIN_S):
        body = await request.content.readexactly(nbytes)
    if digest_of(body) != ticket.digest:
        raise LocalProtocolError("the body is not the one that was signed")
    return body


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a key must be a text")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a value must be bytes")
    return value


def _rank(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < MAX_RANKS:
        raise ValueError("no such rank")
    return value


def _wait_s(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("a wait must be a number of seconds")
    return min(max(0.0, float(value)), MAX_WAIT_S)
