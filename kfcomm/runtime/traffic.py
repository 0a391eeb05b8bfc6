"""What the links of one rank have moved, by peer and kind of link, those that have ended included.

The links count for themselves; here they are only known, added up when somebody asks, and remembered as a sum when
they end. Invariants: no sum ever falls, on whatever thread it is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from kfcomm.transports.base import Counts, Link

Totals = dict[tuple[int, str], Counts]
"""By peer (world rank) and kind of link."""

WINDOW_S = 1.0
"""Rates are those of the last one to two of these."""

NOTHING = Counts(0, 0, 0, 0)


class Traffic:
    """The links of one rank, and what they have moved.

    ``add``, ``end`` and ``mark`` belong to the loop of the links, the rest to any thread: what is shared with readers
    is never changed, but replaced as a whole.
    """

    __slots__ = ("_marks", "_state")

    def __init__(self) -> None:
        self._state: tuple[tuple[Link, ...], Totals] = ((), {})
        now: tuple[float, Totals] = (time.monotonic(), {})
        self._marks = (now, now)

    def add(self, link: Link) -> None:
        """A link is open."""
        links, ended = self._state
        self._state = ((*links, link), ended)

    def end(self, link: Link) -> None:
        """A link has ended, and moves nothing more."""
        links, ended = self._state
        if link in links:
            self._state = (tuple(one for one in links if one is not link), _sums(ended, [link]))

    def totals(self) -> Totals:
        """What was moved so far, in the order in which the links were first opened. Costs 1 µs per link."""
        links, ended = self._state
        return _sums(ended, links)

    def mark(self, now_s: float) -> None:
        """Begin another window of the rates, if it is time for one. To be called now and then."""
        latest = self._marks[1]
        if now_s - latest[0] >= WINDOW_S:
            self._marks = (latest, (now_s, self.totals()))

    def rates(self, totals: Totals, now_s: float) -> dict[tuple[int, str], tuple[float, float]]:
        """Bytes per second sent and received, up to ``totals`` at ``now_s``, by peer and kind.

        They are those of the last one to two seconds: nobody who reads them changes what others read.
        """
        since_s, before = self._marks[0]
        passed_s = max(now_s - since_s, 1e-9)
        found = {}
        for way, counts in totals.items():
            then = before.get(way, NOTHING)
            sent, received = counts.sent_nbytes - then.sent_nbytes, counts.received_nbytes - then.received_nbytes
            found[way] = (sent / passed_s, received / passed_s)
        return found


def _sums(ended: Totals, links: Iterable[Link]) -> Totals:
    totals = dict(ended)
    for link in links:
        way = (link.peer, link.kind)
        totals[way] = Counts(*map(sum, zip(totals.get(way, NOTHING), link.counts(), strict=True)))
    return totals
