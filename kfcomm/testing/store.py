"""The store of a world in memory: who waits to be let in, and how many ranks are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kfcomm.types import Candidate, Wanted

if TYPE_CHECKING:
    from kfcomm.testing.worlds import Epoch


class Welcome(NamedTuple):
    """Answer to an admitted process.

    Attributes:
        epoch: which it belongs to from now on.
        num_old: so many of its ranks, the first ones, were there before.
        strategy: its name.
    """

    epoch: Epoch
    num_old: int
    strategy: str


class MemoryStore:
    """Part of ``interfaces.Network``, for all ranks of a world. Never lost; see there for what the methods do."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Welcome]] = {}
        self._wanted = Wanted()
        self._changed = asyncio.Event()

    async def ask_in(self, birth: int) -> Welcome:
        """Wait, as the process of this uid, to be admitted."""
        self._waiting[birth] = asyncio.get_running_loop().create_future()
        self._tell()
        return await self._waiting[birth]

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """Processes that wait and are not known, as soon as there are any."""
        while not (found := [birth for birth, one in self._waiting.items() if not (one.done() or birth in known)]):
            await self.changed()
        return [Candidate(birth, b"") for birth in sorted(found)]

    async def welcome(self, births: Collection[int], said: Welcome) -> None:
        """Let these in."""
        for birth in births:
            waiting = self._waiting.get(birth)
            if waiting is not None and not waiting.done():
                waiting.set_result(said)

    async def wanted(self, known: Wanted) -> Wanted:
        """Latest request for a size, as soon as it differs from the known one."""
        while self._wanted in (Wanted(), known):
            await self.changed()
        return self._wanted

    async def want_size(self, size: int) -> None:
        """Ask for so many ranks; who was asked to go is still to go."""
        self.set_size(size, self._wanted.leavers)

    async def want_replaced(self, birth: int) -> None:
        """Ask to replace a process by one that waits."""
        self.set_size(self._wanted.size, (*self._wanted.leavers, birth))

    def set_size(self, size: int, leavers: tuple[int, ...] = ()) -> None:
        """Somebody outside of the world asks for so many, and for these to go."""
        self._wanted = Wanted(size, leavers)
        self._tell()

    async def has_word(self, birth: int, living: Sequence[int], epoch: int) -> bool:
        """Whether ``birth`` and these others, half of all ranks, make this epoch: never, without more to go by."""
        del birth, living, epoch
        return False

    async def changed(self) -> None:
        """Wait until there is something new."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
