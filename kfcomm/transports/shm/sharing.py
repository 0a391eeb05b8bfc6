"""Shared memory as a transport: opens links to peers of the same host, and takes those that they open.

It owns the arena, which is made with the first link that is opened here, and the hub. It knows sockets only after
their handshake, and nothing of who may share with whom.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from kfcomm.errors import KfcommError
from kfcomm.transports.base import Waiter
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.arena import SLAB_NBYTES, Arena
from kfcomm.transports.shm.greeting import accept, offer
from kfcomm.transports.shm.heap import Heaps
from kfcomm.transports.shm.hub import Hub
from kfcomm.transports.shm.link import ShmLink, Wire
from kfcomm.transports.shm.receiver import ShmReceiver
from kfcomm.transports.shm.segment import SharingRefused, why_unsupported
from kfcomm.transports.shm.sender import ShmSender
from kfcomm.transports.shm.slots import SlotMemory
from kfcomm.transports.sockets import closed_on_failure

logger = logging.getLogger("kfcomm")

OFFER_WITHIN_S = 10.0
"""A peer offers its memory as soon as it has connected."""
MIN_SLABS, MAX_SLABS = 32, 64
"""Of 1 MiB: the memory that this rank shows to all its peers together. It is taken as it is used."""


class Sharing:
    """The shared-memory links of one process.

    Args:
        loop: where links are agreed on.
        reactor: who drives them then.
        inbound: who hears what arrives.
        ranks: world ranks on this host.
        rank: of this process.
        has_far: there are ranks on other hosts.
        former: that of the epoch before. Its arena is taken over, if nobody reads in it any more.

    Attributes:
        hub: looks after the links.
        heaps: symmetric memory of this process and its peers.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reactor: Reactor, inbound: Waiter, ranks: Sequence[int], rank: int, *,
        has_far: bool = False, former: Sharing | None = None,
    ) -> None:  # fmt: skip
        num_peers = len(ranks) - 1
        self.hub = Hub(reactor, inbound.is_waiting, inbound.slots, has_far=has_far)
        self.heaps = Heaps(rank)
        self._ranks = tuple(ranks)
        self._loop = loop
        self._reactor = reactor
        self._inbound = inbound
        self._num_slabs = min(MAX_SLABS, max(MIN_SLABS, 4 * num_peers))
        # Each piece lent may hold a slab: half of them must always come back at once.
        self._max_lent = self._num_slabs // (2 * max(1, num_peers))
        self._large_window_nbytes = self._num_slabs * SLAB_NBYTES // (num_peers + 1)
        self._arena = None if former is None else former._handed_on(self._num_slabs)
        self._slots: SlotMemory | None = None
        self._greetings: set[asyncio.Task[None]] = set()

    async def connect(self, sock: socket.socket, peer: int) -> ShmLink:
        """A link to ``peer`` over a connection whose handshake is over; it is closed if this fails.

        Raises:
            SharingRefused: this process or the peer cannot share memory.
            TransportError: the peer went away.
        """
        with closed_on_failure(sock):
            if (unsupported := why_unsupported()) is not None:
                raise SharingRefused(unsupported)
            if self._arena is None:
                self._arena = Arena(self._num_slabs)
            if self._slots is None:
                self._slots = SlotMemory.make(self._ranks, self.heaps)
            slots = self._slots
            shared = await offer(sock, self._arena, self._max_lent, slots, self.heaps.own())
        wire = Wire(sock, self._reactor, self._inbound, peer, shared, self.hub, slots)
        link = ShmSender(wire, self._arena, self._large_window_nbytes)
        self.hub.add(link)
        return link

    def adopt(self, sock: socket.socket, peer: int) -> None:
        """A peer wants to share memory over this connection: ``Inbound.opened`` follows if that works."""
        task = self._loop.create_task(self._adopt(sock, peer), name=f"kfcomm shares memory with rank {peer}")
        self._greetings.add(task)
        task.add_done_callback(lambda done: self._greeted(done, sock))

    def forget(self, peer: int) -> None:
        """A peer is gone for good: what it showed is not needed any more, and what it was shown comes back."""
        self.hub.reclaim(peer)
        self.heaps.forget(peer)

    def descriptors(self) -> list[int]:
        """Descriptors that a forked child must let go of, besides those of the links."""
        own = [one.descriptor for one in (self._arena, self._slots) if one is not None and one.descriptor >= 0]
        return [*own, *self.heaps.descriptors()]

    async def close(self) -> None:
        """End what is left of links and greetings; the memory goes with the last view of it."""
        greetings = list(self._greetings)
        for task in greetings:
            task.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)
        self.hub.close()
        if self._arena is not None:
            self._arena.close()
        if self._slots is not None:
            self._slots.close()
        self.heaps.close()

    def _handed_on(self, num_slabs: int) -> Arena | None:
        arena = self._arena
        made = arena.handed_on() if arena is not None and arena.num_slabs == num_slabs else None
        if made is not None:
            self._arena = None  # a link that is being made here as the epoch ends has another one
        return made

    def _greeted(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._greetings.discard(task)
        if task.cancelled():  # perhaps before its first step: then nobody else has closed the socket
            sock.close()

    async def _adopt(self, sock: socket.socket, peer: int) -> None:
        try:
            with closed_on_failure(sock):
                shared, arena, max_lent, slots, heap = await accept(sock, OFFER_WITHIN_S, self._ranks, self.heaps)
        except KfcommError as error:
            logger.debug("no memory is shared with rank %d: %s", peer, error)
            return
        if heap is not None:
            self.heaps.add(peer, heap)
        wire = Wire(sock, self._reactor, self._inbound, peer, shared, self.hub, slots)
        link = ShmReceiver(wire, arena, max_lent)
        self.hub.add(link)
        self._inbound.opened(link)
