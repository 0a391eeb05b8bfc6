"""Store of the membership of a world in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kfcomm.types import Candidate, Wanted

if TYPE_CHECKING:
    from kfcomm.testing.network import MemoryEpoch


class MemoryWelcome(NamedTuple):
    """Answer to an admitted process."""

    epoch: MemoryEpoch  # which it belongs to from now on
    num_old: int  # so many of its ranks, the first ones, were there before
    strategy: str  # its name


class MemoryStore:
    """Store of the membership: processes that wait to be admitted, and the requested size. Never lost."""

    trouble = ""
    """Why it does not answer."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[MemoryWelcome]] = {}
        self._invited: dict[int, asyncio.Future[MemoryWelcome]] = {}
        self._wanted = Wanted()
        self._changed = asyncio.Event()

    async def ask_in(self, uid: int) -> MemoryWelcome:
        """Wait, as the process of this uid, to be admitted."""
        self._waiting[uid] = asyncio.get_running_loop().create_future()
        self._tell()
        return await self._waiting[uid]

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """Return waiting processes that are not known, as soon as there are any."""
        while not (found := [uid for uid, one in self._waiting.items() if not (one.done() or uid in known)]):
            await self.changed()
        return [Candidate(uid, b"") for uid in sorted(found)]

    async def welcome(self, uids: Collection[int], said: MemoryWelcome) -> None:
        """Admit these processes."""
        for uid in uids:
            waiting = self._waiting.get(uid)
            if waiting is not None and not waiting.done():
                waiting.set_result(said)

    def invitation(self, uid: int) -> asyncio.Future[MemoryWelcome]:
        """Invitation of the process of this uid; it comes once."""
        return self._invited.setdefault(uid, asyncio.get_running_loop().create_future())

    async def invite(self, uids: Collection[int], said: MemoryWelcome) -> bool:
        """Invite these processes; False if one was invited to another epoch before."""
        for uid in uids:
            if not (invited := self.invitation(uid)).done():
                invited.set_result(said)
        return all(self.invitation(uid).result().epoch is said.epoch for uid in uids)

    async def wanted(self, known: Wanted) -> Wanted:
        """Return the latest request for a size, as soon as it differs from the known one."""
        while self._wanted in (Wanted(), known):
            await self.changed()
        return self._wanted

    async def want_size(self, size: int) -> None:
        """Request this number of ranks; ranks that were asked to leave still have to."""
        self.set_size(size, self._wanted.leavers)

    async def want_replaced(self, uid: int) -> None:
        """Ask to replace a process by one that waits."""
        self.set_size(self._wanted.size, (*self._wanted.leavers, uid))

    def set_size(self, size: int, leavers: tuple[int, ...] = ()) -> None:
        """Request this number of ranks, and that these leave, from outside of the world."""
        self._wanted = Wanted(size, leavers)
        self._tell()

    async def has_word(self, uid: int, living: Sequence[int], epoch: int) -> bool:
        """Whether this uid and these others, half of all ranks, may make this epoch: never."""
        return False

    async def changed(self) -> None:
        """Wait until there is something new."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        # A new event each time: one that stays set would wake later waiters for old news.
        self._changed = asyncio.Event()
