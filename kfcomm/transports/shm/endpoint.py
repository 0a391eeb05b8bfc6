"""Shared memory as a transport: opens links to peers of the same host, and accepts those that peers open.

Each link begins with an offer over a Unix socket whose handshake is over::

    publisher                                       subscriber
    sizes, address of its bell, and          ──▶    maps all, or cannot
    descriptors of the link's segment,
    arena, slots, and heap
                                             ◀──    "y" and the address of its bell, or "n" and the reason
    "y"                                      ──▶

Then both close the socket: a link needs none (see `bell`), and no descriptor of the other side's memory. Either side
may fail at any point: then the socket is closed, and nothing of the offer is left.

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
from kfcomm.transports.shm.bell import MAX_ADDRESS_NBYTES, Bell, is_address
from kfcomm.transports.shm.heap import Heap, Heaps, PeerHeap
from kfcomm.transports.shm.hub import Hub
from kfcomm.transports.shm.link import LinkParts, ShmLink
from kfcomm.transports.shm.receiver import ShmReceiver
from kfcomm.transports.shm.ring import SHARED_NBYTES, Shared, Word
from kfcomm.transports.shm.segment import SLAB_NBYTES, Arena, attach, create, pieces_in, why_unsupported
from kfcomm.transports.shm.sender import ShmSender
from kfcomm.transports.shm.slots import SlotMemory
from kfcomm.transports.sockets import Connection, told_as_lost
from kfcomm.types import override

__all__ = ["ShmEndpoint", "open_endpoint", "why_unsupported"]

logger = logging.getLogger("kfcomm")

OFFER_WITHIN_S = 10.0
"""A peer offers its memory as soon as it has connected."""
MIN_SLABS, MAX_SLABS = 32, 64
"""Size of an arena in MiB: memory that this rank shows to all its peers together. Pages are taken as they are used."""

_OFFER = struct.Struct("<8sQQI")
_MAGIC = b"kfcomm 4"
_YES, _NO = b"y", b"n"
_MAX_REASON_NBYTES = 500
_MAX_ARENA_NBYTES = 1 << 36
_MAX_RESERVED_NBYTES = 1 << 45
"""Address space for the heaps of all ranks of a host; of larger ones descriptors are kept. A process has 1 << 47."""
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
        local = self._surroundings.local
        with contextlib.closing(connection.plain) as sock:
            if (unsupported := why_unsupported()) is not None:
                raise LinkRefused(unsupported)
            if self._arena is None:
                self._arena = Arena(self._num_slabs)
            if self._slots is None:
                self._slots = SlotMemory.make(local, self.heaps)
            slots = self._slots
            own = OwnMemory(self._arena, self._max_lent, slots, self.heaps.own(), self._bell().address)
            shared, bell = await offer(sock, own)
        link = ShmSender(self._wire(bell, peer, shared, slots), self._arena, self._large_window_nbytes)
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
        self.hub.peer_lost(peer)
        self.hub.reclaim(peer)
        self.heaps.forget(peer)

    @override
    def sever(self) -> None:
        self.hub.sever()

    @override
    def descriptors(self) -> list[int]:
        own = [one.descriptor for one in (self._arena, self._slots) if one is not None and one.descriptor >= 0]
        return [*own, *self.heaps.descriptors(), *self.hub.descriptors()]

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
            with contextlib.closing(sock):
                offered = await accept(sock, OFFER_WITHIN_S, self._surroundings.local, self.heaps, self._bell())
        except KfcommError as error:
            logger.debug("no memory is shared with rank %d: %s", peer, error)
            return
        if offered.heap is not None:
            self.heaps.add(peer, offered.heap)
        wire = self._wire(offered.bell, peer, offered.shared, offered.slots)
        link = ShmReceiver(wire, offered.arena, offered.max_lent)
        self.hub.add(link)
        self._surroundings.inbound.opened(link)

    def _bell(self) -> Bell:
        try:
            return self.hub.bell
        except OSError as error:
            raise LinkRefused(f"no socket to be woken by: {why_failed(error)}") from error

    def _wire(self, bell: bytes, peer: int, shared: Shared, slots: SlotMemory) -> LinkParts:
        return LinkParts(bell, self._surroundings.reactor, self._surroundings.inbound, peer, shared, self.hub, slots)


class OwnMemory(NamedTuple):
    """Memory of this process that it shows to a peer."""

    arena: Arena
    max_lent: int
    slots: SlotMemory
    heap: Heap | None
    bell: bytes


class Offer(NamedTuple):
    """Memory of a peer: all of it is mapped where that can be; and the address of its bell."""

    shared: Shared
    arena: memoryview
    max_lent: int
    slots: SlotMemory
    heap: PeerHeap | None
    bell: bytes

    def decline(self) -> None:
        """Let go of it, and let a peer that has begun to use the link know."""
        self.shared.words[Word.RECEIVER_ENDED] = 1
        self.slots.close()
        if self.heap is not None:
            self.heap.close()


async def offer(sock: socket.socket, own: OwnMemory) -> tuple[Shared, bytes]:
    """Show the peer a new segment and memory of this process; return the segment and the address of the peer's bell.

    Raises:
        LinkRefused: the peer or this process cannot share memory.
        TransportError: the peer went away.
    """
    descriptor, mapping = create("kfcomm-link", SHARED_NBYTES)
    with told_as_lost(_TOO_EARLY):
        try:
            message = _OFFER.pack(_MAGIC, SHARED_NBYTES, own.arena.nbytes, own.max_lent) + own.bell
            heap = [] if own.heap is None else [own.heap.descriptor]
            socket.send_fds(sock, [message], [descriptor, own.arena.descriptor, own.slots.descriptor, *heap])
        except ConnectionError:
            raise
        except OSError as error:
            raise LinkRefused(f"descriptors cannot be passed: {why_failed(error)}") from error
        finally:
            os.close(descriptor)
        await readable(sock.fileno())  # without a timeout: a busy peer answers late, and its end ends the wait
        answer = sock.recv(1 + _MAX_REASON_NBYTES)
        said, bell = answer[:1], answer[1:]
        if said == _YES and is_address(bell):
            sock.send(_YES)
            return Shared(mapping), bell
    raise LinkRefused(bell.decode(errors="replace") or "the peer closed the connection")


async def accept(sock: socket.socket, timeout_s: float, ranks: Sequence[int], heaps: Heaps, bell: Bell) -> Offer:
    """Map what a peer offers and answer yes, or answer no with the reason.

    ``ranks``, ``heaps``: of this host, as for ``SlotMemory``; ``bell``: of this process.

    Raises:
        RemoteProtocolError: the message is not an offer.
        TransportError: the peer went away, took too long, or was refused.
    """
    descriptors: list[int] = []
    try:
        with told_as_lost(_TOO_EARLY):
            await _wait_for_offer(sock, timeout_s)
            longest = _OFFER.size + MAX_ADDRESS_NBYTES
            message, descriptors, _, _ = socket.recv_fds(sock, longest, 4, socket.MSG_CMSG_CLOEXEC)
            mapped = _map(message, descriptors, ranks, heaps)
            while descriptors:  # all is mapped: none is held while the peer answers
                os.close(descriptors.pop())
            try:
                sock.send(_YES + bell.address)
                # The link has begun once the peer says so: until then it may give up, and this side would not know.
                await readable(sock.fileno())
                if sock.recv(1) != _YES:
                    raise TransportError("the peer gave up")
            except BaseException:
                mapped.decline()
                bell.ring(mapped.bell)
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
    bell = message[_OFFER.size :]
    if not is_address(bell) or len(descriptors) not in (3, 4):
        raise RemoteProtocolError(f"an offer of {len(message)} bytes and {len(descriptors)} descriptors")
    magic, shared_nbytes, arena_nbytes, max_lent = _OFFER.unpack(message[: _OFFER.size])
    if magic != _MAGIC or shared_nbytes != SHARED_NBYTES or arena_nbytes > _MAX_ARENA_NBYTES:
        raise RemoteProtocolError(f"an offer of another kind ({magic!r}, {shared_nbytes} and {arena_nbytes} bytes)")
    shared = attach(descriptors[0], shared_nbytes, writable=True)
    arena = attach(descriptors[1], arena_nbytes, writable=False)
    heap = PeerHeap(descriptors[3]) if len(descriptors) > 3 else None
    slots = SlotMemory(descriptors[2], ranks, heaps)
    del descriptors[2:]  # heap and slots close theirs
    slots.reserve()
    if heap is not None:
        heap.reserve(_MAX_RESERVED_NBYTES // len(ranks))
    return Offer(Shared(shared), pieces_in(arena), max_lent, slots, heap, bell)


async def _wait_for_offer(sock: socket.socket, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await readable(sock.fileno())
    except TimeoutError:
        raise TransportError(f"no word about shared memory within {timeout_s:g} s") from None
