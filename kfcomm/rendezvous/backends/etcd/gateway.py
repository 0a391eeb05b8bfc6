"""Requests to an etcd of several members, through the JSON gateway of version 3 (``/v3/...``).

A failed attempt is repeated with the next member, with growing pauses, until one answers or time is up. All requests
here are idempotent. A refusal is final: a wrong password stays wrong. Except while a job runs: then the refusal of a
user is retried, since authentication may have been switched on, and may be switched off again.

Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and the status codes of gRPC.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.backends.etcd import Address
from kfcomm.rendezvous.keyvalue import loop_now_s

ATTEMPT_S = 4.0
"""Timeout of one attempt."""
SAID_AFTER_S = 3.0
"""Time without an answer after which a warning is logged."""
MAX_ANSWER_NBYTES = 1 << 27
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0

_INVALID, _NOT_FOUND, _EXISTS, _DENIED, _PRECONDITION = 3, 5, 6, 7, 9
_OUT_OF_RANGE, _UNKNOWN_CALL, _UNAUTHENTICATED = 11, 12, 16
_FINAL = {_INVALID, _NOT_FOUND, _EXISTS, _DENIED, _PRECONDITION, _OUT_OF_RANGE, _UNKNOWN_CALL, _UNAUTHENTICATED}
_STALE_TOKEN = ("invalid auth token", "auth store is old")
_NOT_ALLOWED = ("user name is empty", "authentication is not enabled", "authentication failed")

_ENDLESS = aiohttp.ClientTimeout(total=None)

_LOG = logging.getLogger("kfcomm.etcd")


class EtcdRefused(RendezvousError):
    """A refusal by etcd. ``code`` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NotThere(EtcdRefused):
    """A requested object, such as a lease, does not exist."""


class _Failed(Exception):
    """A failed attempt; it may be repeated."""


