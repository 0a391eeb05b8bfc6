"""The control links of one rank: those that are up, and the ones being dialled.

Invariants:

- A peer counts as linked from its first link to the end of its last. Both sides may dial at once, which makes two
  links; if there are more, the oldest is closed.
- After a link broke without a goodbye, or on suspicion, the peer is dialled: a closed port means that it is gone, and
  an answer that it is alive. Everything else (a timeout, a refused handshake) decides nothing.
- Every frame is sealed: a relay that changes, forges or repeats one ends the link, not the peer.
- A peer that does not read makes no other rank hold more than a few MiB for it.

This module does not interpret the frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from kfcomm.core.frame import Header, Kind
from kfcomm.errors import RemoteProtocolError
from kfcomm.transports.base import Inbound, Link
from kfcomm.transports.outbox import MAX_HEAD_NBYTES, StreamOptions
from kfcomm.transports.sealed import Seals
from kfcomm.transports.sockets import Connection, DialRefused, is_silent_host, watch
from kfcomm.transports.stream import StreamLink

if TYPE_CHECKING:
    from kfcomm.engine.control.node import ControlNode

MAX_LINKS_PER_PEER = 2
MAX_QUEUED_NBYTES = 4 << 20
SUSPECT_TRIES = 6
"""Dials without an outcome, after which a suspected peer that is not a neighbour is left alone."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
SETTLED_AFTER_S = 30.0
"""A link that held so long was a good one: when it breaks, the pauses between dials begin small again."""

Dial = Callable[[int], Awaitable[Connection]]
"""Makes a connection to a rank, handshake included; raises ``DialRefused``."""

_LOG = logging.getLogger("kfcomm.control")
_OPTIONS = StreamOptions(staging_nbytes=MAX_HEAD_NBYTES)


