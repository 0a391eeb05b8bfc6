"""What launchers and ranks of a running job tell each other, in folders of the store: over HTTP, or where it is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.board import ENTRY, SIZES

_WAIT_S = 20.0
AGAIN_S = 1.0
"""A store that is gone is looked for so often: it may be started again."""


class StoreClosed(RendezvousError):
    """The store says that it is closing, or that of another job is in its place: the job is over."""


class NotSet(RendezvousError):
    """Nobody has set a key in time."""


class Folders(ABC):
    """The folders of a store.

    Raises (all methods but those that watch): `RendezvousError` if the store is gone. Those that watch wait until it
    is back, and end when the job is over.
    """

    @abstractmethod
    async def find(self, key: str) -> bytes | None:
        """The value of ``key`` now, or None."""

    @abstractmethod
    async def claim(self, key: str, value: bytes) -> bytes:
        """Give ``key`` a value unless it has one. Returns the value it has: ``value`` if the claim won."""

    @abstractmethod
    async def collect(self, folder: str, count: int, *, timeout_s: float) -> dict[str, bytes]:
        """The values below ``folder``, by name, once there are ``count`` of them; after that time, what there is."""

    async def watch(self, folder: str) -> AsyncIterator[tuple[int, bytes]]:
        """Each value of a folder whose names are numbers, once it is there; ends when the store does."""
        known: set[str] = set()
        while (found := await self._found(folder, len(known) + 1)) is not None:
            for name in sorted(found.keys() - known, key=int):
                known.add(name)
                yield int(name), found[name]

    async def watch_sizes(self) -> AsyncIterator[int]:
        """Each number of ranks that is asked for; those that others have followed already are left out."""
        count = 1
        while (found := await self._found(SIZES, count)) is not None:
            if len(found) >= count:
                count = len(found) + 1
                yield int(found[str(count - 1)])

    async def _found(self, folder: str, count: int) -> dict[str, bytes] | None:
        """As `collect`, for as long as there is a store, or may be again; None if there is none any more."""
        while True:
            try:
                return await self.collect(folder, count, timeout_s=_WAIT_S)
            except StoreClosed:
                return None
            except RendezvousError:
                await asyncio.sleep(AGAIN_S)

    async def ask_size(self, size: int) -> None:
        """Ask for so many ranks."""
        mine, is_told = b"%d" % size, False
        while not is_told:
            number = 1 + len(await self.collect(SIZES, 0, timeout_s=0.0))
            is_told = await self.claim(f"{SIZES}/{number}", mine) == mine

    async def was_let_in(self, birth: int) -> bool:
        """Whether a process that was started later is a rank of the job, or was."""
        return await self.find(f"{ENTRY}/{birth}") is not None