class Gateway:
    """Client of an etcd."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.trouble = ""  # cause of the last failed attempt; empty after a success
        # whether a job runs, which needs etcd for changes alone; before, it cannot begin without etcd
        self.is_in_use = False
        self._at = 0
        self._token = ""
        self._since_s: float | None = None
        self._is_said = False
        self._streams: set[aiohttp.ClientResponse] = set()
        connector = aiohttp.TCPConnector(ssl=address.tls if address.tls is not None else True)
        self._http = aiohttp.ClientSession(connector=connector)

    async def ask(self, path: str, fields: Mapping[str, Any], *, within_s: float = math.inf) -> dict[str, Any]:
        """Answer to one request, repeated until there is one.

        Raises:
            RendezvousError: no answer in time; names the cause.
            EtcdRefused: etcd refuses the request.
        """
        deadline_s, pause_s = loop_now_s() + within_s, FIRST_PAUSE_S
        while True:
            try:
                answer = await self._attempt(path, fields)
            except _Failed as error:
                self._has_failed(str(error))
                if loop_now_s() + pause_s >= deadline_s:
                    raise RendezvousError(
                        f"{self.address} could not be reached within {within_s:g} s: {self.trouble}"
                    ) from None
            else:
                self._has_answered()
                return answer
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def watch(self, key: bytes, end: bytes, revision: int) -> AsyncIterator[dict[str, Any]]:
        """Yield changes from a revision on, from one member; return when its stream ends.

        Each is the ``result`` of a message, with its ``events``. A member that has lost its leader ends the stream.
        """
        request = {"create_request": {"key": text(key), "range_end": text(end), "start_revision": str(revision)}}
        url = self.address.endpoints[self._at] + "/v3/watch"
        try:
            headers = await self._headers() | {"Grpc-Metadata-hasleader": "true"}
            async with asyncio.timeout(ATTEMPT_S):
                begun = await self._http.post(url, json=request, headers=headers, timeout=_ENDLESS)
            async with begun as response:
                self._streams.add(response)
                try:
                    async for line in _lines(response.content):
                        result = _object(line).get("result")
                        if result is None:
                            self._forget_token(line.decode(errors="replace"))
                            return
                        yield result
                        if result.get("canceled"):
                            return
                finally:
                    self._streams.discard(response)
        except (aiohttp.ClientError, OSError, ValueError, RendezvousError, _Failed) as error:
            if isinstance(error, TimeoutError):
                self.next_member()
            self.trouble = _cause(error)

    def next_member(self) -> None:
        """Switch to the next member; close the streams of the previous one, which may hang."""
        self._at = (self._at + 1) % len(self.address.endpoints)
        for response in self._streams:
            response.close()

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        await self._http.close()

    async def _attempt(self, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        for is_first in (True, False):
            status, answer = await self._post(path, fields, await self._headers())
            if status == 200:
                return answer
            message, code = _told(answer)
            if is_first and self._forget_token(message):
                continue
            if self.is_in_use and _is_about_users(message, code):
                raise _Failed(message)
            if code == _NOT_FOUND:
                raise NotThere(f"{self.address} says: {message}", code)
            if code in _FINAL:
                raise EtcdRefused(f"{self.address} refuses {path.removeprefix('/v3/')}: {message}", code)
            raise _Failed(message)
        raise _Failed("it refuses each token that it issued")

    async def _headers(self) -> dict[str, str]:
        if not self.address.user:
            return {}
        if not self._token:
            who = {"name": self.address.user, "password": self.address.password}
            status, answer = await self._post("/v3/auth/authenticate", who, {})
            if status != 200:
                message, code = _told(answer)
                if self.is_in_use and "authentication is not enabled" in message:
                    return {}
                if code not in _FINAL or self.is_in_use:
                    raise _Failed(message)
                raise EtcdRefused(f"{self.address} refuses the user {self.address.user!r}: {message}", code)
            self._token = str(answer["token"])
        return {"Authorization": self._token}

    def _forget_token(self, message: str) -> bool:
        """Drop the token if it has expired; return whether it had."""
        is_stale = bool(self._token) and any(one in message for one in _STALE_TOKEN)
        if is_stale:
            self._token = ""
        return is_stale

    async def _post(
        self, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, dict[str, Any]]:
        url = self.address.endpoints[self._at] + path
        try:
            timeout = aiohttp.ClientTimeout(total=ATTEMPT_S)
            async with self._http.post(url, json=fields, headers=headers, timeout=timeout) as response:
                body = await response.content.read(MAX_ANSWER_NBYTES)
                while not response.content.at_eof():
                    body += await response.content.read(MAX_ANSWER_NBYTES)
                    if len(body) > MAX_ANSWER_NBYTES:
                        raise _Failed(f"an answer of more than {MAX_ANSWER_NBYTES} bytes")
                return response.status, _object(body)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Failed(f"{url.removesuffix(path)}: {_cause(error)}") from error

    def _has_failed(self, cause: str) -> None:
        self.trouble = cause
        self._since_s = loop_now_s() if self._since_s is None else self._since_s
        if not self._is_said and loop_now_s() - self._since_s > SAID_AFTER_S:
            self._is_said = True
            meanwhile = "training goes on, and changes wait" if self.is_in_use else "nothing is started before it does"
            _LOG.warning("%s does not answer: %s (%s)", self.address, meanwhile, cause)
        self.next_member()

    def _has_answered(self) -> None:
        if self._is_said:
            _LOG.warning("%s answers again", self.address)
        self._is_said, self._since_s, self.trouble = False, None, ""


def text(key: bytes) -> str:
    """Encode bytes for the gateway."""
    return base64.b64encode(key).decode()


def data(value: str) -> bytes:
    """The inverse of `text`."""
    return base64.b64decode(value)


def end_of(prefix: bytes) -> bytes:
    """End of the range of all keys with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines up to `MAX_ANSWER_NBYTES`; those of aiohttp are limited to 64 KiB."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > MAX_ANSWER_NBYTES:
            return


def _object(body: bytes) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(ValueError):
        found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"it is not an etcd of version 3.4 or later: it answers {body[:64]!r}")
    return found


def _told(answer: Mapping[str, Any]) -> tuple[str, int]:
    """Message and code of an error; in streams they are one level deeper."""
    error = answer.get("error")
    inner: Mapping[str, Any] = error if isinstance(error, dict) else answer
    code = inner.get("code") or inner.get("grpc_code") or 0
    return str(inner.get("message") or inner.get("error") or answer), int(code)


def _is_about_users(message: str, code: int) -> bool:
    """Whether a request was refused because of its user."""
    return code in (_DENIED, _UNAUTHENTICATED) or any(one in message for one in _NOT_ALLOWED)


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ATTEMPT_S:g} s"
    return str(error) or type(error).__name__
