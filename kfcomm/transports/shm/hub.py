"""All shared-memory links of one process: they are looked at together, and rest together.

While something is in flight, or has just been, the hub looks at every ring again and again, and lets others run in
between (sched_yield(2): it costs 1 µs where nobody else wants to, while any sleep would cost 50). After a while
without news it *parks*: every link is told that its peer must ring from now on, and the loop has nothing more to do.
So an idle process costs nothing.

A blocking call looks in place of the loop (``stand_in``). Between two of them nobody does, and nobody is told: calls
often follow each other at once, and telling all peers costs more than a small collective. If none follows soon, the
loop parks.

What always holds: before it rests, the hub looks once more, after all have been told; so no news is slept over, but
what is for a rank that waits for nothing, after a blocking call, and from one that waits for nothing either.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from kfcomm.transports.shm.link import ShmLink
from kfcomm.transports.shm.publisher import Publisher
from kfcomm.transports.shm.ring import RingReader
from kfcomm.transports.shm.shared import Fence, Parked

SPIN_S = 1e-3
"""Of fruitless looking before the hub parks while something is in flight; a wake-up costs up to a tenth of it."""
LINGER_S = 2e-4
"""The same when nothing is: the next collective of a loop comes soon."""
LULL_S = 0.1
"""The same after a blocking call, when nobody looks. Long, since waking the thread of the loop takes the caller's time
(1 ms with more ranks than cores); a peer that cannot wait rings when it parks, parked or not."""
LOOKS = 16
"""Fruitless looks before the loop gets its turn; 1 where the peers are on the same loop."""
BACKSTOP_S = 0.05
"""No rest is longer than this while something is in flight."""


class Hub:
    """Looks after links; see the module.

    Args:
        loop: where everything here runs.
        is_waiting: whether something is in flight on this rank.
        looks: see ``LOOKS``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, is_waiting: Callable[[], bool], *, looks: int = LOOKS) -> None:
        self._loop = loop
        self._is_waiting = is_waiting
        self._looks = looks
        self._links: tuple[ShmLink, ...] = ()
        self._news: tuple[tuple[ShmLink, memoryview, int, RingReader], ...] = ()
        self._ended: list[Publisher] = []
        self._gone: set[int] = set()
        self._fence = Fence()
        self.is_awake = False
        self._is_scheduled = self._is_manned = self._was_manned = False
        self._quiet_since_s = 0.0
        self._backstop: asyncio.TimerHandle | None = None
        self._lull: asyncio.TimerHandle | None = None

    def add(self, link: ShmLink) -> None:
        """A new link."""
        self._keep((*self._links, link))
        if self.is_awake:
            link.unpark()
        self.wake()

    def remove(self, link: ShmLink) -> None:
        """A link has ended. What its peer may still read is kept until the peer has said that it does not."""
        self._keep(tuple(one for one in self._links if one is not link))
        if isinstance(link, Publisher):
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
        return self._is_waiting()

    def wake(self) -> None:
        """Something is in flight, or has arrived: look until it is quiet. Costs 0.1 µs when it is looked at anyway."""
        self._quiet_since_s = 0.0
        if self._is_scheduled or self._is_manned or not self._links:
            return
        if not self.is_awake:
            self._unpark()
        self._schedule()

    def stand_in(self) -> None:
        """The caller looks from now on, on whatever thread; the loop does not until it steps back."""
        self._is_manned = self._was_manned = True
        if not self.is_awake:
            self._unpark()

    def step_back(self) -> None:
        """The caller looks no more: the loop does if there is anything to wait for, and else parks by and by."""
        self._is_manned = False
        if not self._is_scheduled:
            if self._is_needed:
                self._schedule()
            else:
                self._ring_bells()
                self._await_lull()

    def progress(self) -> bool:
        """Look at every link once; whether there was anything."""
        moved = False
        for link, words, tail, ring in self._news:  # 0.1 µs for a link that needs nothing; asking it would cost 1
            if (link.is_restless or words[tail] != ring.head) and link.poll():
                moved = True
        return moved

    def descriptors(self) -> list[int]:
        """Of all links."""
        return [descriptor for link in self._links for descriptor in link.descriptors()]

    def sever(self) -> None:
        """In a forked child: look no more, and touch nothing that the parent shares with its peers."""
        for link in self._links:
            link.sever()
        self._keep(())

    def close(self) -> None:
        """Look no more; a link that was opened too late for the goodbyes ends now."""
        for link in self._links:
            link.abort()
        self._ended.clear()
        for timer in (self._backstop, self._lull):
            if timer is not None:
                timer.cancel()

    @property
    def _is_needed(self) -> bool:
        """Whether this rank waits for something, or a peer for what is queued here."""
        return self.is_waiting or not all(link.is_idle for link in self._links)

    def _keep(self, links: tuple[ShmLink, ...]) -> None:
        self._links = links
        self._news = tuple((link, *link.news) for link in links)

    def _await_lull(self) -> None:
        if self._lull is None:
            self._was_manned = False
            self._lull = self._loop.call_later(LULL_S, self._after_lull)

    def _after_lull(self) -> None:
        self._lull = None
        if self._is_manned or self._is_scheduled or not self.is_awake:
            return
        if self._was_manned:
            self._await_lull()
        else:
            self._park()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _ring_bells(self) -> None:
        for link in self._links:
            if link.owes_bell:
                link.ring_bell()

    def _unpark(self) -> None:
        self.is_awake = True
        for link in self._links:
            link.unpark()

    def _turn(self) -> None:
        self._is_scheduled = False
        if self._is_manned:
            return
        if self._was_manned and not self._is_needed:
            self._ring_bells()
            self._await_lull()
            return
        try:
            self._look()
        except BaseException:
            self._schedule()  # one link has ended by it; the others go on
            raise

    def _look(self) -> None:
        for _ in range(self._looks):
            if self.progress():
                self._quiet_since_s = 0.0
                self._schedule()
                if not self.is_waiting:  # what was waited for is there, and the program may be long at its work now
                    self._ring_bells()
                return
            os.sched_yield()
        self._ring_bells()
        now_s = time.monotonic()
        if not self._quiet_since_s:
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s > (SPIN_S if self.is_waiting else LINGER_S):
            self._park()
            return
        self._schedule()

    def _park(self) -> None:
        self.is_awake = False
        if self._ended:
            self.reclaim()
        # What waits on one link may wait for a piece that comes back on another.
        what = Parked.FOR_RECORDS if all(link.is_idle for link in self._links) else Parked.FOR_ROOM
        for link in self._links:
            link.park(what)
        self._fence()
        # What came in between is often the next collective's, which this rank has yet to post: no reason to stay up.
        while self.progress():
            if self._is_needed:
                self.wake()
            if self.is_awake:
                return
        if self.is_waiting and self._links:
            if self._backstop is not None:
                self._backstop.cancel()
            self._backstop = self._loop.call_later(BACKSTOP_S, self.wake)
