"""Shared memory as a transport: opens links to peers of the same host, and accepts those that peers open.

Each link begins with an offer over a Unix socket whose handshake is over::

    publisher                                       subscriber
    sizes, with the descriptors of the       ──▶    maps all, or cannot
    link's segment, arena, slots, and heap
                                             ◀──    "y", or "n" and the reason

Either side may fail at any point: then the socket is closed, and nothing of the offer is left.

An endpoint owns the arena, which is made with the first link that this rank opens, and the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kfcomm.common.sockets import readable, why_failed
from kfcomm.errors import KfcommError, RemoteProtocolError, TransportError
from kfcomm.transports.base import Endpoint, LinkRefused, Surroundings
from kfcomm.transports.shm.heap import Heap, Heaps, PeerHeap
from kfcomm.transports.shm.hub import Hub
from kfcomm.transports.shm.link import LinkParts, ShmLink
from kfcomm.transports.shm.receiver import ShmReceiver
from kfcomm.transports.shm.ring import SHARED_NBYTES, Shared
from kfcomm.transports.shm.segment import SLAB_NBYTES, Arena, attach, create, pieces_in, why_unsupported
from kfcomm.transports.shm.sender import ShmSender
from kfcomm.transports.shm.slots import SlotMemory
from kfcomm.transports.sockets import Connection, closed_on_failure, told_as_lost
from kfcomm.types import override

__all__ = ["ShmEndpoint", "open_endpoint", "why_unsupported"]

logger = logging.getLogger("kfcomm")

OFFER_WITHIN_S = 10.0
"""A peer offers its memory as soon as it has connected."""
MIN_SLABS, MAX_SLABS = 32, 64
"""Size of an arena in MiB: memory that this rank shows to all its peers together. Pages are taken as they are used."""

_OFFER = struct.Struct("<8sQQI")
_MAGIC = b"kfcomm 3"
_YES, _NO = b"y", b"n"
_MAX_REASON_NBYTES = 500
_MAX_ARENA_NBYTES = 1 << 36
_TOO_EARLY = "before memory was shared"


def open_endpoint(surroundings: Surroundings) -> ShmEndpoint | None:
    """Open the shared memory of one rank; None if it is the only one on its host."""
    return ShmEndpoint(surroundings) if len(surroundings.local) > 1 else None


class ShmEndpoint(Endpoint):
    """Shared-memory links of one process. The arena of the former endpoint is reused if all of it is free."""

    def __init__(self, surroundings: Surroundings) -> None:
        local, inbound = surroundings.local, surroundings.inbound
        num_peers = len(local) - 1
        has_far = surroundings.num_ranks > len(local)
        self.hub = Hub(surroundings.reactor, inbound.is_waiting, inbound.slots, has_far=has_far)  # polls the links
        self.heaps: Heaps = Heaps(surroundings.rank)  # symmetric memory of this process and its peers
        self._surroundings = surroundings
        self._num_slabs = min(MAX_SLABS, max(MIN_SLABS, 4 * num_peers))
        # A borrowed piece may pin a whole slab, so peers may borrow half of the slabs at most: the other half always
        # comes back at once.
        self._max_lent = self._num_slabs // (2 * max(1, num_peers))
        self._large_window_nbytes = self._num_slabs * SLAB_NBYTES // (num_peers + 1)
        former = surroundings.former
        self._arena = former._handed_on(self._num_slabs) if isinstance(former, ShmEndpoint) else None
        self._slots: SlotMemory | None = None
        self._offers: set[asyncio.Task[None]] = set()
        inbound.tell_waits(self.hub.wake)

    @override
    async def connect(self, connection: Connection, peer: int) -> ShmLink:
        sock, local = connection.plain, self._surroundings.local
        with closed_on_failure(sock):
            if (unsupported := why_unsupported()) is not None:
                raise LinkRefused(unsupported)
            if self._arena is None:
                self._arena = Arena(self._num_slabs)
            if self._slots is None:
                self._slots = SlotMemory.make(local, self.heaps)
            slots = self._slots
            shared = await offer(sock, self._arena, self._max_lent, slots, self.heaps.own())
        link = ShmSender(self._wire(sock, peer, shared, slots), self._arena, self._large_window_nbytes)
        self.hub.add(link)
        return link

    @override
    def adopt(self, connection: Connection, peer: int) -> None:
        sock = connection.plain
        task = self._surroundings.loop.create_task(
            self._adopt(sock, peer), name=f"kfcomm shares memory with rank {peer}"
        )
        self._offers.add(task)
        task.add_done_callback(lambda done: self._accepted(done, sock))

    @override
    def forget(self, peer: int) -> None:
        self.hub.reclaim(peer)
        self.heaps.forget(peer)

    @override
    def sever(self) -> None:
        self.hub.sever()

    @override
    def descriptors(self) -> list[int]:
        own = [one.descriptor for one in (self._arena, self._slots) if one is not None and one.descriptor >= 0]
        return [*own, *self.heaps.descriptors()]

    @override
    async def close(self) -> None:
        offers = list(self._offers)
        for task in offers:
            task.cancel()
        await asyncio.gather(*offers, return_exceptions=True)
        self.hub.close()
        if self._arena is not None:
            self._arena.close()
        if self._slots is not None:
            self._slots.close()
        self.heaps.close()

    def _handed_on(self, num_slabs: int) -> Arena | None:
        """Give the arena to the next epoch, if it has the right size and no peer may read it."""
        arena = self._arena
        made = arena.handed_on() if arena is not None and arena.num_slabs == num_slabs else None
        if made is not None:
            self._arena = None  # a link that is being made here as the epoch ends gets a new one
        return made

    def _accepted(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._offers.discard(task)
        if task.cancelled():  # perhaps before its first step, when nothing else has closed the socket
            sock.close()

    async def _adopt(self, sock: socket.socket, peer: int) -> None:
        try:
            with closed_on_failure(sock):
                shared, arena, max_lent, slots, heap = await accept(
                    sock, OFFER_WITHIN_S, self._surroundings.local, self.heaps
                )
        except KfcommError as error:
            logger.debug("no memory is shared with rank %d: %s", peer, error)
            return
        if heap is not None:
            self.heaps.add(peer, heap)
        link = ShmReceiver(self._wire(sock, peer, shared, slots), arena, max_lent)
        self.hub.add(link)
        self._surroundings.inbound.opened(link)

    def _wire(self, sock: socket.socket, peer: int, shared: Shared, slots: SlotMemory) -> LinkParts:
        return LinkParts(sock, self._surroundings.reactor, self._surroundings.inbound, peer, shared, self.hub, slots)


class Offer(NamedTuple):
    """Memory of a peer: link segment and arena, mapped, and slots and heap, to be mapped at their first use."""

    shared: Shared
    arena: memoryview
    max_lent: int
    slots: SlotMemory
    heap: PeerHeap | None


async def offer(sock: socket.socket, arena: Arena, max_lent: int, slots: SlotMemory, heap: Heap | None) -> Shared:
    """Show the peer a new segment, the arena, the slots, and the heap if there is one; the socket stays open.

    Raises:
        LinkRefused: the peer or this process cannot share memory.
        TransportError: the peer went away.
    """
    descriptor, mapping = create("kfcomm-link", SHARED_NBYTES)
    with told_as_lost(_TOO_EARLY):
        try:
            message = _OFFER.pack(_MAGIC, SHARED_NBYTES, arena.nbytes, max_lent)
            own = [] if heap is None else [heap.descriptor]
            socket.send_fds(sock, [message], [descriptor, arena.descriptor, slots.descriptor, *own])
        except ConnectionError:
            raise
        except OSError as error:
            raise LinkRefused(f"descriptors cannot be passed: {why_failed(error)}") from error
        finally:
            os.close(descriptor)
        await readable(sock.fileno())  # without a timeout: a busy peer answers late, and its end ends the wait
        answer = sock.recv(1 + _MAX_REASON_NBYTES)
    if answer[:1] != _YES:
        raise LinkRefused(answer[1:].decode(errors="replace") or "the peer closed the connection")
    return Shared(mapping)


async def accept(sock: socket.socket, timeout_s: float, ranks: Sequence[int], heaps: Heaps) -> Offer:
    """Map what a peer offers and answer yes, or answer no with the reason; the socket stays open.

    ``ranks``, ``heaps``: of this host, as for ``SlotMemory``.

    Raises:
        RemoteProtocolError: the message is not an offer.
        TransportError: the peer went away, took too long, or was refused.
    """
    descriptors: list[int] = []
    try:
        with told_as_lost(_TOO_EARLY):
            await _wait_for_offer(sock, timeout_s)
            message, descriptors, _, _ = socket.recv_fds(sock, _OFFER.size, 4, socket.MSG_CMSG_CLOEXEC)
            mapped = _map(message, descriptors, ranks, heaps)
            try:
                sock.send(_YES)
            except BaseException:
                mapped.slots.close()
                if mapped.heap is not None:
                    mapped.heap.close()
                raise
            return mapped
    except KfcommError as error:
        with contextlib.suppress(OSError):
            sock.send(_NO + str(error).encode()[:_MAX_REASON_NBYTES])
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map(message: bytes, descriptors: list[int], ranks: Sequence[int], heaps: Heaps) -> Offer:
    if (unsupported := why_unsupported()) is not None:
        raise TransportError(unsupported)
    if len(message) != _OFFER.size or len(descriptors) not in (3, 4):
        raise RemoteProtocolError(f"an offer of {len(message)} bytes and {len(descriptors)} descriptors")
    magic, shared_nbytes, arena_nbytes, max_lent = _OFFER.unpack(message)
    if magic != _MAGIC or shared_nbytes != SHARED_NBYTES or arena_nbytes > _MAX_ARENA_NBYTES:
        raise RemoteProtocolError(f"an offer of another kind ({magic!r}, {shared_nbytes} and {arena_nbytes} bytes)")
    shared = attach(descriptors[0], shared_nbytes, writable=True)
    arena = attach(descriptors[1], arena_nbytes, writable=False)
    heap = PeerHeap(descriptors[3]) if len(descriptors) > 3 else None
    slots = SlotMemory(descriptors[2], ranks, heaps)
    del descriptors[2:]  # heap and slots close theirs
    return Offer(Shared(shared), pieces_in(arena), max_lent, slots, heap)


async def _wait_for_offer(sock: socket.socket, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await readable(sock.fileno())
    except TimeoutError:
        raise TransportError(f"no word about shared memory within {timeout_s:g} s") from None
