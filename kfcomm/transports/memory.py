"""Links inside one process: a whole world of ranks on one event loop, for tests and experiments.

The receiver reads a payload in the sender's own memory, which is free again afterwards. A frame is delivered in a later
turn of the loop, and a turn delivers little. So events have the order of a network, and urgent chunks can overtake
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfcomm.core.frame import Header
from kfcomm.errors import TransportError
from kfcomm.transports.base import Counts, Inbound, Link, Owner
from kfcomm.transports.outbox import FrameOrder
from kfcomm.transports.reactor import Readiness
from kfcomm.types import override

TURN_NBYTES = 1 << 20
"""Payload after which a link delivers no further frame in the same turn of the loop."""
_EMPTY = memoryview(b"")


class MemoryNetwork:
    """Network of one world, by rank."""

    def __init__(self, reactor: Readiness) -> None:
        self._reactor = reactor
        self._inbound: dict[int, Inbound] = {}
        self._links: list[MemoryLink] = []

    def add(self, rank: int, inbound: Inbound) -> None:
        """Let ``inbound`` receive what the others send to ``rank``."""
        self._inbound[rank] = inbound

    def connect(self, rank: int, peer: int) -> MemoryLink:
        """Open a link from ``rank`` to ``peer``. Raises `TransportError`: the peer is not there, or was cut off."""
        if peer not in self._inbound or rank not in self._inbound:
            raise TransportError(f"rank {peer} is not in this world")
        near = MemoryLink(self.wire(rank, peer), self._inbound[rank], peer)
        far = MemoryLink(self.wire(peer, rank), self._inbound[peer], rank)
        near.far, far.far = far, near
        self._links += [near, far]
        self._inbound[peer].opened(far)
        return near

    def wire(self, rank: int, peer: int) -> Readiness:
        """Return what the link from ``rank`` to ``peer`` delivers by."""
        del rank, peer
        return self._reactor

    def part(self, rank: int, peer: int, *, reason: str) -> None:
        """Break every link between these two."""
        for link in list(self._links):
            if {rank, peer} == {link.peer, link.far.peer}:
                link.end(TransportError(reason))

    def cut(self, rank: int, *, reason: str = "the link was cut") -> None:
        """Break every link of ``rank``, as when its process dies; it cannot connect again."""
        self._inbound.pop(rank, None)
        self.unplug(rank, reason=reason)

    def unplug(self, rank: int, *, reason: str = "the link was unplugged") -> None:
        """Break every link of ``rank`` that is open now; new ones can be opened."""
        for link in list(self._links):
            if rank in (link.peer, link.far.peer):
                link.end(TransportError(reason))
        self._links = [link for link in self._links if not link.is_closed]


class MemoryLink(Link):
    """One end of a link in memory.

    Its latency is always low. A payload is readable in place for one call: it is never reserved, placed or lent.
    """

    kind = "memory"
    needs_flush = True
    far: MemoryLink

    def __init__(self, reactor: Readiness, inbound: Inbound, peer: int) -> None:
        self.peer = peer
        self.state: Any = None
        self.is_closed = False
        self._reactor = reactor
        self._inbound = inbound
        self._queue = FrameOrder()
        self._scheduled = False
        self._closing = False
        self._nbytes = self._frames = 0

    @override
    def counts(self) -> Counts:
        # One end has sent what the other has received.
        return Counts(self._nbytes, self.far._nbytes, self._frames, self.far._frames)

    @override
    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        self._queue.add((b"", payload, 0, owner, header, self._queue.make_way(header, priority)))
        return False

    @override
    def flush(self) -> None:
        if (self._queue or self._closing) and not self._scheduled:
            self._scheduled = True
            self._reactor.call_soon(self._deliver)

    @override
    def withdraw(self, owner: Owner) -> Sequence[Header]:
        # Nothing is ever half sent here.
        return [frame[4] for frame in self._queue.drop(owner)]

    @override
    def close(self) -> None:
        self._closing = True
        self.flush()

    @override
    def abort(self) -> None:
        self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Close both ends; what is queued is dropped."""
        for link in (self, self.far):
            if not link.is_closed:
                link.is_closed = True
                self._reactor.call_soon(link._report, error)

    def _deliver(self) -> None:
        self._scheduled = False
        far = self.far
        nbytes = 0
        while nbytes < TURN_NBYTES and not self.is_closed:
            frame = self._queue.take()
            if frame is None:
                break
            _, payload, _, owner, header, _ = frame
            view = _EMPTY if payload is None else memoryview(payload).toreadonly()
            nbytes += len(view)
            self._nbytes += len(view)
            self._frames += 1
            far._inbound.receive(far, header, view)
            if owner is not None:
                owner.sent()
        if self._queue and not self.is_closed:
            self.flush()
        elif self._closing:
            self.end(None)
        if not far.is_closed:
            far._inbound.burst_end(far)

    def _report(self, error: BaseException | None) -> None:
        self._queue.empty()
        self._inbound.lost(self, error)
