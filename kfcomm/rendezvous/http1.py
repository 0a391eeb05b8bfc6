"""Minimal HTTP/1.1 client (RFC 9112) for the store: requests with a body, over persistent connections.

Every rank makes a handful of requests; importing aiohttp for them would cost as much as importing the rest of kfcomm.
The server is always the store, whose answers have a length; the body of an answer without one, or of more than
`MAX_BODY_NBYTES`, is left unread. No redirects, no compression. Requests and answers are signed, so TLS is needed only
against eavesdropping.

Invariants: a connection carries one exchange at a time, and is reused only after a complete one; memory is bounded
whatever the server sends; every failure is an ``OSError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from ssl import SSLContext
from typing import NamedTuple

MAX_HEAD_NBYTES = 1 << 14
MAX_BODY_NBYTES = 1 << 27
MAX_CONNECTIONS = 64
"""Largest number of concurrent requests; further ones wait."""

_ALERT = b"\x15\x03"
"""First bytes of a TLS server's answer to plain HTTP."""
_STATUS = re.compile(r"HTTP/1\.([01]) ([0-9]{3})(?: .*)?")


class Response(NamedTuple):
    """An answer; the names of ``fields`` are in lower case."""

    status: int
    fields: Mapping[str, str]
    body: bytes


class HttpClient:
    """Makes requests to one server, any number at once, until it ``is_closed``; over TLS if there is a context."""

    def __init__(self, host: str, port: int, tls: SSLContext | None = None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self.is_closed = False
        self._permits = asyncio.Semaphore(MAX_CONNECTIONS)
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, fields: Mapping[str, str], body: bytes = b"") -> Response:
        """Answer to one request.

        Raises:
            OSError: the server cannot be reached, disconnects, or does not speak HTTP/1; or this client is closed.
        """
        async with self._permits:
            connection = await self._connection()
            try:
                response = await connection.exchange(self._head(method, path, fields, body) + body)
            # Also when cancelled: the answer would be taken for that of the next request.
            except BaseException:
                self._open.discard(connection)
                connection.close()
                raise
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                self._open.discard(connection)
                await connection.wait_closed()
            return response

    async def close(self) -> None:
        """Close all connections; requests in flight fail. May be called twice."""
        self.is_closed = True
        closing, self._open, self._idle = self._open, set(), []
        for connection in closing:
            await connection.wait_closed()

    async def _connection(self) -> _Connection:
        """Idle connection, or a new one if the server has closed all idle ones."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            self._open.discard(connection)
            await connection.wait_closed()
        streams = await asyncio.open_connection(self._host, self._port, limit=MAX_HEAD_NBYTES, ssl=self._tls)
        connection = _Connection(*streams)
        if self.is_closed:
            await connection.wait_closed()
            raise ConnectionAbortedError("this client is closed")
        self._open.add(connection)
        return connection

    def _head(self, method: str, path: str, fields: Mapping[str, str], body: bytes) -> bytes:
        host = f"[{self._host}]" if ":" in self._host else self._host
        whole = {"Host": f"{host}:{self._port}", "Content-Length": str(len(body)), **fields}
        lines = (f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in whole.items()), "", "")
        return "\r\n".join(lines).encode("latin-1")


class _Connection:
    """One connection. ``is_reusable``: no exchange is incomplete, and neither side has closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._is_kept = True

    @property
    def is_reusable(self) -> bool:
        return self._is_kept and not self._reader.at_eof() and not self._writer.is_closing()

    async def exchange(self, request: bytes) -> Response:
        """Send a request and read its answer."""
        self._writer.write(request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            minor, status, fields = _parsed(head)
            nbytes = _length(fields)
            body = await self._reader.readexactly(nbytes or 0)
        except asyncio.IncompleteReadError as error:
            if error.partial.startswith(_ALERT):
                raise ConnectionError("it speaks TLS, and this process has no certificate: set tls") from error
            if not error.partial and self._writer.get_extra_info("ssl_object") is None:
                raise ConnectionError("the connection was closed without an answer: it may be for TLS") from error
            raise ConnectionError("the server closed the connection before its answer was whole") from error
        except asyncio.LimitOverrunError as error:
            raise ConnectionError(f"the head of an answer exceeds {MAX_HEAD_NBYTES} bytes") from error
        self._is_kept = minor == 1 and nbytes is not None and fields.get("connection", "").lower() != "close"
        return Response(status, fields, body)

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _parsed(head: bytes) -> tuple[int, int, dict[str, str]]:
    """Minor version, status and fields."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match = _STATUS.fullmatch(first)
    if match is None:
        raise ConnectionError(f"an answer that is not HTTP/1: {first[:64]!r}")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(match[1]), int(match[2]), fields


def _length(fields: Mapping[str, str]) -> int | None:
    """Length of a readable body; None for any other."""
    text = fields.get("content-length", "")
    is_length = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_BODY_NBYTES))
    if "transfer-encoding" in fields or not is_length or int(text) > MAX_BODY_NBYTES:
        return None
    return int(text)
