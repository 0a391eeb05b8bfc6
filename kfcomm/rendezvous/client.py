"""HTTP client of the store: signed requests, long polls, and retries while the store is not there yet.

A request is repeated, with growing pauses, until it is answered or its time is up: the store's name may not resolve
yet, its process may not listen yet. All requests are idempotent. A refusal is final: a wrong token stays wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from ssl import SSLCertVerificationError, SSLError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack

from kfcomm.common.sockets import why_failed
from kfcomm.core import auth
from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.authentication import (
    ANSWER_HEADER,
    GREETING,
    MAX_SHOWN_NBYTES,
    REQUEST_HEADER,
    SHOWN_PATH,
    Ticket,
    digest_of,
    identity_of,
    is_answer_valid,
    request_header,
)
from kfcomm.rendezvous.host import host_and_port
from kfcomm.rendezvous.http1 import HttpClient, Response
from kfcomm.rendezvous.keyvalue import (
    AGAIN_S,
    MAX_BODY_NBYTES,
    Exit,
    KeyValue,
    MeetRequest,
    NotSet,
    StoreClosed,
    loop_now_s,
)
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.transports.tls import Tls

T = TypeVar("T")

_POLL_S = 15.0
_BEAT_S = 1.0
_ANSWER_WITHIN_S = 10.0
_FIRST_PAUSE_S = 0.02
_LAST_PAUSE_S = 1.0
_LOST_AFTER_S = 2.0


class StoreClient(KeyValue):
    """Client of the store at ``url``; requests are repeated for ``timeout_s``, by default, while it is unreachable.

    Raises (all methods): `RendezvousError` if the store cannot be reached in time (names the last cause), does
    not accept the token, does not know it, or is closing (`StoreClosed`).
    """

    def __init__(self, url: str, token: bytes, *, timeout_s: float = 300.0, tls: Tls | None = None) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self._timeout_s = timeout_s
        self._client = secrets.token_hex(16)
        self._number = 0
        self._nonce: bytes | None = None
        self._http = HttpClient(*host_and_port(url), None if tls is None else tls.client)
        self.identity = b""  # of the job whose store has answered; empty before
        self.joined: dict[str, list[int]] = {}  # generations of the world, by uid of the process, see ``join``
        self.trouble = ""  # cause of the last failed attempt; empty after a success

    async def get(self, key: str, timeout_s: float) -> bytes:
        """The value of ``key``, waiting until it is set.

        Raises:
            NotSet: it was not set within ``timeout_s`` seconds.
        """
        deadline_s = loop_now_s() + timeout_s
        while True:
            wait_s = _poll_s(deadline_s)
            value = await self._call("get", {"key": key, "wait_s": wait_s}, timeout_s=deadline_s - loop_now_s())
            if value is not None:
                return _expect(bytes, value)
            if loop_now_s() >= deadline_s:
                raise NotSet(f"nobody set {key!r} in the store at {self.url} within {timeout_s:g} s")

    @override
    async def set(self, key: str, value: bytes) -> None:
        await self._call("set", {"key": key, "value": value})

    @override
    async def claim(self, key: str, value: bytes, *, timeout_s: float | None = None) -> bytes:
        return _expect(bytes, await self._call("claim", {"key": key, "value": value}, timeout_s=timeout_s))

    @override
    async def find(self, key: str, *, timeout_s: float | None = None) -> bytes | None:
        value = await self._call("get", {"key": key, "wait_s": 0.0}, timeout_s=timeout_s)
        return None if value is None else _expect(bytes, value)

    @override
    async def collect(
        self, folder: str, count: int, *, unless: str | None = None, timeout_s: float
    ) -> dict[str, bytes]:
        """As `KeyValue.collect`; also returns once there is a value named ``unless``."""
        deadline_s = loop_now_s() + timeout_s
        while True:
            fields = {"folder": folder, "count": count, "unless": unless, "wait_s": _poll_s(deadline_s)}
            values = _expect(dict, await self._call("collect", fields, timeout_s=deadline_s - loop_now_s()))
            if len(values) >= count or unless in values or loop_now_s() >= deadline_s:
                return values

    async def meet(self, request: MeetRequest, timeout_s: float) -> tuple[dict[str, bytes], list[Exit]]:
        """Return values and exits, see `MeetRequest`. If this process disconnects meanwhile, others are notified."""
        deadline_s = loop_now_s() + timeout_s
        while True:
            fields = {**asdict(request), "wait_s": _poll_s(deadline_s)}
            answer = _expect(list, await self._call("meet", fields, timeout_s=deadline_s - loop_now_s()))
            values, ends = _expect(dict, answer[0]), [_exit(row) for row in _expect(list, answer[1])]
            if len(values) >= request.count or request.unless in values or ends or loop_now_s() >= deadline_s:
                return values, ends

    async def arrive(self, host: int, *, timeout_s: float | None = None) -> None:
        """Wait until the store is there, and report the arrival of a host's launcher, by its position."""
        await self._call("exits", {"since": 0, "wait_s": 0.0, "host": host}, timeout_s=timeout_s)

    @override
    async def report_exit(self, end: Exit) -> None:
        await self._call("exit", {"rank": end.rank, "code": end.code, "why": end.why}, timeout_s=_LOST_AFTER_S)

    @override
    async def watch_exits(self, host: int | None = None, *, lasting: bool = False) -> AsyncIterator[Exit]:
        seen = 0
        while True:
            try:
                fields = {"since": seen, "wait_s": _POLL_S if host is None else _BEAT_S, "host": host}
                rows = await self._call("exits", fields, timeout_s=_LOST_AFTER_S)
            except RendezvousError as error:
                if not lasting or isinstance(error, StoreClosed):
                    return
                seen = 0
                await asyncio.sleep(AGAIN_S)
                continue
            for row in _expect(list, rows):
                seen += 1
                yield _exit(row)

    async def want_size(self, size: int) -> None:
        """Request a number of ranks, by ``PUT /v1/size``. Raises `ConfigError`: it is out of the job's bounds."""

        async def attempt() -> _Reply:
            return await self._exchange("size", b"%d" % size, _ANSWER_WITHIN_S, "PUT")

        reply = await self._repeated(attempt, _LOST_AFTER_S)
        if reply.status != 200:
            raise ConfigError(reply.body.decode(errors="replace").strip())

    async def shown(self) -> bytes:
        """Return the public bytes of the store, which prove nothing; empty without any."""
        answer = await self._repeated(lambda: self._ask("GET", SHOWN_PATH, {}, b"", _ANSWER_WITHIN_S), self._timeout_s)
        return answer.body if answer.status == 200 and len(answer.body) <= MAX_SHOWN_NBYTES else b""

    def forget(self) -> None:
        """Take the next store that answers at the URL for that of the job."""
        self.identity, self._nonce = b"", None

    async def close(self) -> None:
        """Close the connections; calls in flight fail. May be called twice."""
        await self._http.close()

    async def _call(self, name: str, fields: dict[str, Any], *, timeout_s: float | None = None) -> Any:
        """Answer to one request, repeated until there is one.

        No attempt begins later than ``timeout_s`` after the first one.
        """
        body: bytes = msgpack.packb(fields)
        if len(body) > MAX_BODY_NBYTES:
            raise RendezvousError(f"{name} has {len(body)} bytes to send, more than {MAX_BODY_NBYTES}")
        wait_s = float(fields.get("wait_s", 0.0))
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        return await self._repeated(lambda: self._attempt(name, body, wait_s + _ANSWER_WITHIN_S), patience_s)

    async def _repeated(self, attempt: Callable[[], Awaitable[T]], patience_s: float) -> T:
        """Repeat an attempt until one is answered; at least twice, since an answer may be lost."""
        deadline_s = loop_now_s() + patience_s
        pause_s = _FIRST_PAUSE_S
        for number in itertools.count():
            try:
                answer = await attempt()
            except SSLError as error:
                raise RendezvousError(f"no TLS with the store at {self.url}: {_cause(error)}") from error
            except OSError as error:
                if self._http.is_closed:
                    raise RendezvousError(f"the client of the store at {self.url} is closed") from error
                self.trouble = _cause(error)
                # At least two attempts: the first one may have met a connection that the server had just closed.
                if number and loop_now_s() + pause_s >= deadline_s:
                    raise RendezvousError(
                        f"the store at {self.url} could not be reached within {max(patience_s, 0):g} s: {self.trouble}"
                    ) from error
            else:
                self.trouble = ""
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        raise AssertionError("unreachable")

    async def _attempt(self, name: str, body: bytes, timeout_s: float) -> Any:
        reply = await self._exchange(name, body, timeout_s)
        answer = msgpack.unpackb(reply.body)
        match reply.status:
            case 200:
                return answer
            case 503:
                raise StoreClosed(f"the store at {self.url} is closing")
            case _:
                raise RendezvousError(f"the store at {self.url} refuses {name}: {answer}")

    async def _exchange(self, name: str, body: bytes, timeout_s: float, method: str = "POST") -> _Reply:
        """Send a request once; the answer is authenticated."""
        used = self._checked(self._nonce or await self._greet(timeout_s))
        reply = await self._send(name, body, used, timeout_s, method)
        if reply.status == 401 and await self._greet(timeout_s) != used:
            # another store listens there now, with another nonce
            used = self._checked(self._nonce or b"")
            reply = await self._send(name, body, used, timeout_s, method)
        if reply.status == 401:
            raise RendezvousError(f"the store at {self.url} refuses this process: its token is not the job's")
        if not is_answer_valid(used, reply.ticket, reply.status, reply.body, reply.header):
            raise RendezvousError(f"the server at {self.url} does not have the job's token: it is not the job's store")
        self.identity = identity_of(used)
        return reply

    def _checked(self, nonce: bytes) -> bytes:
        # A restarted store has another nonce, but the same identity; that of another job has neither.
        if self.identity and identity_of(nonce) != self.identity:
            raise StoreClosed(f"the store of another job is at {self.url} now")
        return nonce

    async def _send(self, name: str, body: bytes, nonce: bytes, timeout_s: float, method: str) -> _Reply:
        self._number += 1
        ticket = Ticket(self._client, self._number, f"/v1/{name}", digest_of(body), auth.tokens(self.token)[0])
        headers = {REQUEST_HEADER: request_header(nonce, ticket)}
        answer = await self._ask(method, ticket.path, headers, body, timeout_s)
        return _Reply(ticket, answer.status, answer.body, answer.fields.get(ANSWER_HEADER.lower(), ""))

    async def _greet(self, timeout_s: float) -> bytes:
        answer = await self._ask("GET", "/v1/hello", {}, b"", timeout_s)
        greeting = re.fullmatch(GREETING + rb"([0-9a-f]{64})", answer.body)
        if greeting is None:
            raise RendezvousError(f"the server at {self.url} is not a store of kfcomm (HTTP status {answer.status})")
        self._nonce = bytes.fromhex(greeting[1].decode())
        return self._nonce

    async def _ask(self, method: str, path: str, fields: dict[str, str], body: bytes, timeout_s: float) -> Response:
        async with asyncio.timeout(timeout_s):
            return await self._http.request(method, path, fields, body)


class _Reply(NamedTuple):
    ticket: Ticket
    status: int
    body: bytes
    header: str


def _exit(row: Sequence[Any]) -> Exit:
    rank, code, why = row
    return Exit(int(rank), int(code), str(why))


def _expect(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise RendezvousError(f"the store answered {type(value).__name__} instead of {kind.__name__}")
    return value


def _cause(error: OSError) -> str:
    """Cause of an error, without the address, which the caller names."""
    if isinstance(error, SSLCertVerificationError):
        return f"its certificate is not valid here: {error.verify_message}"
    if isinstance(error, SSLError):  # its number is not an errno
        reason = error.reason or str(error)
        return "it does not speak TLS" if reason == "WRONG_VERSION_NUMBER" else reason.replace("_", " ").lower()
    return why_failed(error)


def _poll_s(deadline_s: float) -> float:
    return min(_POLL_S, max(0.0, deadline_s - loop_now_s()))
