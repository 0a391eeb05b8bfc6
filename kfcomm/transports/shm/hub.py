"""Hub: all shared-memory links of one process, polled together and parked together.

The driver of the reactor polls every ring while something is awaited, or has just been. After a while without news it
parks the hub: the peer of every link must wake it from then on. So an idle process costs nothing. Between two blocking
calls the links are neither polled nor parked for a moment: calls often follow each other at once, and parking costs
more than a small collective.

Invariants:

- Before it rests, the hub polls once more, after it has set the parked flag of every link.
- A wake-up can be missed only between two ranks that both have nothing in flight. That is harmless: neither waits for
  the record. A rank that waits wakes, when it parks, every peer with unread records, parked or not.
"""

from __future__ import annotations

from collections.abc import Callable

from kfcomm.transports.base import Watched
from kfcomm.transports.reactor import Reactor, Timer
from kfcomm.transports.shm.bell import Bell
from kfcomm.transports.shm.link import ShmLink
from kfcomm.transports.shm.ring import Parked, RingReader, fence
from kfcomm.transports.shm.sender import ShmSender

BACKSTOP_S = 0.05
"""No rest is longer than this while something is in flight."""
UNREACHED_S = 1e-3
"""The same while peers cannot wake this process: their links are being opened, at the beginning of an epoch."""
LOOKS_AMONG_HOSTS = 4
"""``Reactor.looks`` with ranks on other hosts, whose chunks arrive on descriptors: these must be polled often."""


class Hub:
    """Poller of all links, and of ``slots``; implements ``reactor.Poller``.

    ``is_waiting`` tells whether a collective of this rank is in flight; ``has_far``, whether there are ranks on other
    hosts.
    """

    def __init__(
        self, reactor: Reactor, is_waiting: Callable[[], object], slots: Watched, *, has_far: bool = False
    ) -> None:
        self._reactor = reactor
        self._slots = slots
        self._is_waiting = is_waiting
        self._bell: Bell | None = None
        self._links: tuple[ShmLink, ...] = ()
        self.restless: set[ShmLink] = set()  # links to be polled also without news, until they have nothing left to do
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
        """Add a link."""
        self._keep((*self._links, link))
        if self.is_awake:
            link.unpark()
        self._reactor.call_soon(link.look_for_end)  # its bell may have been rung before
        self.wake()

    @property
    def bell(self) -> Bell:
        """The bell of this process. Raises `OSError`: the system has no socket to give."""
        if self._bell is None:
            self._bell = Bell(self._reactor, self._rung)
        return self._bell

    def ring(self, address: bytes) -> None:
        """Wake the process with that bell."""
        if self._bell is not None:
            self._bell.ring(address)

    def peer_lost(self, peer: int) -> None:
        """End the links to a peer that is gone for good."""
        for link in self._links:
            if link.peer == peer:
                link.peer_lost()

    def break_links(self) -> None:
        """End all links without a goodbye, soon; on any thread."""
        for link in self._links:
            self._reactor.call_soon_threadsafe(link.peer_lost)

    def remove(self, link: ShmLink) -> None:
        """Remove a link that has ended. Pieces that its peer may still read are freed when the peer releases them."""
        self._keep(tuple(one for one in self._links if one is not link))
        self.restless.discard(link)
        if isinstance(link, ShmSender):
            self._ended.append(link)
            self.reclaim()

    def reclaim(self, gone: int | None = None) -> None:
        """Free pieces that are not read any more; ``gone``: a peer that has ended, and never opens a link again."""
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
        """Poll until it is quiet: something is in flight, or has arrived. Costs 0.2 µs if it is polled anyway."""
        if self._links or self._slots.pending:
            if not self.is_awake:
                self.unpark()
            if not self._reactor.is_driven:
                self._reactor.woken()

    def progress(self) -> bool:
        """Poll every link once; whether there was anything."""
        moved = False
        for link, words, tail, ring in self._news:  # 0.1 µs for a link without news, where calling it would cost 1
            if words[tail] != ring.head and link.poll():
                moved = True
        if self.restless:
            for link in tuple(self.restless):
                if link.poll():
                    moved = True
        if self._slots.pending and self._slots.look():
            moved = True
        if moved and not self._is_waiting() and not self._slots.pending:
            self.ring_bells()  # the result is there, and the program may compute for long now
        return moved

    def descriptors(self) -> list[int]:
        """Return the descriptor of the bell."""
        return [] if self._bell is None or self._bell.descriptor < 0 else [self._bell.descriptor]

    def sever(self) -> None:
        """In a forked child: stop polling, and touch nothing that the parent shares with its peers."""
        for link in self._links:
            link.sever()
        self._keep(())
        self.restless.clear()

    def close(self) -> None:
        """Stop polling; a link that was opened too late for the goodbyes ends now."""
        for link in self._links:
            link.abort()
        self._ended.clear()
        if self._bell is not None:
            self._bell.close()
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
        """Poll from now on, without wake-ups."""
        self.is_awake = True
        self._slots.unpark()
        for link in self._links:
            link.unpark()

    def park(self) -> bool:
        """Have peers wake this process from now on; False if something came in between that must be polled."""
        self.is_awake = False
        if self._ended:
            self.reclaim()
        # A chunk that waits on one link may wait for a piece that comes back on another.
        what = Parked.FOR_RECORDS if all(link.is_idle for link in self._links) else Parked.FOR_ROOM
        for link in self._links:
            link.park(what)
        is_reached = self._slots.park()
        # Flags first, then a fence, then the last poll: a peer that stores later sees the flag and wakes this process.
        with self._fence:
            pass
        # News in between are often of the next collective, which this rank has yet to post: no reason to stay awake.
        while self.progress():
            if self.is_needed:
                self.wake()
            if self.is_awake:
                return False
        if self.is_waiting and (self._links or self._slots.pending):
            if self._backstop is not None:
                self._backstop.cancel()
            self._backstop = self._reactor.call_later(BACKSTOP_S if is_reached else UNREACHED_S, self.wake)
        return True

    def ring_bells(self) -> None:
        """Wake peers that may sleep through stored records: this process may compute for long now."""
        for link in self.restless:
            if link.owes_bell:
                link.ring_bell()

    def _rung(self) -> None:
        self.wake()
        self.progress()
        for link in self._links:
            link.look_for_end()

    def _keep(self, links: tuple[ShmLink, ...]) -> None:
        self._links = links
        self._news = tuple((link, *link.news) for link in links)
