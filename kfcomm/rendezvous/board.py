"""What the store remembers: named values, and which ranks have ended; with waits for either.

Everything is bounded: number and length of keys, length of values, their sum, the number of exits. Keys are
paths; the part before the last slash is the *folder*, and waits are by folder, so that a change wakes only
those whom it can concern. The board knows nothing of HTTP or tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

from kfcomm.errors import LocalProtocolError

T = TypeVar("T")

MAX_KEY_LENGTH = 256
MAX_VALUE_NBYTES = 1 << 19
MAX_BODY_NBYTES = MAX_VALUE_NBYTES + 1024
MAX_TOTAL_NBYTES = 1 << 26
MAX_KEYS = 1 << 18
MAX_EXITS = 1 << 17

_EXITS = "\0exits"


class Closed(Exception):
    """The board has been closed; nothing more will come."""


class Board:
    """Named values and exits. All methods but the waits are instantaneous.

    Raises (all methods): `Closed` after `close`, `LocalProtocolError` for what is out of bounds.
    """

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, bytes]] = {}
        self._num_keys = 0
        self._nbytes = 0
        self._exits: dict[int, int] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False

    @property
    def exits(self) -> Mapping[int, int]:
        """Exit codes by rank, in the order in which they were reported."""
        return self._exits

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value, or another one."""
        folder, name = self._checked(key, value)
        values = self._folders.setdefault(folder, {})
        old = values.get(name)
        nbytes = self._nbytes + len(value) - len(old or b"")
        num_keys = self._num_keys + (old is None)
        if nbytes > MAX_TOTAL_NBYTES or num_keys > MAX_KEYS:
            raise LocalProtocolError(f"the store is full: {self._num_keys} keys, {self._nbytes} bytes")
        values[name] = value
        self._nbytes, self._num_keys = nbytes, num_keys
        self._wake(folder)

    def claim(self, key: str, value: bytes) -> bytes:
        """Give ``key`` a value unless it has one; returns the value that it has."""
        folder, name = self._checked(key, value)
        held = self._folders.get(folder, {}).get(name)
        if held is None:
            self.set(key, value)
            return value
        return held

    async def get(self, key: str, wait_s: float) -> bytes | None:
        """The value of ``key``, waiting for it up to ``wait_s`` seconds; None if it has none."""
        folder, name = self._checked(key)
        return await self._wait(folder, lambda: self._folders.get(folder, {}).get(name), wait_s)

    async def collect(self, folder: str, count: int, unless: str | None, wait_s: float) -> dict[str, bytes]:
        """All values of ``folder`` by name, once there are ``count`` or one named ``unless``, or time is up."""
        self._checked(f"{folder}/")

        def enough() -> bool | None:
            values = self._folders.get(folder, {})
            return True if len(values) >= count or unless in values else None

        await self._wait(folder, enough, wait_s)
        return dict(self._folders.get(folder, {}))

    def report_exit(self, rank: int, code: int) -> None:
        """Note that the process of ``rank`` has ended; the first report of a rank stands."""
        if self._closed:
            raise Closed
        if rank not in self._exits and len(self._exits) < MAX_EXITS:
            self._exits[rank] = code
            self._wake(_EXITS)

    async def exits_since(self, since: int, wait_s: float) -> list[tuple[int, int]]:
        """Exits after the first ``since``, waiting up to ``wait_s`` seconds for one."""
        await self._wait(_EXITS, lambda: True if len(self._exits) > since else None, wait_s)
        return list(self._exits.items())[since:]

    def close(self) -> None:
        """End every wait with `Closed`, and refuse what comes after."""
        self._closed = True
        for folder in list(self._waiters):
            self._wake(folder)

    def _checked(self, key: str, value: bytes = b"") -> tuple[str, str]:
        if self._closed:
            raise Closed
        if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
            raise LocalProtocolError(f"a key must have 1 to {MAX_KEY_LENGTH} printable characters")
        if len(value) > MAX_VALUE_NBYTES:
            raise LocalProtocolError(f"a value has {len(value)} bytes, more than {MAX_VALUE_NBYTES}")
        folder, _, name = key.rpartition("/")
        return folder, name

    def _wake(self, folder: str) -> None:
        for waiter in self._waiters.pop(folder, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, folder: str, look: Callable[[], T | None], wait_s: float) -> T | None:
        try:
            async with asyncio.timeout(wait_s):
                while (found := look()) is None:
                    await self._changed(folder)
                return found
        except TimeoutError:
            return None

    async def _changed(self, folder: str) -> None:
        if self._closed:
            raise Closed
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(folder, set()).add(waiter)
        try:
            await waiter
        finally:
            self._forget(folder, waiter)

    def _forget(self, folder: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(folder)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[folder]
