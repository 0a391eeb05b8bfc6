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


class Links(Protocol):
    """What joins the ranks of a world."""

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
        """See ``session.Network``."""

    def room_nbytes(self, rank: int) -> int:
        """See ``session.Network``."""
        ...

    def sever(self, rank: int) -> None:
        """In a forked child: ``rank`` touches no shared memory any more."""

    async def close(self, rank: int) -> None:
        """``rank`` has ended its links."""


class InMemory:
    """Payloads are shown to the receiver in the sender's own memory."""

    def __init__(self, reactor: Reactor) -> None:
        self._network = MemoryNetwork(reactor)

    def add(self, rank: int, waiter: Waiter) -> None:
        """See `Links.add`."""
        self._network.add(rank, waiter)

    async def connect(self, rank: int, peer: int) -> Link:
        """See `Links.connect`."""
        return self._network.connect(rank, peer)

    def cut(self, rank: int, *, reason: str) -> None:
        """See `Links.cut`."""
        self._network.cut(rank, reason=reason)

    def unplug(self, rank: int) -> None:
        """See `Links.unplug`."""
        self._network.unplug(rank)

    def forget(self, rank: int, peer: int) -> None:
        """Nothing is kept."""

    def room(self, rank: int, nbytes: int) -> None:
        """There is none: all is in one process."""

    def room_nbytes(self, rank: int) -> int:
        """None."""
        return 0

    def sever(self, rank: int) -> None:
        """Nothing is shared with other processes."""

    async def close(self, rank: int) -> None:
        """Nothing to close."""


class InSharedMemory:
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

    def add(self, rank: int, waiter: Waiter) -> None:
        """See `Links.add`."""
        birth, ranks = self._births[rank], tuple(range(len(self._births)))
        surroundings = Surroundings(
            self._loop, self._reactor, waiter, rank, ranks, len(ranks), former=self._latest.get(birth)
        )
        self._ranks[rank] = self._latest[birth] = ShmEndpoint(surroundings)

    async def connect(self, rank: int, peer: int) -> Link:
        """See `Links.connect`.

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

    def cut(self, rank: int, *, reason: str) -> None:
        """See `Links.cut`."""
        self._cut.add(rank)
        self.unplug(rank)

    def unplug(self, rank: int) -> None:
        """See `Links.unplug`."""
        for descriptor in self._ranks[rank].hub.descriptors():
            with socket.socket(fileno=os.dup(descriptor)) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def forget(self, rank: int, peer: int) -> None:
        """See `Links.forget`."""
        self._ranks[rank].forget(peer)

    def room(self, rank: int, nbytes: int) -> Array | None:
        """See `Links.room`."""
        return self._ranks[rank].heaps.empty(nbytes)

    def room_nbytes(self, rank: int) -> int:
        """See `Links.room_nbytes`."""
        return self._ranks[rank].heaps.used_nbytes

    def sever(self, rank: int) -> None:
        """See `Links.sever`."""
        self._ranks[rank].hub.sever()

    async def close(self, rank: int) -> None:
        """See `Links.close`."""
        await self._ranks[rank].close()
