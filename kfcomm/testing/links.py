"""The links of a world in one process: in memory, or through shared memory as between processes of one host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Protocol

from kfcomm.core.handshake import Keys
from kfcomm.errors import TransportError
from kfcomm.transports.base import Link, Surroundings, Waiter
from kfcomm.transports.memory import MemoryNetwork
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.endpoint import ShmEndpoint
from kfcomm.transports.shm.heap import Array
from kfcomm.transports.sockets import Connection
from kfcomm.types import override


class Links(Protocol):
    """Links among the ranks of a world."""

    def add(self, rank: int, waiter: Waiter) -> None:
        """``waiter`` hears what the others send to ``rank``."""

    async def connect(self, rank: int, peer: int) -> Link:
        """A link from ``rank`` to ``peer``."""
        ...

    def cut(self, rank: int, *, reason: str) -> None:
        """Break every link of ``rank``, as when its process dies; it can connect no more."""

    def unplug(self, rank: int) -> None:
        """Break every link of ``rank`` that is open now; new ones can be opened."""

    def forget(self, rank: int, peer: int) -> None:
        """``rank`` keeps nothing for ``peer`` any more."""

    def room(self, rank: int, nbytes: int) -> Array | None:
        """Return an array that other processes of the host can read; None if there is no memory for it."""

    def room_nbytes(self, rank: int) -> int:
        """Return the bytes in use of the memory that ``room`` gives."""
        ...

    def sever(self, rank: int) -> None:
        """In a forked child: ``rank`` touches no shared memory any more."""

    async def close(self, rank: int) -> None:
        """``rank`` has ended its links."""


class InMemory(Links):
    """Payloads are shown to the receiver in the sender's own memory."""

    def __init__(self, reactor: Reactor) -> None:
        self._network = MemoryNetwork(reactor)

    @override
    def add(self, rank: int, waiter: Waiter) -> None:
        self._network.add(rank, waiter)

    @override
    async def connect(self, rank: int, peer: int) -> Link:
        return self._network.connect(rank, peer)

    @override
    def cut(self, rank: int, *, reason: str) -> None:
        self._network.cut(rank, reason=reason)

    @override
    def unplug(self, rank: int) -> None:
        self._network.unplug(rank)

    def forget(self, rank: int, peer: int) -> None:
        """Nothing is kept."""

    def room(self, rank: int, nbytes: int) -> None:
        """Nothing: payloads stay in one process."""

    def room_nbytes(self, rank: int) -> int:
        """None."""
        return 0

    def sever(self, rank: int) -> None:
        """Nothing is shared with other processes."""

    async def close(self, rank: int) -> None:
        """Nothing to close."""


class InSharedMemory(Links):
    """Everything as between processes: arenas, rings, and socket pairs in place of dialled connections.

    Args:
        loop: where links are agreed on.
        reactor: who drives them then.
        births: of the ranks of this epoch.
        latest: what each rank shared last, by birth: it goes over into this epoch, and is replaced.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, reactor: Reactor, births: Sequence[int], latest: dict[int, ShmEndpoint]
    ) -> None:
        self._loop = loop
        self._reactor = reactor
        self._births = births
        self._latest = latest
        self._ranks: dict[int, ShmEndpoint] = {}
        self._cut: set[int] = set()

    @override
    def add(self, rank: int, waiter: Waiter) -> None:
        birth, ranks = self._births[rank], tuple(range(len(self._births)))
        surroundings = Surroundings(
            self._loop, self._reactor, waiter, rank, ranks, len(ranks), former=self._latest.get(birth)
        )
        self._ranks[rank] = self._latest[birth] = ShmEndpoint(surroundings)

    async def connect(self, rank: int, peer: int) -> Link:
        """Connect to a peer in this process.

        Raises:
            TransportError: the peer is not there, or was cut off.
        """
        if peer in self._cut or rank in self._cut:
            raise TransportError(f"rank {peer} is not in this world")
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        keys = Keys(b"", b"")  # shared memory is not sealed
        self._ranks[peer].adopt(Connection(far, keys), rank)
        return await self._ranks[rank].connect(Connection(near, keys), peer)

    @override
    def cut(self, rank: int, *, reason: str) -> None:
        self._cut.add(rank)
        self.unplug(rank)

    @override
    def unplug(self, rank: int) -> None:
        for descriptor in self._ranks[rank].hub.descriptors():
            with socket.socket(fileno=os.dup(descriptor)) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @override
    def forget(self, rank: int, peer: int) -> None:
        self._ranks[rank].forget(peer)

    @override
    def room(self, rank: int, nbytes: int) -> Array | None:
        return self._ranks[rank].heaps.empty(nbytes)

    @override
    def room_nbytes(self, rank: int) -> int:
        return self._ranks[rank].heaps.used_nbytes

    @override
    def sever(self, rank: int) -> None:
        self._ranks[rank].hub.sever()

    @override
    async def close(self, rank: int) -> None:
        await self._ranks[rank].close()
