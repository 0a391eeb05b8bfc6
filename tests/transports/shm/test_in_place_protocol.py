"""The protocol of arrays in symmetric memory, stepped through every interleaving: who reads in place reads what belongs
to that use, whatever the programs do with their arrays before and after it.

A model of what `PartedSlot` does where all give what lies in symmetric memory; see `test_slot_protocol` for the rest. A
rank folds its part of each window from the arrays of all, makes its result in its own array or in one of two buffers,
and copies the parts of the others. One store or load at a time; a value is written in two steps. A rank may fail at any
step: it withdraws its words, and then its program has its arrays again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.transports.shm.interleavings import TornError, search

HALF_WRITTEN = -1
RESULT = 100
"""What the result of a use is more than what was given for it."""
SCRIBBLED = -2
WITHDRAWN = -1

FILL, FILLED, POST, LOOK, FOLD, MADE, KEPT, TELL, COPY, COPIED, TOLD, WITHDRAW, SCRIBBLE, GONE, END = range(15)
"""Where a rank is: its program writes its array, has written it; its word; between two windows; reading what others
give, its part half written, written, its word; reading parts, all of them read, its word; failed, its word withdrawn,
its program at its arrays; it takes no part any more; at the end."""

Cells = tuple[int, ...]


class Rank(NamedTuple):
    """One rank.

    Attributes:
        at: where it is.
        use: from 1.
        folded, copied: windows of this use.
        seen: ranks whose array it has read for this window.
        is_torn: what it has read is not what belongs to this use.
        posted, shared, read: its words.
        given, result: its arrays, by window and part; ``result`` is empty if it is the same array.
        buffers: what it has made of even and of odd windows, if that is not in its array.
    """

    at: int = FILL
    use: int = 1
    folded: int = 0
    copied: int = 0
    seen: int = 0
    is_torn: bool = False
    posted: int = 0
    shared: int = 0
    read: int = 0
    given: Cells = ()
    result: Cells = ()
    buffers: Cells = (0, 0)


State = tuple[Rank, ...]


class Model:
    """All ranks, and what each may do next.

    Args:
        size: number of ranks.
        uses: of the slot.
        windows: of each use.
        is_over: the result is made in the array that is given.
        has_buffers: results are not in symmetric memory: parts go through buffers.
        failures: how many ranks may fail.
        waits_for_readers: else the protocol is broken, as it is without ``looks_again`` after what was read.
        ahead: windows that may be folded before the first of them is copied, with buffers; more than two break it.
    """

    def __init__(
        self, size: int, uses: int, windows: int, *, is_over: bool = False, has_buffers: bool = False,
        failures: int = 0, waits_for_readers: bool = True, looks_again: bool = True, ahead: int = 2,
    ) -> None:  # fmt: skip
        self.size, self.uses, self.windows = size, uses, windows
        self.is_over, self.has_buffers = is_over, has_buffers
        self.failures = failures
        self.waits_for_readers, self.looks_again = waits_for_readers, looks_again
        self.ahead = ahead

    def _word(self, rank: Rank, window: int) -> int:
        return (rank.use - 1) * self.windows + window + 1

    def _next(self, state: State, me: int) -> list[Rank]:
        rank = state[me]
        match rank.at:
            case 0 | 1:
                value, count = (HALF_WRITTEN, rank.use)[rank.at], self.windows * self.size
                result = () if self.is_over else (value,) * count
                return [rank._replace(at=rank.at + 1, given=(value,) * count, result=result)]
            case 2:
                posted = self._word(rank, self.windows - 1)
                return [rank._replace(at=LOOK, folded=0, copied=0, posted=posted)]
            case 3:
                return self._looks(state, rank)
            case 4 | 8:
                return [self._reads(state, me)]
            case 5 | 6:
                return [self._makes(rank, me)]
            case 7:
                return [rank._replace(at=LOOK, shared=self._word(rank, rank.folded), folded=rank.folded + 1)]
            case 9:
                word = self._word(rank, rank.copied)
                if self.looks_again and min(one.shared for one in state) < word:
                    return [rank._replace(at=LOOK, seen=0, is_torn=False)]
                self._check(state, rank)
                return [rank._replace(at=TOLD, seen=0)]
            case 10:
                return [rank._replace(at=LOOK, read=self._word(rank, rank.copied), copied=rank.copied + 1)]
            case 11:
                return [rank._replace(at=SCRIBBLE, posted=WITHDRAWN)]
            case 12:
                return [rank._replace(at=GONE, shared=WITHDRAWN)]
        return []

    def _looks(self, state: State, rank: Rank) -> list[Rank]:
        following = []
        folded, copied = rank.folded, rank.copied
        if folded < self.windows and (not self.has_buffers or folded < copied + self.ahead):
            word = self._word(rank, folded)
            # All words of a use are posted at once, so they do not tell that parts of earlier windows were copied.
            are_read = min(one.read for one in state) >= word - self.ahead
            if min(one.posted for one in state) >= word and (are_read or folded < self.ahead or not self.has_buffers):
                following.append(rank._replace(at=FOLD))
        if copied < folded and min(one.shared for one in state) >= self._word(rank, copied):
            following.append(rank._replace(at=COPY))
        last = self._word(rank, self.windows - 1)
        are_done = self.has_buffers or not self.waits_for_readers or min(one.read for one in state) >= last
        if copied == self.windows and are_done:
            is_last = rank.use == self.uses
            following.append(rank._replace(at=END if is_last else FILL, use=rank.use + (not is_last)))
        return following

    def _reads(self, state: State, me: int) -> Rank:
        """Of one rank, and what is done with it."""
        rank, other = state[me], state[state[me].seen]
        if rank.at == FOLD:
            is_torn = rank.is_torn or other.given[rank.folded * self.size + me] != rank.use
            return rank._replace(is_torn=is_torn, **self._after(rank, MADE))
        cell, word = rank.copied * self.size + rank.seen, self._word(rank, rank.copied)
        found = other.buffers[word & 1] if self.has_buffers else self._made(other)[cell]
        is_torn = rank.is_torn or found != RESULT + (word if self.has_buffers else rank.use)
        if rank.seen != me or self.has_buffers:
            rank = self._kept(rank, cell, RESULT + rank.use)
        return rank._replace(is_torn=is_torn, **self._after(rank, COPIED))

    def _after(self, rank: Rank, then: int) -> dict[str, int]:
        return {"seen": rank.seen + 1} if rank.seen + 1 < self.size else {"seen": 0, "at": then}

    def _makes(self, rank: Rank, me: int) -> Rank:
        """Its part, first half and then as a whole, unless what it has read was taken away meanwhile."""
        word, is_half = self._word(rank, rank.folded), rank.at == MADE
        if self.has_buffers:
            value = HALF_WRITTEN if is_half else RESULT + word
            made = rank._replace(buffers=_set(rank.buffers, word & 1, value))
        else:
            made = self._kept(rank, rank.folded * self.size + me, HALF_WRITTEN if is_half else RESULT + rank.use)
        return made._replace(at=rank.at + 1)

    def _kept(self, rank: Rank, cell: int, value: int) -> Rank:
        if self.is_over:
            return rank._replace(given=_set(rank.given, cell, value))
        return rank._replace(result=_set(rank.result, cell, value))

    def _made(self, rank: Rank) -> Cells:
        return rank.given if self.is_over else rank.result

    @staticmethod
    def _check(state: State, rank: Rank) -> None:
        if rank.is_torn:
            raise TornError(f"{rank} goes on with what is not of its use: {state}")

    def search(self) -> int:
        """Look at all states; how many there are. At the end no rank waits, unless for one that has failed."""

        def ends(state: State) -> bool:
            return all(one.at == END for one in state) or any(one.at == GONE for one in state)

        return search((Rank(),) * self.size, self._following, ends)

    def _following(self, state: State) -> Iterator[State]:
        for me, rank in enumerate(state):
            for moved in self._next(state, me):
                if moved.at == TELL and rank.at == KEPT:
                    word = self._word(rank, rank.folded)
                    if self.looks_again and min(one.posted for one in state) < word:
                        moved = rank._replace(at=LOOK, is_torn=False)
                    else:
                        self._check(state, rank)
                yield (*state[:me], moved, *state[me + 1 :])
            failed = sum(one.at in (WITHDRAW, SCRIBBLE, GONE) for one in state)
            if POST < rank.at < WITHDRAW and failed < self.failures:
                yield (*state[:me], rank._replace(at=WITHDRAW), *state[me + 1 :])
            if rank.at == GONE and rank.given and rank.given[0] != SCRIBBLED:
                count = self.windows * self.size
                result = () if self.is_over else (SCRIBBLED,) * count
                gone = rank._replace(given=(SCRIBBLED,) * count, result=result)
                yield (*state[:me], gone, *state[me + 1 :])


def _set(cells: Cells, place: int, value: int) -> Cells:
    return (*cells[:place], value, *cells[place + 1 :])


@pytest.mark.parametrize("kind", ["in place", "over what is given", "in buffers"])
@pytest.mark.parametrize(
    ("size", "uses", "windows", "failures"), [(2, 2, 2, 1), (2, 3, 2, 0), (2, 2, 3, 0), (3, 2, 1, 1), (3, 1, 2, 0)]
)
def test_no_torn_read(size: int, uses: int, windows: int, failures: int, kind: str) -> None:
    model = Model(
        size, uses, windows, is_over=kind == "over what is given", has_buffers=kind == "in buffers", failures=failures
    )
    assert model.search() > 100


def test_results_that_are_not_waited_for_by_their_readers_would_tear() -> None:
    with pytest.raises(TornError):
        Model(2, 2, 1, waits_for_readers=False).search()


@pytest.mark.parametrize("has_buffers", [False, True])
def test_model_without_second_check_reads_withdrawn_array(has_buffers: bool) -> None:
    with pytest.raises(TornError):
        Model(2, 1, 1, failures=1, looks_again=False, has_buffers=has_buffers).search()


def test_parts_that_are_made_too_early_would_tear() -> None:
    with pytest.raises(TornError):
        Model(2, 1, 4, has_buffers=True, ahead=3).search()
