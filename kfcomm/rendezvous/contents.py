"""Contents of a store in memory: named values, and the exits of ranks; with waits for either.

Everything is bounded: number and length of keys, length of values, their sum, the number of exits. Waits are by folder,
so that a change wakes only waiters that it can concern. Independent of HTTP and tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from kfcomm.errors import LocalProtocolError
from kfcomm.rendezvous.keyvalue import ENDS, MAX_KEY_LENGTH, MAX_VALUE_NBYTES, Exit, MeetRequest, StoreClosed

T = TypeVar("T")

MAX_TOTAL_NBYTES = 1 << 26
MAX_KEYS = 1 << 18
MAX_EXITS = 1 << 17

GONE_AFTER_S = 0.7
"""Time for a rank whose connection ended while it joined to ask again."""

_EXITS = "\0exits"


class _Waits:
    """Waits for changes, by folder: a change wakes only waiters that it can concern."""

    def __init__(self) -> None:
        self.is_closed = False
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}

    def wake(self, folder: str) -> None:
        for waiter in self._waiters.pop(folder, ()):
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        self.is_closed = True
        for folder in list(self._waiters):
            self.wake(folder)

    async def wait(self, folders: tuple[str, ...], look: Callable[[], T | None], wait_s: float) -> T | None:
        """Return what ``look`` finds, once that is not None; None if time is up."""
        try:
            async with asyncio.timeout(wait_s):
                # Looked at again after every change: another waiter may have been meant, or a value may be gone.
                while (found := look()) is None:
                    await self._changed(folders)
                return found
        except TimeoutError:
            return None

    async def _changed(self, folders: tuple[str, ...]) -> None:
        if self.is_closed:
            raise StoreClosed("the store is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for folder in folders:
            self._waiters.setdefault(folder, set()).add(waiter)
        try:
            await waiter
        finally:
            for folder in folders:
                waiters = self._waiters.get(folder, set())
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(folder, None)


class Contents:
    """Named values and exits. All methods but the waits are instantaneous.

    Raises (all methods): `StoreClosed` after `close`, `LocalProtocolError` for what is out of bounds.
    """

    def __init__(self) -> None:
        # time of the latest request of the launcher of each host, by its position, by the clock of the loop
        self.heard_s: dict[int, float] = {}
        self._folders: dict[str, dict[str, bytes]] = {}
        self._num_keys = 0
        self._nbytes = 0
        self._exits: dict[int, Exit] = {}
        # how often each rank has asked whether its world is complete, by folder and rank
        self.asked: dict[tuple[str, int], int] = {}
        self._waits = _Waits()
        # claims a key in the store that these are the contents of, as soon as that can be
        self.later: Callable[[str, bytes], object] = self.claim

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._waits.is_closed

    @property
    def exits(self) -> Mapping[int, Exit]:
        """Exits by rank, in the order in which they were reported."""
        return self._exits

    def check(self, key: str, value: bytes) -> None:
        """Check that a value fits."""
        self._size_with(*self._checked(key, value), value)

    def set(self, key: str, value: bytes) -> None:
        """Give ``key`` a value, or another one."""
        folder, name = self._checked(key, value)
        self._num_keys, self._nbytes = self._size_with(folder, name, value)
        self._folders.setdefault(folder, {})[name] = value
        self._waits.wake(folder)

    def _size_with(self, folder: str, name: str, value: bytes) -> tuple[int, int]:
        old = self._folders.get(folder, {}).get(name)
        nbytes = self._nbytes + len(value) - len(old or b"")
        num_keys = self._num_keys + (old is None)
        if nbytes > MAX_TOTAL_NBYTES or num_keys > MAX_KEYS:
            raise LocalProtocolError(f"the store is full: {self._num_keys} keys, {self._nbytes} bytes")
        return num_keys, nbytes

    def take(self, key: str, value: bytes) -> None:
        """As `set`, with a value read back from elsewhere, which may be an exit."""
        folder, name = self._checked(key, value)
        if folder == ENDS:
            self.report_exit(Exit.from_wire(name, value))
        else:
            self.set(key, value)

    def drop(self, key: str) -> None:
        """Remove the value of ``key``, if any."""
        folder, name = self._checked(key)
        if folder == ENDS:
            if name.isdigit():
                self._exits.pop(int(name), None)
        elif (value := self._folders.get(folder, {}).pop(name, None)) is not None:
            self._nbytes -= len(value)
            self._num_keys -= 1

    def held(self, key: str) -> bytes | None:
        """The value of a key, or of an exit, now; None without one."""
        folder, name = self._checked(key)
        if folder == ENDS:
            end = self._exits.get(int(name)) if name.isdigit() else None
            return None if end is None else end.to_wire()
        return self._folders.get(folder, {}).get(name)

    def folder(self, name: str) -> Mapping[str, bytes]:
        """The values of a folder now, by name."""
        return dict(self._folders.get(name, {}))

    def items(self) -> Iterator[tuple[str, bytes]]:
        """All keys and values, exits included, as `take` takes them."""
        for folder, values in self._folders.items():
            for name, value in values.items():
                yield f"{folder}/{name}" if folder else name, value
        for end in self._exits.values():
            yield end.key, end.to_wire()

    def claim(self, key: str, value: bytes) -> bytes:
        """Give ``key`` a value unless it has one; returns the value that it has."""
        folder, name = self._checked(key, value)
        held = self._folders.get(folder, {}).get(name)
        if held is None:
            self.set(key, value)
            return value
        return held

    async def get(self, key: str, wait_s: float) -> bytes | None:
        """The value of ``key``, waiting for it up to ``wait_s`` seconds; None if it is not set."""
        folder, name = self._checked(key)
        return await self._waits.wait((folder,), lambda: self._folders.get(folder, {}).get(name), wait_s)

    async def collect(self, folder: str, count: int, unless: str | None, wait_s: float) -> dict[str, bytes]:
        """All values of ``folder`` by name, once there are ``count`` or one named ``unless``, or time is up."""
        self._checked(f"{folder}/")

        def enough() -> bool | None:
            values = self._folders.get(folder, {})
            return True if len(values) >= count or unless in values else None

        await self._waits.wait((folder,), enough, wait_s)
        return dict(self._folders.get(folder, {}))

    async def meet(self, request: MeetRequest, wait_s: float) -> tuple[dict[str, bytes], list[Exit]]:
        """Return values and exits, see `MeetRequest`.

        Later exits, of ranks from ``count`` on, do not matter: those started later, or spare, may end. If the caller
        disconnects meanwhile, and does not ask again, the others are notified by the value named ``unless``.
        """
        folder, count, unless = request.folder, request.count, request.unless
        self._checked(f"{folder}/{unless}")
        asker = folder, request.rank
        self.asked[asker] = number = self.asked.get(asker, 0) + 1

        def ends() -> list[Exit]:
            return [end for end in self._exits.values() if end.rank < count] if request.heeds_ends else []

        def enough() -> bool | None:
            values = self._folders.get(folder, {})
            return True if len(values) >= count or unless in values or ends() else None

        try:
            await self._waits.wait((folder, _EXITS), enough, wait_s)
        except asyncio.CancelledError:
            # The client has disconnected. It may have lost one connection only, and ask again over another one.
            asyncio.get_running_loop().call_later(GONE_AFTER_S, self._gone, request, number)
            raise
        return dict(self._folders.get(folder, {})), ends()

    def _gone(self, request: MeetRequest, number: int) -> None:
        folder, rank = request.folder, request.rank
        is_complete = len(self._folders.get(folder, {})) >= request.count
        if self.is_closed or is_complete or self.asked.get((folder, rank)) != number:
            return
        text = f"{rank}: rank {rank} went away while the world was joined: its connection to the store ended"
        with contextlib.suppress(LocalProtocolError):
            self.later(f"{folder}/{request.unless}", text.encode())

    def report_exit(self, end: Exit) -> None:
        """Record the exit of a rank; the first report of a rank stands."""
        if self.is_closed:
            raise StoreClosed("the store is closed")
        # The first report stands: later ones are repetitions, or guesses of launchers that gave the host up.
        if end.rank not in self._exits and len(self._exits) < MAX_EXITS:
            self._exits[end.rank] = end
            self._waits.wake(_EXITS)

    async def exits_since(self, since: int, wait_s: float, host: int | None = None) -> list[Exit]:
        """Exits after the first ``since``, waiting up to ``wait_s`` seconds for one; ``host``: the asker's."""
        if host is not None and len(self.heard_s) < MAX_EXITS:
            self.heard_s[host] = asyncio.get_running_loop().time()
        await self._waits.wait((_EXITS,), lambda: True if len(self._exits) > since else None, wait_s)
        return list(self._exits.values())[since:]

    def close(self) -> None:
        """End every wait with `StoreClosed`, and refuse later calls."""
        self._waits.close()

    def _checked(self, key: str, value: bytes = b"") -> tuple[str, str]:
        if self.is_closed:
            raise StoreClosed("the store is closed")
        if not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
            raise LocalProtocolError(f"a key must have 1 to {MAX_KEY_LENGTH} printable characters")
        if len(value) > MAX_VALUE_NBYTES:
            raise LocalProtocolError(f"a value has {len(value)} bytes, more than {MAX_VALUE_NBYTES}")
        folder, _, name = key.rpartition("/")
        return folder, name
