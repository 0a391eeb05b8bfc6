"""How two processes come to share memory: descriptors over a Unix socket whose handshake is over.

::

    publisher                                       subscriber
    sizes, with the descriptors of the       ──▶    maps both, or cannot
    link's segment and of the arena
                                             ◀──    "y", or "n" and why

Either side may fail at any point; then the socket is closed and nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import NamedTuple

from kfcomm.errors import KfcommError, RemoteProtocolError, TransportError
from kfcomm.transports.shm.arena import Arena, pieces_in
from kfcomm.transports.shm.segment import attach, create, why_unsupported
from kfcomm.transports.shm.shared import SHARED_NBYTES, Shared
from kfcomm.transports.sockets import why

_OFFER = struct.Struct("<8sQQI")
_MAGIC = b"kfcomm 1"
_YES, _NO = b"y", b"n"
_MAX_REASON_NBYTES = 500
_MAX_ARENA_NBYTES = 1 << 36


class SharingRefused(TransportError):
    """The peer is there, but it or this process cannot share memory."""


class Offer(NamedTuple):
    """What a subscriber has mapped."""

    shared: Shared
    arena: memoryview
    max_lent: int


async def offer(sock: socket.socket, arena: Arena, max_lent: int) -> Shared:
    """Show the peer a new segment and the arena. The socket stays the caller's.

    It waits for as long as the peer lives: that may be busy, and its loop has its turn late.

    Raises:
        SharingRefused: the peer or this process cannot.
        TransportError: the peer went away.
    """
    try:
        descriptor, mapping = create("kfcomm-link", SHARED_NBYTES)
    except TransportError as error:
        raise SharingRefused(str(error)) from error
    try:
        message = _OFFER.pack(_MAGIC, SHARED_NBYTES, arena.nbytes, max_lent)
        socket.send_fds(sock, [message], [descriptor, arena.descriptor])
    except ConnectionError as error:
        raise TransportError(f"lost before memory was shared: {why(error)}") from error
    except OSError as error:
        raise SharingRefused(f"descriptors cannot be passed: {why(error)}") from error
    finally:
        os.close(descriptor)
    answer = await _hear(sock)
    if answer[:1] != _YES:
        raise SharingRefused(answer[1:].decode(errors="replace") or "the peer closed the connection")
    return Shared(mapping)


async def accept(sock: socket.socket, timeout_s: float) -> Offer:
    """Map what a peer offers, and say so, or say why not. The socket stays the caller's.

    Raises:
        RemoteProtocolError: what came is no offer.
        TransportError: the peer went away, took too long, or was refused.
    """
    descriptors: list[int] = []
    try:
        await _readable(sock, timeout_s)
        message, descriptors, _, _ = socket.recv_fds(sock, _OFFER.size, 2, socket.MSG_CMSG_CLOEXEC)
        mapped = _map(message, descriptors)
    except KfcommError as error:
        with contextlib.suppress(OSError):
            sock.send(_NO + str(error).encode()[:_MAX_REASON_NBYTES])
        raise
    except OSError as error:
        raise TransportError(f"lost before memory was shared: {why(error)}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    try:
        sock.send(_YES)
    except OSError as error:
        raise TransportError(f"lost before memory was shared: {why(error)}") from error
    return mapped


def _map(message: bytes, descriptors: list[int]) -> Offer:
    unsupported = why_unsupported()
    if unsupported is not None:
        raise TransportError(unsupported)
    if len(message) != _OFFER.size or len(descriptors) != 2:
        raise RemoteProtocolError(f"an offer of {len(message)} bytes and {len(descriptors)} descriptors")
    magic, shared_nbytes, arena_nbytes, max_lent = _OFFER.unpack(message)
    if magic != _MAGIC or shared_nbytes != SHARED_NBYTES or arena_nbytes > _MAX_ARENA_NBYTES:
        raise RemoteProtocolError(f"an offer of another kind ({magic!r}, {shared_nbytes} and {arena_nbytes} bytes)")
    shared = attach(descriptors[0], shared_nbytes, writable=True)
    arena = attach(descriptors[1], arena_nbytes, writable=False)
    return Offer(Shared(shared), pieces_in(arena), max_lent)


async def _hear(sock: socket.socket) -> bytes:
    await _readable(sock, None)
    try:
        return sock.recv(1 + _MAX_REASON_NBYTES)
    except OSError as error:
        raise TransportError(f"lost before memory was shared: {why(error)}") from error


async def _readable(sock: socket.socket, timeout_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        async with asyncio.timeout(timeout_s):
            await readable
    except TimeoutError:
        raise TransportError(f"no word about shared memory within {timeout_s:g} s") from None
    finally:
        loop.remove_reader(sock.fileno())
