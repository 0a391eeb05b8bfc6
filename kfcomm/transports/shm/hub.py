"""All shared-memory links of one process: they are looked at together, and rest together.

Whoever drives the reactor looks at every ring again and again while something is awaited, or has just been. After a
while without news it parks the hub: every link is told that its peer must ring from now on. So an idle process costs
nothing. Between two blocking calls nobody looks for a moment, and nobody is told: calls often follow each other at
once, and telling all peers costs more than a small collective.

Invariants:

- Before it rests, the hub looks once more, after all peers have been told that it parks.
- A wake-up can be missed only between two ranks that both have nothing in flight. That is harmless: nobody waits for
  what was sent. A rank that waits wakes, when it parks, every peer that has not read all that was sent to it, parked
  or not.
"""

from __future__ import annotations

from collections.abc import Callable

from kfcomm.transports.base import Watched
from kfcomm.transports.reactor import Reactor, Timer
from kfcomm.transports.shm.link import ShmLink
from kfcomm.transports.shm.ring import RingReader
from kfcomm.transports.shm.sender import ShmSender
from kfcomm.transports.shm.shared import Parked, fence

BACKSTOP_S = 0.05
"""No rest is longer than this while something is in flight."""
LOOKS_AMONG_HOSTS = 4
"""See ``Reactor.looks``. What comes from other hosts comes by descriptors: who looks elsewhere for long is late."""


class Hub:
    """Looks after links; see the module. Implements ``reactor.Poller``.

    Args:
        reactor: by which it is driven.
        is_waiting: whether something is in flight on this rank.
        slots: what else is to be looked at.
        has_far: there are ranks on other hosts.

    Attributes:
        is_awake: it looks at every link again soon.
        restless: links that are to be polled also without news, until a look finds nothing left to do.
    """

    def __init__(
        self, reactor: Reactor, is_waiting: Callable[[], object], slots: Watched, *, has_far: bool = False
    ) -> None:
        self._reactor = reactor
        self._slots = slots
        self._is_waiting = is_waiting
        self._links: tuple[ShmLink, ...] = ()
        self.restless: set[ShmLink] = set()
        self._news: tuple[tuple[ShmLink, memoryview, int, RingReader], ...] = ()
        self._ended: list[ShmSender] = []
        self._gone: set[int] = set()
        self._fence = fence()
        self.is_awake = False
        if has_far:
            reactor.looks = LOOKS_AMONG_HOSTS
        self._backstop: Timer | None = None
        reactor.pollers.append(self)

    def add(self, link: ShmLink) -> None:
        """A new link."""
        self._keep((*self._links, link))
        if self.is_awake:
            link.unpark()
        self.wake()

    def remove(self, link: ShmLink) -> None:
        """A link has ended. What its peer may still read is kept until the peer has said that it does not."""
        self._keep(tuple(one for one in self._links if one is not link))
        self.restless.discard(link)
        if isinstance(link, ShmSender):
            self._ended.append(link)
            self.reclaim()

    def reclaim(self, gone: int | None = None) -> None:
        """Free what nobody reads any more; ``gone``: a peer that has ended, and opens no link again."""
        if gone is not None:
            self._gone.add(gone)
        for link in list(self._ended):
            if link.peer in self._gone or link.may_reuse():
                link.free_pieces()
                self._ended.remove(link)

    @property
    def is_waiting(self) -> bool:
        """Whether something is in flight on this rank."""
        return bool(self._is_waiting() or self._slots.pending)

    def wake(self) -> None:
        """Something is in flight, or has arrived: look until it is quiet. Costs 0.2 µs when it is looked at anyway."""
        if self._links:
            if not self.is_awake:
                self.unpark()
            if not self._reactor.is_driven:
                self._reactor.woken()

    def progress(self) -> bool:
        """Look at every link once; whether there was anything."""
        moved = False
        for link, words, tail, ring in self._news:  # 0.1 µs for a link that needs nothing; asking it would cost 1
            if words[tail] != ring.head and link.poll():
                moved = True
        if self.restless:
            for link in tuple(self.restless):
                if link.poll():
                    moved = True
        if self._slots.pending and self._slots.look():
            moved = True
        if moved and not self._is_waiting() and not self._slots.pending:
            self.ring_bells()  # it is there, and the program may be long at its work now
        return moved

    def descriptors(self) -> list[int]:
        """Of all links."""
        return [descriptor for link in self._links for descriptor in link.descriptors()]

    def sever(self) -> None:
        """In a forked child: look no more, and touch nothing that the parent shares with its peers."""
        for link in self._links:
            link.sever()
        self._keep(())
        self.restless.clear()

    def close(self) -> None:
        """Look no more; a link that was opened too late for the goodbyes ends now."""
        for link in self._links:
            link.abort()
        self._ended.clear()
        if self._backstop is not None:
            self._backstop.cancel()
        if self in self._reactor.pollers:
            self._reactor.pollers.remove(self)

    @property
    def is_needed(self) -> bool:
        """Whether this rank waits for something, or a peer for what is queued here, or for a bell."""
        if self._is_waiting() or self._slots.pending:
            return True
        return bool(self.restless) and any(link.owes_bell or not link.is_idle for link in self.restless)

    def unpark(self) -> None:
        """This process looks by itself."""
        self.is_awake = True
        self._slots.unpark()
        for link in self._links:
            link.unpark()

    def park(self) -> bool:
        """Peers have to ring from now on; False if something came in between, and this process has to look."""
        self.is_awake = False
        if self._ended:
            self.reclaim()
        # What waits on one link may wait for a piece that comes back on another.
        what = Parked.FOR_RECORDS if all(link.is_idle for link in self._links) else Parked.FOR_ROOM
        for link in self._links:
            link.park(what)
        self._slots.park()
        with self._fence:
            pass
        # What came in between is often the next collective's, which this rank has yet to post: no reason to stay up.
        while self.progress():
            if self.is_needed:
                self.wake()
            if self.is_awake:
                return False
        if self.is_waiting and self._links:
            if self._backstop is not None:
                self._backstop.cancel()
            self._backstop = self._reactor.call_later(BACKSTOP_S, self.wake)
        return True

    def ring_bells(self) -> None:
        """Wake peers that may sleep over something that was stored: this process may be long at other work now."""
        for link in self.restless:
            if link.owes_bell:
                link.ring_bell()

    def _keep(self, links: tuple[ShmLink, ...]) -> None:
        self._links = links
        self._news = tuple((link, *link.news) for link in links)
