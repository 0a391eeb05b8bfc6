"""The protocol of slots, stepped through every interleaving: who reads a buffer reads what belongs to that use.

A model of three ranks, of which the first has handed out the slot. One atomic step at a time: a buffer is written and
read in halves, words are stored and loaded one by one. At every step of a wait a rank may fail (a cancel, a timeout, an
abort that comes), and before every use it may go the ordinary way, without the slot: up to the first rank and down from
it. That one takes the slot back when it goes the ordinary way itself. Whatever is sent arrives at any time after that.
All states that can be reached are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

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


class TornError(AssertionError):
    """A rank has read what belongs to another use."""


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
        """Look at all states; how many there are. At the end nobody waits, unless for one that has died or failed."""
        todo = [self.start()]
        known = set(todo)
        while todo:
            state, failures = todo.pop()
            following = list(self.next(state, failures))
            if not following and not any(rank.at == DEAD for rank in state):
                assert all(rank.at == OVER for rank in state), f"they wait for ever: {state}"
            for one in following:
                if one not in known:
                    known.add(one)
                    todo.append(one)
        return len(known)


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
