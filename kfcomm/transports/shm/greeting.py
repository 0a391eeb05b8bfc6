"""How two processes come to share memory: descriptors over a Unix socket whose handshake is over.

::

    publisher                                       subscriber
    sizes, with the descriptors of the       ──▶    maps all, or cannot
    link's segment, arena, slots, and heap
                                             ◀──    "y", or "n" and why

Either side may fail at any point; then the socket is closed and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kfcomm.common.sockets import readable
from kfcomm.errors import KfcommError, RemoteProtocolError, TransportError
from kfcomm.transports.shm.arena import Arena, pieces_in
from kfcomm.transports.shm.heap import Heap, Heaps, PeerHeap
from kfcomm.transports.shm.segment import SharingRefused, attach, create, why_unsupported
from kfcomm.transports.shm.shared import SHARED_NBYTES, Shared
from kfcomm.transports.shm.slots import SlotMemory
from kfcomm.transports.sockets import told_as_lost, why

_OFFER = struct.Struct("<8sQQI")
_MAGIC = b"kfcomm 3"
_YES, _NO = b"y", b"n"
_MAX_REASON_NBYTES = 500
_MAX_ARENA_NBYTES = 1 << 36
_TOO_EARLY = "before memory was shared"


class Offer(NamedTuple):
    """What a subscriber has mapped, and may map."""

    shared: Shared
    arena: memoryview
    max_lent: int
    slots: SlotMemory
    heap: PeerHeap | None


async def offer(sock: socket.socket, arena: Arena, max_lent: int, slots: SlotMemory, heap: Heap | None) -> Shared:
    """Show the peer a new segment, the arena, the slots, and a heap if there is one. The socket stays the caller's.

    It waits for as long as the peer lives: that may be busy, and its loop has its turn late.

    Raises:
        SharingRefused: the peer or this process cannot.
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
            raise SharingRefused(f"descriptors cannot be passed: {why(error)}") from error
        finally:
            os.close(descriptor)
        await readable(sock.fileno())
        answer = sock.recv(1 + _MAX_REASON_NBYTES)
    if answer[:1] != _YES:
        raise SharingRefused(answer[1:].decode(errors="replace") or "the peer closed the connection")
    return Shared(mapping)


async def accept(sock: socket.socket, timeout_s: float, ranks: Sequence[int], heaps: Heaps) -> Offer:
    """Map what a peer offers, and say so, or say why not. The socket stays the caller's.

    ``ranks``, ``heaps``: see ``SlotMemory``.

    Raises:
        RemoteProtocolError: what came is no offer.
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
    del descriptors[2:]  # they are theirs now
    return Offer(Shared(shared), pieces_in(arena), max_lent, slots, heap)


async def _wait_for_offer(sock: socket.socket, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await readable(sock.fileno())
    except TimeoutError:
        raise TransportError(f"no word about shared memory within {timeout_s:g} s") from None