class ControlLinks(Inbound):
    """The links of a rank, on the loop of the control thread.

    ``node`` uses the links and hears of them. A host that has acknowledged no packet for ``dead_host_after_s`` is gone.
    """

    def __init__(self, tasks: asyncio.TaskGroup, dial: Dial, node: ControlNode, dead_host_after_s: float) -> None:
        self._dead_host_after_s = dead_host_after_s
        self._loop = asyncio.get_running_loop()
        self._tasks = tasks
        self._dial = dial
        self._node = node
        self._closed = False
        self._links: dict[int, list[StreamLink]] = {}  # without those that were closed for being too many
        self._all: list[StreamLink] = []
        self._dialling: dict[int, asyncio.Task[None]] = {}
        self._suspects: set[int] = set()
        self._failures: dict[int, int] = {}
        self._unflushed: dict[StreamLink, None] = {}

    # Use.

    def add(self, rank: int, connection: Connection) -> None:
        """Make a link of a connection to ``rank`` after its handshake."""
        if self._closed:
            connection.close()
            return
        watch(connection.sock, self._dead_host_after_s)
        seals = Seals(connection.keys, has_payloads=False)
        link = StreamLink(connection.sock, self._loop, self, rank, options=_OPTIONS, seals=seals)
        link.state = self._loop.time()
        self._all = [*self._all, link]
        links = self._links.setdefault(rank, [])
        links.append(link)
        if len(links) > MAX_LINKS_PER_PEER:
            links.pop(0).close()
        if len(links) == 1:
            self._node.link_up(rank)

    def send(self, rank: int, header: Header) -> None:
        """Send to a linked peer, in this turn of the loop or the next; to any other, nothing.

        What one turn sends to a peer leaves in one write: where many ranks flood at once, most of the cost is system
        calls.
        """
        for link in self._links.get(rank, ())[-1:]:
            link.send(header)
            if not self._unflushed:
                self._loop.call_soon(self._flush)
            self._unflushed[link] = None
            if link.queued_nbytes > MAX_QUEUED_NBYTES:
                link.flush()
                if link.queued_nbytes > MAX_QUEUED_NBYTES:
                    link.abort()

    def _flush(self) -> None:
        links, self._unflushed = self._unflushed, {}
        for link in links:
            link.flush()

    def reach(self, rank: int, *, delay_s: float = 0.0, suspect: bool = False) -> None:
        """Dial ``rank`` after a while, and again until it answers or is gone, as long as that is wanted."""
        if self._closed or not self._node.seeks:
            return
        if suspect:
            self._suspects.add(rank)
            if rank in self._dialling:
                self._dialling.pop(rank).cancel()
        if rank not in self._dialling:
            dialling = self._reach(rank, max(delay_s, self._pause_s(rank)))
            try:
                self._dialling[rank] = self._tasks.create_task(dialling)
            except RuntimeError:  # the group is ending because a task failed: this rank will be gone itself
                dialling.close()

    def drop(self, rank: int) -> None:
        """Stop dialling ``rank``, which is gone, and end its links."""
        self._suspects.discard(rank)
        if rank in self._dialling:
            self._dialling.pop(rank).cancel()
        for link in self._links.get(rank, ()):
            link.flush()  # if it lives, it shall know that it is given up
            link.abort()

    async def close(self, goodbye_s: float) -> None:
        """Say goodbye on every link, and wait (bounded) until the peers have closed theirs."""
        self._closed = True
        links = self._all
        self.end_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(goodbye_s):
                for link in links:
                    await link.wait_closed()

    def end_all(self) -> None:
        """Say goodbye on every link, and dial no more."""
        for task in self._dialling.values():
            task.cancel()
        for link in self._all:
            link.close()

    def abort(self) -> None:
        """End every link at once."""
        self._closed = True
        for link in self._all:
            link.flush()
            link.abort()

    def descriptors(self) -> list[int]:
        """Descriptors of all links, closing ones included. May be called on any thread."""
        return [descriptor for link in self._all for descriptor in link.descriptors()]

    # Dialling.

    def _pause_s(self, rank: int) -> float:
        failures = min(self._failures.get(rank, 0), 16)
        return min(FIRST_PAUSE_S * 2.0 ** (failures - 2), LONGEST_PAUSE_S) if failures > 1 else 0.0

    async def _reach(self, rank: int, delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
            tries = 0
            while self._node.seeks and (rank in self._suspects or self._node.wants(rank)):
                try:
                    connection = await self._dial(rank)
                except DialRefused as error:
                    if error.has_no_listener:
                        del self._dialling[rank]  # first, since the node drops what belongs to this rank
                        self._node.ended(rank, str(error))
                        return
                    _LOG.debug("no decision on rank %d: %s", rank, error)
                    tries += 1
                    if tries == SUSPECT_TRIES:
                        self._suspects.discard(rank)
                    self._failures[rank] = self._failures.get(rank, 0) + 1
                    await asyncio.sleep(self._pause_s(rank))
                else:
                    self._suspects.discard(rank)
                    self.add(rank, connection)
                    return
        finally:
            if self._dialling.get(rank) is asyncio.current_task():
                del self._dialling[rank]

    # What the links report (Inbound); none is opened but by `add`, and nothing is placed.

    def place(self, link: Link, header: Header, nbytes: int) -> Any:
        """No frame of a control link has a payload."""
        raise RemoteProtocolError(f"rank {link.peer} sent a payload on a control link")

    def receive(self, link: Link, header: Header, payload: memoryview) -> None:
        """Pass gossip on, and answer heartbeats; any other frame breaks the protocol."""
        self._node.heard(link.peer)
        if header[0] == Kind.GOSSIP:
            self._node.receive(link.peer, header)
        elif header[0] == Kind.PING:
            self.send(link.peer, (Kind.PONG,))
        elif header[0] != Kind.PONG:
            raise RemoteProtocolError(f"rank {link.peer} sent a {Kind(header[0]).name} on a control link")

    def lost(self, link: Link, error: BaseException | None) -> None:
        """Handle the end of a link."""
        rank = link.peer
        self._all = [one for one in self._all if one is not link]
        links = self._links.get(rank, [])
        if link in links:
            self._links[rank] = [one for one in links if one is not link]
            if len(links) == 1:
                self._node.link_down(rank)
        if error is None:
            return
        if is_silent_host(error):
            reason = f"its host has acknowledged nothing for {self._dead_host_after_s:.1f} s"
            self._node.declare_lost(rank, reason)
            return
        if self._links.get(rank):
            self._node.link_up(rank)  # what was on its way by the broken one goes by the other
        held_s = self._loop.time() - link.state
        self._failures[rank] = 0 if held_s > SETTLED_AFTER_S else self._failures.get(rank, 0) + 1
        if not self._node.is_gone(rank):
            self.reach(rank, suspect=True)
