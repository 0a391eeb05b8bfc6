"""What launchers and ranks of a running job tell each other, in folders of the store: over HTTP, or where it is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.board import ENTRY, SIZES
from kfcomm.types import Wanted

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
        """Each number of ranks that is asked for; those that others have followed already are left out.

        What the launcher makes of it, by `hold`, is none.
        """
        async for told in self._told():
            sizes = [wanted.size for wanted, is_held in told if not is_held]
            if sizes:
                yield sizes[-1]

    async def watch_wanted(self) -> AsyncIterator[Wanted]:
        """What is asked of the ranks, by whomever: each that no other has followed already."""
        async for told in self._told():
            yield told[-1][0]

    async def _told(self) -> AsyncIterator[list[tuple[Wanted, bool]]]:
        """What comes together of what is asked, and whether the launcher has said it."""
        count = 0
        while (found := await self._found(SIZES, count + 1)) is not None:
            new = [read_wanted(found[str(number)]) for number in range(count + 1, len(found) + 1)]
            count = len(found)
            if new:
                yield new

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
        """Ask for so many ranks; who was asked to go is still to go."""
        await self._ask_for(lambda last: _written(Wanted(size, last.leavers), is_held=False))

    async def hold(self, wanted: Wanted) -> None:
        """Have the ranks keep to this: said by the launcher of the first host, which knows what there is room for."""
        await self._ask_for(lambda _: _written(wanted, is_held=True))

    async def ask_to_go(self, birth: int) -> None:
        """Ask a rank to go, whatever else was asked; the launcher hears of it by other ways."""
        await self._ask_for(lambda last: _written(Wanted(last.size, (*last.leavers, birth)), is_held=True))

    async def _ask_for(self, following: Callable[[Wanted], bytes]) -> None:
        """Apply a change to the latest request, with retries if others write meanwhile; no write if it is the same."""
        is_told = False
        while not is_told:
            found = await self.collect(SIZES, 0, timeout_s=0.0)
            last = found.get(str(len(found)))
            mine = following(Wanted() if last is None else read_wanted(last)[0])
            is_told = mine == last or await self.claim(f"{SIZES}/{1 + len(found)}", mine) == mine

    async def was_let_in(self, birth: int) -> bool:
        """Whether a process that was started later is a rank of the job, or was."""
        return await self.find(f"{ENTRY}/{birth}") is not None


def _written(wanted: Wanted, *, is_held: bool) -> bytes:
    """The number, a colon or a space, the births."""
    return b"%d%s%s" % (wanted.size, b" " if is_held else b":", b",".join(b"%d" % birth for birth in wanted.leavers))


def read_wanted(told: bytes) -> tuple[Wanted, bool]:
    """What lies in the folder of sizes, and whether the launcher has said it."""
    is_held = b" " in told
    size, _, leavers = told.partition(b" " if is_held else b":")
    return Wanted(int(size), tuple(int(birth) for birth in leavers.split(b",") if birth)), is_held
