"""World in virtual time: control planes and a store that can be lost, over the network of `network`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from kfcomm.core.membership import BEATS
from kfcomm.engine.control import ControlEvents
from kfcomm.engine.control.memory import MemoryHub, News
from kfcomm.errors import RendezvousError
from kfcomm.testing.store import MemoryStore, MemoryWelcome
from kfcomm.testing.virtual.network import VirtualLinks, VirtualNetworkModel
from kfcomm.testing.worlds import MemoryWorld
from kfcomm.transports.reactor import Callback, Reactor
from kfcomm.types import Candidate, Wanted, override

# What a rank says to all others reaches all that live, or none: they pass it on to each other. So of a rank that dies
# what was under way may be lost, but not for some only.
LAST_WORDS_LOST = 0.5
"""Probability that what a rank that dies has said, and no rank has heard yet, is lost."""


class _Said:
    """News for all others."""

    __slots__ = ("is_heard", "news")

    def __init__(self, news: News, *, is_heard: bool) -> None:
        self.news = news
        self.is_heard = is_heard

    def __call__(self, events: ControlEvents) -> None:
        self.news(events)


class VirtualHub(MemoryHub):
    """Control planes of one epoch, with latencies and lost messages."""

    def __init__(self, model: VirtualNetworkModel, uids: Sequence[int]) -> None:
        super().__init__(len(uids))
        self._model = model
        self._uids = uids
        self._silenced: set[int] = set()
        self._knows: set[int] = set()
        self._goodbyes: dict[int, _Said] = {}
        # Sorted, since the order of a set may differ between two runs. Each pair is there in both orders.
        for one, other in sorted(model.lost):
            if one < other:
                self.lose(one, other)

    @override
    def kill(self, rank: int) -> None:
        if self._model.random.random() < LAST_WORDS_LOST:
            self._silenced.add(rank)
            if rank in self._goodbyes and not self._goodbyes[rank].is_heard:
                self.left.discard(rank)  # so it is lost
        super().kill(rank)

    @override
    def tell_others(self, rank: int, news: News, about: int | None = None) -> None:
        source = rank if about is None else about
        is_heard = source in self._silenced or bool(self._early.keys() - {rank})
        said = _Said(news, is_heard=is_heard)
        if rank in self.left:
            self._goodbyes.setdefault(rank, said)
        super().tell_others(rank, said, about)

    @override
    def carry(self, source: int, target: int, deliver: Callback, *arguments: object) -> None:
        road = self._uids[source], self._uids[target]
        self._model.carry(*road, "news", self._arrived, source, deliver, arguments)

    def ended(self, uid: int) -> None:
        """An initial rank that has not entered this epoch by now never will: its port refuses connections."""
        if uid in self._uids and self._uids.index(uid) in self._early:
            self.declare_lost(self._uids.index(uid), "its process has ended", has_ended=True)

    def lose(self, one: int, other: int, *, stopped: int | None = None) -> None:
        """Let two initial ranks detect that they have lost each other; a stopped one, that it is lost itself."""
        if one in self._uids and other in self._uids:
            for uid, peer in ((one, other), (other, one)):
                self._find_out(self._uids.index(uid), self._uids.index(peer), was_stopped=uid == stopped)

    def _find_out(self, rank: int, peer: int, *, was_stopped: bool) -> None:
        lost_after_s = self._model.timing.lost_after_s

        def news(events: ControlEvents) -> None:
            if was_stopped and rank not in self._knows:
                self._knows.add(rank)
                events.on_peer_lost(rank, "it was stopped")
            events.on_peer_lost(peer, f"nothing was heard of it for {lost_after_s:g} s")
            self.planes[rank].let_go(peer)

        if not self.tell_early(rank, news):
            self._model.tell(self._uids[rank], lost_after_s / BEATS, self.planes[rank].hear, news)

    def _arrived(self, source: int, deliver: Callback, arguments: tuple[object, ...]) -> None:
        for one in arguments:
            if isinstance(one, _Said):
                if source in self._silenced and not one.is_heard:
                    return
                one.is_heard = True
        deliver(*arguments)


WORD_WITHIN_S = 2.0
"""Longest wait of a rank that asks which half of the ranks survives."""


class VirtualStore(MemoryStore):
    """Store of a world in virtual time, which can be lost for a while."""

    def __init__(self, model: VirtualNetworkModel) -> None:
        super().__init__()
        self._model = model
        self._words: dict[int, tuple[int, ...]] = {}
        self._num_losses = 0
        self._lost_by = 0
        self._back = asyncio.Event()
        self._back.set()

    async def lose(self, for_s: float) -> None:
        """Be lost for this time."""
        self._lost_by += 1
        self._num_losses += 1
        self._back.clear()
        self.trouble = "the store is gone"
        self._tell()
        await asyncio.sleep(for_s)
        self._lost_by -= 1
        if not self._lost_by:
            self.trouble = ""
            self._back.set()

    @override
    async def ask_in(self, uid: int) -> MemoryWelcome:
        await self._reached()
        return await super().ask_in(uid)

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        """Answer after a latency; raises `RendezvousError` while the store is lost."""
        await self._latency()
        return await super().candidates(known)

    @override
    async def welcome(self, uids: Collection[int], said: MemoryWelcome) -> None:
        await self._reached()
        await super().welcome(uids, said)

    @override
    async def invite(self, uids: Collection[int], said: MemoryWelcome) -> bool:
        await self._reached()
        return await super().invite(uids, said)

    async def wanted(self, known: Wanted) -> Wanted:
        """Answer after a latency; raises `RendezvousError` while the store is lost."""
        await self._latency()
        return await super().wanted(known)

    @override
    async def want_size(self, size: int) -> None:
        await self._reached()
        await super().want_size(size)

    @override
    async def want_replaced(self, uid: int) -> None:
        await self._reached()
        await super().want_replaced(uid)

    async def has_word(self, uid: int, living: Sequence[int], epoch: int) -> bool:
        """Return whether these were the first to ask for this epoch."""
        try:
            async with asyncio.timeout(WORD_WITHIN_S):
                await self._reached()
        except TimeoutError:
            return False
        return uid in self._words.setdefault(epoch, tuple(living))

    async def changed(self) -> None:
        """Wait for a change; raises `RendezvousError` if the store is lost meanwhile."""
        num_losses = self._num_losses
        if self._back.is_set():
            await super().changed()
        if not self._back.is_set() or num_losses != self._num_losses:
            raise RendezvousError("the store is gone")

    async def _reached(self) -> None:
        # What is told to a lost store is told again until it is back, as a client does; a rank that waits for news of
        # it hears that it is gone (`changed`).
        await self._latency()
        await self._back.wait()

    async def _latency(self) -> None:
        await asyncio.sleep(self._model.random.uniform(*self._model.timing.latency_s))


NUM_CPUS = 8
"""Of each host, on whatever machine this runs: strategies depend on it."""


class VirtualWorld(MemoryWorld):
    """A `MemoryWorld` over a `VirtualNetworkModel`."""

    store: VirtualStore

    def __init__(self, model: VirtualNetworkModel, size: int, *, reactor: Reactor, **options: Any) -> None:
        self._model = model
        self._links: list[VirtualLinks] = []
        self._hubs: list[VirtualHub] = []
        self._ended: set[int] = set()
        super().__init__(size, reactor=reactor, num_cpus=NUM_CPUS, **options)

    @override
    def new_links(self, births: tuple[int, ...]) -> VirtualLinks:
        self._links.append(VirtualLinks(self._reactor, self._model, births))
        return self._links[-1]

    @override
    def new_hub(self, births: tuple[int, ...]) -> VirtualHub:
        self._hubs.append(VirtualHub(self._model, births))
        for uid in sorted(self._ended):
            self._hubs[-1].ended(uid)
        return self._hubs[-1]

    @override
    def new_store(self) -> VirtualStore:
        return VirtualStore(self._model)

    def ended(self, rank: int) -> None:
        """Note that the program of ``rank`` has ended: it enters no further epoch, even if others expect it there."""
        self._ended.add(rank)
        for hub in self._hubs:
            hub.ended(rank)

    def lose(self, one: int, other: int, *, stopped: int | None = None) -> None:
        """Declare two ranks lost to each other, in any epoch, after a silence that was too long."""
        if self._model.lose(one, other):
            for links in self._links:
                links.lose(one, other)
            for hub in self._hubs:
                hub.lose(one, other, stopped=stopped)
