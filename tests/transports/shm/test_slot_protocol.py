"""The protocol of slots, stepped through every interleaving: who reads a buffer reads what belongs to that use.

A model of three ranks; the first has handed out the slot. One atomic step at a time: a buffer is written and
read in halves, words are stored and loaded one by one. At every step of a wait a rank may fail (a cancel, a timeout, an
abort that comes), and before every use it may go the ordinary way, without the slot: up to the first rank and down from
it. That one takes the slot back when it goes the ordinary way itself. Whatever is sent arrives at any time after that.
All states that can be reached are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.transports.shm.interleavings import TornError, search

BEGIN, HALF, SHOWN, LOOK, READ, ORDINARY, FAILED, DEAD, OVER = range(9)
"""Where a rank is in its use: before it, the first half of its buffer written, both, its word stored, reading, waiting
for messages, failed; a rank that is dead takes no part any more; all uses are behind it."""


class Rank(NamedTuple):
    """One rank.

    Attributes:
        use: from 1; its buffer is that of the use's parity.
        at: where it is in it.
        seen: words or halves of buffers that it has looked at.
        has_left: it uses the slot no more.
        word: its word in memory.
        buffers: of even and odd uses, two halves each: the use that they hold.
        sent: for which uses it has sent a message, as bits: what it gives, or of the first rank that there is no slot.
        results: for which uses it has sent results; of the first rank.
        got: of each other rank, the uses whose message has arrived.
        done: the uses whose result has arrived.
        ends: of each use that is behind it: complete, or failed.
    """

    use: int = 1
    at: int = BEGIN
    seen: int = 0
    has_left: bool = False
    word: int = 0
    buffers: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    sent: int = 0
    results: int = 0
    got: tuple[int, ...] = ()
    done: int = 0
    ends: tuple[bool, ...] = ()


State = tuple[Rank, ...]


class Model:
    """All ranks, and what each may do next.

    Args:
        size: number of ranks.
        uses: of the slot by each.
        failures: how many uses may fail, or go the ordinary way, of all ranks together.
        is_reused: a broken protocol, in which a rank uses the slot again after it has failed.
        is_kept: a broken protocol, in which the first rank does not take the slot back.
    """

    def __init__(self, size: int, uses: int, failures: int, *, is_reused: bool = False, is_kept: bool = False) -> None:
        self.size = size
        self.uses = uses
        self.failures = failures
        self.is_reused = is_reused
        self.is_kept = is_kept

    def start(self) -> tuple[State, int]:
        return (Rank(got=(0,) * self.size),) * self.size, self.failures

    def next(self, state: State, failures: int) -> Iterator[tuple[State, int]]:
        for number, rank in enumerate(state):
            for other in self._steps(state, number, rank):
                yield _with(state, number, other), failures
            for source, sender in enumerate(state):
                if (source == 0) == (number == 0) or rank.at in (HALF, SHOWN, READ, DEAD):  # a rank does one at a time
                    continue
                missing, results = sender.sent & ~rank.got[source], sender.results & ~rank.done
                if missing and (number == 0 or not self.is_kept):
                    yield _with(state, number, self._arrives(rank, source, missing & -missing)), failures
                if results:
                    yield _with(state, number, rank._replace(done=rank.done | (results & -results))), failures
            if failures:
                for other in self._mishaps(rank):
                    yield _with(state, number, other), failures - 1
            aborted = any(not end for other in state for end in other.ends[rank.use - 1 : rank.use])
            if aborted and rank.at in (LOOK, ORDINARY):
                yield _with(state, number, self._ended(rank, is_complete=False)), failures

    def _steps(self, state: State, number: int, rank: Rank) -> Iterator[Rank]:
        parity = rank.use & 1
        if rank.at == BEGIN:
            if rank.has_left or any(got >> rank.use & 1 for got in rank.got):  # an early message says: not by the slot
                yield rank._replace(at=ORDINARY, has_left=True, sent=rank.sent | 1 << rank.use)
            else:
                halves = rank.use, rank.buffers[parity][1]
                yield rank._replace(at=HALF, buffers=_written(rank.buffers, parity, halves))
        elif rank.at == HALF:
            yield rank._replace(at=SHOWN, buffers=_written(rank.buffers, parity, (rank.use, rank.use)))
        elif rank.at == SHOWN:
            yield rank._replace(at=LOOK, seen=0, word=rank.use)
        elif rank.at == LOOK:
            if state[rank.seen].word >= rank.use:
                done = rank.seen + 1 == self.size
                yield rank._replace(at=READ if done else LOOK, seen=0 if done else rank.seen + 1)
        elif rank.at == READ:
            source, half = divmod(rank.seen, 2)
            if state[source].buffers[parity][half] != rank.use:
                raise TornError(f"rank {number} reads use {rank.use} of rank {source}: {state}")
            if rank.seen + 1 < 2 * self.size:
                yield rank._replace(seen=rank.seen + 1)
            else:
                yield self._ended(rank, is_complete=True)
        elif rank.at == ORDINARY and number and rank.done >> rank.use & 1:
            yield self._ended(rank, is_complete=True)
        elif rank.at == ORDINARY and not number and all(got >> rank.use & 1 for got in rank.got[1:]):
            yield self._ended(rank._replace(results=rank.results | 1 << rank.use), is_complete=True)

    def _arrives(self, rank: Rank, source: int, bit: int) -> Rank:
        got = tuple(one | bit if place == source else one for place, one in enumerate(rank.got))
        rank = rank._replace(got=got)
        if bit == 1 << rank.use and rank.at == LOOK:
            return rank._replace(at=ORDINARY, has_left=True, sent=rank.sent | bit)
        return rank

    def _mishaps(self, rank: Rank) -> Iterator[Rank]:
        if rank.at in (LOOK, ORDINARY):
            yield self._ended(rank, is_complete=False)
        if rank.at == BEGIN and not rank.has_left:
            yield rank._replace(has_left=True)
        if rank.at not in (DEAD, OVER):
            yield rank._replace(at=DEAD)

    def _ended(self, rank: Rank, *, is_complete: bool) -> Rank:
        is_last = rank.use == self.uses
        has_left = rank.has_left or not (is_complete or self.is_reused)
        return rank._replace(
            use=rank.use + 1, at=OVER if is_last else BEGIN, seen=0, has_left=has_left, ends=(*rank.ends, is_complete)
        )

    def search(self) -> int:
        """Look at all states; how many there are. At the end no rank waits, unless for one that has died or failed."""

        def ends(at: tuple[State, int]) -> bool:
            return any(rank.at == DEAD for rank in at[0]) or all(rank.at == OVER for rank in at[0])

        return search(self.start(), lambda at: self.next(*at), ends)


def _with(state: State, number: int, rank: Rank) -> State:
    return (*state[:number], rank, *state[number + 1 :])


Buffers = tuple[tuple[int, int], tuple[int, int]]


def _written(buffers: Buffers, parity: int, halves: tuple[int, int]) -> Buffers:
    return (buffers[0], halves) if parity else (halves, buffers[1])


@pytest.mark.parametrize(("size", "uses", "failures"), [(2, 4, 0), (2, 4, 2), (3, 3, 0), (3, 3, 1), (3, 2, 2)])
def test_no_buffer_is_read_torn_and_nobody_waits_for_ever(size: int, uses: int, failures: int) -> None:
    assert Model(size, uses, failures).search() > 100


def test_a_slot_that_is_used_again_after_a_failure_would_tear() -> None:
    """The search finds what the rule is for."""
    with pytest.raises(TornError):
        Model(3, 3, 1, is_reused=True).search()


def test_a_slot_that_is_not_taken_back_would_let_ranks_wait_for_ever() -> None:
    with pytest.raises(AssertionError, match="wait for ever"):
        Model(3, 2, 1, is_kept=True).search()


SHOW, SHOWN_CELL, POST, WAIT_POSTED, FOLD, SHARE, SHARED_CELL, TELL, WAIT_SHARED, COPY, END, GONE = range(12)
"""Where a rank is in a use of several windows: what it gives is half written, written, its word stored; it waits for
the words of all, reads what they gave, writes its part, tells of that, waits for the parts of all, and reads them."""
HALF_WRITTEN = -1


class Windowed(NamedTuple):
    """One rank whose messages go in windows.

    Attributes:
        window: from 1, of all uses; its buffers are those of the window's parity.
        shows: the window that it writes or has written last.
        at: where it is.
        seen: ranks that it has looked at.
        posted, shared: its words.
        given, parts: what its buffers of even and of odd windows hold.
    """

    window: int = 1
    shows: int = 0
    at: int = SHOW
    seen: int = 0
    posted: int = 0
    shared: int = 0
    given: tuple[int, int] = (0, 0)
    parts: tuple[int, int] = (0, 0)


Windows = tuple[Windowed, ...]


class WindowModel:
    """All ranks; each does what `PartedSlot` does, one store or load at a time.

    Args:
        size: number of ranks.
        uses: of the slot.
        windows: of each use.
        ahead: windows that are shown before the first of them is waited for: with more than 2 the protocol is broken.
        has_two_parts: with one buffer for both parities, of the part of the result, it is broken.
        gone: how many ranks may stop at any step, and never come back.
    """

    def __init__(
        self, size: int, uses: int, windows: int, *, ahead: int = 2, has_two_parts: bool = True, gone: int = 0
    ) -> None:
        self.size, self.uses, self.windows = size, uses, windows
        self.ahead = ahead
        self.has_two_parts = has_two_parts
        self.gone = gone

    def _step(self, state: tuple[Windowed, ...], number: int, rank: Windowed) -> Windowed | None:  # noqa: C901
        parity, part = rank.window & 1, rank.window & 1 if self.has_two_parts else 0
        last = -(-rank.window // self.windows) * self.windows  # of this use
        match rank.at:
            case 0:  # SHOW
                given = _set(rank.given, (rank.shows + 1) & 1, HALF_WRITTEN)
                return rank._replace(at=SHOWN_CELL, shows=rank.shows + 1, given=given)
            case 1:
                return rank._replace(at=POST, given=_set(rank.given, rank.shows & 1, rank.shows))
            case 2:
                more = rank.shows < min(last, rank.window + self.ahead - 1)
                return rank._replace(at=SHOW if more else WAIT_POSTED, posted=rank.shows)
            case 3 | 8:
                other = state[rank.seen]
                if (other.posted if rank.at == WAIT_POSTED else other.shared) < rank.window:
                    return None
                if rank.seen + 1 < self.size:
                    return rank._replace(seen=rank.seen + 1)
                return rank._replace(seen=0, at=rank.at + 1)
            case 4 | 9:
                other = state[rank.seen]
                found = other.given[parity] if rank.at == FOLD else other.parts[part]
                if found != rank.window:
                    raise TornError(f"rank {number} reads {found} of rank {rank.seen} for {rank.window}: {state}")
                if rank.seen + 1 < self.size:
                    return rank._replace(seen=rank.seen + 1)
                return rank._replace(seen=0, at=SHARE) if rank.at == FOLD else self._next(rank, last)
            case 5:
                return rank._replace(at=SHARED_CELL, parts=_set(rank.parts, part, HALF_WRITTEN))
            case 6:
                return rank._replace(at=TELL, parts=_set(rank.parts, part, rank.window))
            case 7:
                return rank._replace(at=WAIT_SHARED, shared=rank.window)
        return None

    def _next(self, rank: Windowed, last: int) -> Windowed:
        window = rank.window + 1
        if window > self.uses * self.windows:
            return rank._replace(at=END, window=window)
        last = last if window <= last else last + self.windows
        return rank._replace(window=window, seen=0, at=SHOW if rank.shows < min(last, window + 1) else WAIT_POSTED)

    def search(self) -> int:
        """Look at all states; how many there are. At the end no rank waits, unless for one that has gone."""

        def ends(state: Windows) -> bool:
            return all(one.at == END for one in state) or any(one.at == GONE for one in state)

        return search((Windowed(),) * self.size, self._following, ends)

    def _following(self, state: Windows) -> Iterator[Windows]:
        for number, rank in enumerate(state):
            moved = self._step(state, number, rank)
            if moved is not None:
                yield (*state[:number], moved, *state[number + 1 :])
            if rank.at not in (END, GONE) and sum(one.at == GONE for one in state) < self.gone:
                yield (*state[:number], rank._replace(at=GONE), *state[number + 1 :])


def _set(cells: tuple[int, int], place: int, value: int) -> tuple[int, int]:
    return (cells[0], value) if place else (value, cells[1])


@pytest.mark.parametrize(
    ("size", "uses", "windows", "gone"),
    [(2, 2, 3, 1), (2, 3, 2, 0), (2, 1, 5, 1), (3, 1, 4, 1), (3, 2, 2, 0), (3, 3, 1, 1)],
)
def test_no_window_is_read_torn(size: int, uses: int, windows: int, gone: int) -> None:
    assert WindowModel(size, uses, windows, gone=gone).search() > 100


def test_windows_that_are_shown_too_early_would_tear() -> None:
    with pytest.raises(TornError):
        WindowModel(2, 1, 4, ahead=3).search()


def test_one_buffer_for_the_parts_of_all_windows_would_tear() -> None:
    with pytest.raises(TornError):
        WindowModel(2, 1, 4, has_two_parts=False).search()
