"""The table of all links of one rank: those it opened, to send chunks, and those that peers opened to it.

A link is opened when something is to be sent, and replaced when it breaks. Frames are queued and then sent together:
at the end of a burst of events, or in the next turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from kfcomm.common import do_nothing
from kfcomm.core.frame import Header
from kfcomm.core.links import Incoming, Outgoing
from kfcomm.core.router import Router
from kfcomm.engine.traffic import Traffic
from kfcomm.errors import TransportError
from kfcomm.transports.base import Link, Owner
from kfcomm.transports.reactor import Reactor


class LinkTable:
    """The links of one rank, by peer.

    Attributes:
        by_peer: sending ends by world rank, one for each peer that was sent anything.
        on_failed: called with a sending end and a reason when its link cannot be opened.
        closing: no further link is opened.
        dirty: links to be flushed.
        is_low_latency: links hand over little at a time, see ``Link.set_low_latency``.
        traffic: of all links, those that have ended included.
    """

    def __init__(
        self,
        connect: Callable[[int], Awaitable[Link]],
        loop: asyncio.AbstractEventLoop,
        reactor: Reactor,
        router: Router,
    ) -> None:
        self.closing = False
        self.is_low_latency = False
        self.traffic = Traffic()
        self._connect = connect
        self._loop = loop
        self._reactor = reactor
        self._router = router
        self.on_failed: Callable[[Outgoing, str], None] = do_nothing
        self.by_peer: dict[int, PeerSender] = {}
        self.incoming: dict[Incoming, Link] = {}  # those that peers opened
        self.dirty: dict[PeerSender | Link, None] = {}
        self._flush_scheduled = False
        self._dials: set[asyncio.Task[None]] = set()
        self._all_closed = asyncio.Event()

    def to(self, peer: int) -> PeerSender:
        """The sender to a peer, to be flushed soon; a link is opened if needed."""
        sender = self.towards(peer)
        self.dirty[sender] = None
        return sender

    def towards(self, peer: int) -> PeerSender:
        """The sender to a peer; a link is opened if needed."""
        sender = self.by_peer.get(peer)
        if sender is None:
            sender = self.by_peer[peer] = PeerSender(*self._router.open(peer))
            self._loop.call_soon(self._start_to_dial, sender, peer)
        return sender

    def back(self, incoming: Incoming) -> Link | None:
        """The link that a peer opened, to answer on; to be flushed soon."""
        link = self.incoming.get(incoming)
        if link is not None:
            self.dirty[link] = None
        return link

    def opened(self, link: Link) -> None:
        """A peer opened a link."""
        self.traffic.add(link)
        link.state = self._router.opened(link.peer)
        self.incoming[link.state] = link
        if self.is_low_latency:
            link.set_low_latency()

    def numbered(self, incoming: Incoming, number: int) -> None:
        """Number the peer's link, and keep only the newest: a peer redials only what has broken."""
        incoming.number = number
        newest = max(one.number for one in self.incoming if one.peer == incoming.peer)
        for one, link in list(self.incoming.items()):
            if one.peer == incoming.peer and 0 < one.number < newest:
                link.abort()

    def lost(self, link: Link) -> None:
        """Handle the end of a link."""
        self.traffic.end(link)
        if type(link.state) is Incoming:
            self.incoming.pop(link.state, None)
        else:
            sender = self.by_peer.get(link.peer)
            if sender is not None and sender.link is link:
                del self.by_peer[link.peer]
        self.dirty.pop(link, None)
        if self.closing and not self._links():
            self._all_closed.set()

    def drop(self, peer: int) -> None:
        """Stop sending to a lost peer, and reading memory for it."""
        sender = self.by_peer.pop(peer, None)
        if sender is not None and sender.link is not None:
            sender.link.abort()

    def break_off(self, peer: int, number: int) -> Outgoing | None:
        """Return the sending end of a link that the peer cannot hear any more, unless there is a newer one."""
        sender = self.by_peer.get(peer)
        if sender is None or sender.state.number != number:
            return None
        self.drop(peer)
        return sender.state

    def goodbye(self, peer: int) -> None:
        """Say goodbye to a peer, after the queued frames."""
        sender = self.by_peer.get(peer)
        if sender is not None and sender.link is not None:
            sender.link.close()

    def disown(self, owner: Owner) -> None:
        """Stop writing arriving data to this owner's memory."""
        for link in self.incoming.values():
            link.disown(owner)

    def redirect(self, owner: Owner) -> None:
        """Redirect arriving data of this owner to its new memory."""
        for link in self.incoming.values():
            link.redirect(owner)

    def set_low_latency(self) -> None:
        """Prepare all links for calls of different urgency: see ``Link.set_low_latency``."""
        self.is_low_latency = True
        for link in self._links():
            link.set_low_latency()

    def flush_soon(self) -> None:
        """Flush in the reactor's next turn, with what is queued until then."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._reactor.call_soon(self.flush)

    def flush(self) -> None:
        """Flush now."""
        self._flush_scheduled = False
        while self.dirty:
            dirty, self.dirty = self.dirty, {}
            for end in dirty:
                end.flush()

    async def close(self, timeout_s: float) -> None:
        """Say goodbye on every link and wait, bounded, until the peers have; then close what is left."""
        self.closing = True
        for dial in list(self._dials):
            dial.cancel()
        self.flush()
        for peer in list(self.by_peer):
            self.goodbye(peer)
        if not self._links():
            self._all_closed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        for link in self._links():
            link.abort()
        await asyncio.gather(*self._dials, return_exceptions=True)
        await asyncio.sleep(0)

    def descriptors(self) -> list[int]:
        """Descriptors of all open links."""
        return [descriptor for link in self._links() for descriptor in link.descriptors()]

    def _links(self) -> list[Link]:
        opened_here = (sender.link for sender in self.by_peer.values() if sender.link is not None)
        return [*self.incoming.values(), *opened_here]

    def _start_to_dial(self, sender: PeerSender, peer: int) -> None:
        if self.closing or self.by_peer.get(peer) is not sender:
            return
        task = self._loop.create_task(self._dial(sender, peer), name=f"kfcomm dial rank {peer}")
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, sender: PeerSender, peer: int) -> None:
        try:
            link = await self._connect(peer)
        except TransportError as error:
            if self.by_peer.get(peer) is sender:
                del self.by_peer[peer]
            self.on_failed(sender.state, str(error))
            return
        self.traffic.add(link)
        if self.by_peer.get(peer) is sender:
            if self.is_low_latency:
                link.set_low_latency()
            sender.attach(link)
            self._reactor.wake()  # what has left just now may have been the last that a caller waits for
        else:
            link.state = sender.state
            link.close()


class PeerSender:
    """Sends to ``state.peer``, now or as soon as there is a link: ``first`` before all else.

    When a link breaks, its sender is replaced too: the names that were defined on that link, and the credit that was
    spent on it, are lost with the link.
    """

    __slots__ = ("_backlog", "link", "state")

    def __init__(self, state: Outgoing, first: Sequence[Header]) -> None:
        self.state = state
        self.link: Link | None = None
        self._backlog: list[tuple[Header, memoryview | None, Owner | None, int]] = [
            (header, None, None, 0) for header in first
        ]

    def attach(self, link: Link) -> None:
        """Send the backlog, since the link is open."""
        self.link = link
        link.state = self.state
        backlog, self._backlog = self._backlog, []
        for header, payload, owner, priority in backlog:
            if link.send(header, payload, owner, priority) and owner is not None:
                owner.sent()
        link.flush()

    def send(
        self, header: Header, payload: memoryview | None = None, owner: Owner | None = None, priority: int = 0
    ) -> bool:
        """Send or queue a frame; see ``Link.send``."""
        if self.link is None:
            self._backlog.append((header, payload, owner, priority))
            return False
        return self.link.send(header, payload, owner, priority)

    def flush(self) -> None:
        """Move queued frames, if there is a link."""
        if self.link is not None:
            self.link.flush()

    def withdraw(self, owner: Owner) -> list[Header]:
        """Forget an owner's memory; return the headers of its dropped frames."""
        if self.link is not None:
            return list(self.link.withdraw(owner))
        dropped = [header for header, _, other, _ in self._backlog if other is owner]
        self._backlog = [frame for frame in self._backlog if frame[2] is not owner]
        return dropped
