"""The store of a world in virtual time, which can be lost for a while, and has a word for one half of the ranks.

What is told to a lost store is told again until it is back, as a client does; whoever waits for news of it hears that
it is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kfcomm.errors import RendezvousError
from kfcomm.testing.store import MemoryStore, Welcome
from kfcomm.testing.virtual.network import NetworkModel
from kfcomm.types import Candidate, Wanted, override

WORD_WITHIN_S = 2.0
"""So long whoever asks for the store's word waits for it."""


class VirtualStore(MemoryStore):
    """Store of a world in virtual time, which can be lost for a while."""

    def __init__(self, model: NetworkModel) -> None:
        super().__init__()
        self._model = model
        self._words: dict[int, tuple[int, ...]] = {}
        self._num_losses = 0
        self._lost_by = 0
        self._back = asyncio.Event()
        self._back.set()

    async def lose(self, for_s: float) -> None:
        """Be lost for so long."""
        self._lost_by += 1
        self._num_losses += 1
        self._back.clear()
        self._tell()
        await asyncio.sleep(for_s)
        self._lost_by -= 1
        if not self._lost_by:
            self._back.set()

    @override
    async def ask_in(self, birth: int) -> Welcome:
        await self._reached()
        return await super().ask_in(birth)

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """Answer after a latency.

        Raises:
            RendezvousError: the store is lost.
        """
        await self._latency()
        return await super().candidates(known)

    @override
    async def welcome(self, births: Collection[int], said: Welcome) -> None:
        await self._reached()
        await super().welcome(births, said)

    async def wanted(self, known: Wanted) -> Wanted:
        """Answer after a latency.

        Raises:
            RendezvousError: the store is lost.
        """
        await self._latency()
        return await super().wanted(known)

    @override
    async def want_size(self, size: int) -> None:
        await self._reached()
        await super().want_size(size)

    @override
    async def want_replaced(self, birth: int) -> None:
        await self._reached()
        await super().want_replaced(birth)

    async def has_word(self, birth: int, living: Sequence[int], epoch: int) -> bool:
        """Whether these were the first to ask for this epoch."""
        try:
            async with asyncio.timeout(WORD_WITHIN_S):
                await self._reached()
        except TimeoutError:
            return False
        return birth in self._words.setdefault(epoch, tuple(living))

    async def changed(self) -> None:
        """Wait for a change.

        Raises:
            RendezvousError: the store is lost.
        """
        num_losses = self._num_losses
        if self._back.is_set():
            await super().changed()
        if not self._back.is_set() or num_losses != self._num_losses:
            raise RendezvousError("the store is gone")

    async def _reached(self) -> None:
        await self._latency()
        await self._back.wait()

    async def _latency(self) -> None:
        await asyncio.sleep(self._model.random.uniform(*self._model.timing.latency_s))
