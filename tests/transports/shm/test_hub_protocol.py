"""The slot of one host among several, stepped through every interleaving: who reads reads what belongs to that use.

A model of what `HubSlot` does, one store or load at a time, a buffer in two halves. The hub reads what the others give
when all have posted, and shows what comes of it, which takes as long as other hosts please; they read that. A rank may
stop at any step, and never comes back: its use has failed, and it does not use the slot again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.transports.shm.interleavings import TornError, search

WRITE, WRITTEN, POST, WAIT, READ, MAKE, MADE, SHARE, END, GONE = range(10)
"""Where a rank is in a use: half of what it gives is to be written, the other half, its word; it waits, and reads; the
hub then writes half of the result, the other half, and its word."""

Cells = tuple[int, int]


class Rank(NamedTuple):
    """One rank.

    Attributes:
        use: from 1; its buffer is that of the use's parity.
        at: where it is.
        seen: halves of buffers that it has read.
        posted, shared: its words.
        buffers: of even and of odd uses, what both halves hold.
    """

    use: int = 1
    at: int = WRITE
    seen: int = 0
    posted: int = 0
    shared: int = 0
    buffers: tuple[Cells, Cells] = ((0, 0), (0, 0))


State = tuple[Rank, ...]


class Model:
    """All ranks of the host; the first is the hub.

    Args:
        size: number of ranks.
        uses: of the slot.
        gone: how many ranks may stop.
        num_buffers: `HubSlot` has two; one would do.
        waits: if the hub does not wait for words, the protocol is broken.
    """

    def __init__(self, size: int, uses: int, gone: int = 0, *, num_buffers: int = 2, waits: bool = True) -> None:
        self.size, self.uses, self.gone = size, uses, gone
        self.num_buffers = num_buffers
        self.waits = waits

    def search(self) -> int:
        """Look at all states; how many there are. At the end no rank waits, unless for one that has gone."""

        def ends(state: State) -> bool:
            return all(one.at == END for one in state) or any(one.at == GONE for one in state)

        hub, others = Rank(at=POST), (Rank(),) * (self.size - 1)
        return search((hub, *others), self._following, ends)

    def _following(self, state: State) -> Iterator[State]:
        for me, rank in enumerate(state):
            moved = self._step(state, me, rank)
            if moved is not None:
                yield (*state[:me], moved, *state[me + 1 :])
            if rank.at not in (END, GONE) and sum(one.at == GONE for one in state) < self.gone:
                yield (*state[:me], rank._replace(at=GONE), *state[me + 1 :])

    def _step(self, state: State, me: int, rank: Rank) -> Rank | None:
        is_hub = not me
        match rank.at:
            case 0 | 5:  # the second half still holds what it held
                return self._written(rank, 0, at=rank.at + 1)
            case 1 | 6:
                return self._written(rank, 1, at=rank.at + 1)
            case 2:
                return rank._replace(at=WAIT, posted=rank.use, shared=rank.shared if is_hub else rank.use)
            case 3:
                words = [one.posted if is_hub else one.shared for one in state]
                return rank._replace(at=READ) if min(words) >= rank.use or (is_hub and not self.waits) else None
            case 4:
                return self._read(state, is_hub, rank)
            case 7:
                return self._next(rank._replace(shared=rank.use), is_hub)
        return None

    def _read(self, state: State, is_hub: bool, rank: Rank) -> Rank:
        whose = 1 + rank.seen // 2 if is_hub else 0
        found = state[whose].buffers[rank.use % self.num_buffers][rank.seen % 2]
        if found != rank.use:
            raise TornError(f"{rank} reads {found} of rank {whose}: {state}")
        last = 2 * (self.size - 1) if is_hub else 2
        if rank.seen + 1 < last:
            return rank._replace(seen=rank.seen + 1)
        return rank._replace(seen=0, at=MAKE) if is_hub else self._next(rank, is_hub)

    def _next(self, rank: Rank, is_hub: bool) -> Rank:
        if rank.use == self.uses:
            return rank._replace(at=END, seen=0)
        return rank._replace(use=rank.use + 1, at=POST if is_hub else WRITE, seen=0)

    def _written(self, rank: Rank, half: int, *, at: int) -> Rank:
        place = rank.use % self.num_buffers
        cells = (rank.use, rank.buffers[place][1]) if not half else (rank.buffers[place][0], rank.use)
        buffers = (cells, rank.buffers[1]) if not place else (rank.buffers[0], cells)
        return rank._replace(at=at, buffers=buffers)


@pytest.mark.parametrize("num_buffers", [1, 2])
@pytest.mark.parametrize(("size", "uses", "gone"), [(2, 4, 0), (2, 4, 2), (3, 3, 0), (3, 3, 1), (3, 2, 2), (4, 2, 0)])
def test_no_torn_read_and_no_lost_wakeup(size: int, uses: int, gone: int, num_buffers: int) -> None:
    assert Model(size, uses, gone, num_buffers=num_buffers).search() > 50


def test_a_hub_that_does_not_wait_would_read_what_is_not_there() -> None:
    with pytest.raises(TornError):
        Model(2, 1, waits=False).search()
