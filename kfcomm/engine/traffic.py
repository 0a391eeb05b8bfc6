"""Traffic of one rank by peer and kind of link: over its links, and in slots of shared memory.

Links and slots keep their own counts. This module adds them up on request, and keeps their sum when they end.
Invariant: no sum ever falls, on any reading thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING

from kfcomm.transports.base import Counts, Link

if TYPE_CHECKING:
    from kfcomm.transports.shm.slot import Slot
    from kfcomm.transports.tcp_path import TcpPath

Totals = dict[tuple[int, str], Counts]
"""By peer (world rank) and kind of link."""

WINDOW_S = 1.0
"""Rates are those of the last one to two of these."""

NOTHING = Counts(0, 0, 0, 0)
SHARED = "shm"
"""The kind of link that slots count as."""


class Traffic:
    """Traffic counters of one rank.

    ``rates``, ``read`` and ``totals`` may be called on any thread, the rest on the loop of the links. State shared with
    readers is replaced as a whole and never modified; readers copy the list of slots before they use it.
    """

    __slots__ = ("_marks", "_read", "_reading", "_state")

    def __init__(self) -> None:
        self._state: tuple[tuple[Link, ...], list[Slot], Totals] = ((), [], {})
        self._read: Totals = {}
        self._reading = Lock()
        now: tuple[float, Totals] = (time.monotonic(), {})
        self._marks = (now, now)

    def add(self, link: Link) -> None:
        """Add a link."""
        links, slots, ended = self._state
        self._state = ((*links, link), slots, ended)

    def end(self, link: Link) -> None:
        """Keep the counts of a link that has ended."""
        links, slots, ended = self._state
        if link in links:
            self._state = (tuple(one for one in links if one is not link), slots, _sums(ended, [link], []))

    def add_slot(self, slot: Slot) -> None:
        """Add a slot."""
        self._state[1].append(slot)

    def end_slots(self, slots: Iterable[Slot]) -> None:
        """Keep the counts of slots that are used no more."""
        gone = dict.fromkeys(slots)
        if gone:
            links, known, ended = self._state
            self._state = (links, [one for one in known if one not in gone], _sums(ended, [], gone))

    def read(self, peer: int, nbytes: int) -> None:
        """Add what was read in the memory of a peer, which does not know of it; on any thread."""
        with self._reading:
            before = self._read.get((peer, SHARED), NOTHING)
            self._read[peer, SHARED] = _sum(before, Counts(0, nbytes, 0, 1))

    def totals(self) -> Totals:
        """Bytes and messages so far, by link in the order of their opening. Costs 1 µs per link and slot."""
        links, slots, ended = self._state
        return added(_sums(ended, links, list(slots)), dict(self._read))

    def tcp_paths(self) -> dict[int, TcpPath]:
        """Measurements of the kernel by peer, of those with an open TCP connection. One system call each."""
        found: dict[int, TcpPath] = {}
        for link in self._state[0]:
            path = link.tcp_path()
            # of two connections, that which carries this rank's data
            if path is not None and (link.peer not in found or path.acked_nbytes > found[link.peer].acked_nbytes):
                found[link.peer] = path
        return found

    def mark(self, now_s: float) -> None:
        """Begin another window of the rates if it is due. To be called periodically."""
        latest = self._marks[1]
        if now_s - latest[0] >= WINDOW_S:
            self._marks = (latest, (now_s, self.totals()))

    def rates(self, totals: Totals, now_s: float) -> dict[tuple[int, str], tuple[float, float]]:
        """Bytes per second sent and received, up to ``totals`` at ``now_s``, by peer and kind.

        They are those of the last one to two seconds, whatever other readers do.
        """
        since_s, before = self._marks[0]
        passed_s = max(now_s - since_s, 1e-9)
        found = {}
        for way, counts in totals.items():
            then = before.get(way, NOTHING)
            sent, received = counts.sent_nbytes - then.sent_nbytes, counts.received_nbytes - then.received_nbytes
            found[way] = (sent / passed_s, received / passed_s)
        return found


def added(first: Totals, second: Totals) -> Totals:
    """The sums of both."""
    totals = dict(first)
    for way, counts in second.items():
        totals[way] = _sum(totals.get(way, NOTHING), counts)
    return totals


def _sums(ended: Totals, links: Iterable[Link], slots: Iterable[Slot]) -> Totals:
    totals = dict(ended)
    for link in links:
        way = (link.peer, link.kind)
        totals[way] = _sum(totals.get(way, NOTHING), link.counts())
    for peer, counts in _in_slots(slots).items():
        totals[peer, SHARED] = _sum(totals.get((peer, SHARED), NOTHING), counts)
    return totals


def _in_slots(slots: Iterable[Slot]) -> dict[int, Counts]:
    """Reads in slots, by peer. A use counts as one message from each rank to each of its readers."""
    alike: dict[tuple[int, ...], list[int]] = {}  # slots in which all read as much of each: most
    moved: dict[int, list[int]] = {}
    for slot in slots:
        uses, nbytes = slot.num_uses, slot.nbytes_of_all
        if nbytes is None:
            for peer, sent_nbytes, received_nbytes in slot.moved(uses):
                _add(moved, peer, sent_nbytes, received_nbytes, uses)
        elif uses:
            sums = alike.setdefault(slot.others, [0, 0])
            sums[0] += uses * nbytes
            sums[1] += uses
    for others, (nbytes, uses) in alike.items():
        for peer in others:
            _add(moved, peer, nbytes, nbytes, uses)
    return {peer: Counts(*sums) for peer, sums in moved.items()}


def _add(moved: dict[int, list[int]], peer: int, sent_nbytes: int, received_nbytes: int, uses: int) -> None:
    sums = moved.setdefault(peer, [0, 0, 0, 0])
    for place, value in enumerate(
        (sent_nbytes, received_nbytes, uses if sent_nbytes else 0, uses if received_nbytes else 0)
    ):
        sums[place] += value


def _sum(first: Counts, second: Counts) -> Counts:
    return Counts(*map(sum, zip(first, second, strict=True)))
