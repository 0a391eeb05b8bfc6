"""Slots that outlive an epoch under random interleavings of loads and stores: no rank reads bytes of another epoch.

Some ranks of a slot in windows are given up at any step of it: they stop, or live and go on as slowly as chance has it.
The others clear their words, meet, and use the slot in the next epoch. A rank that completes a use has its result.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.transports.shm import parted, slots
from kfcomm.transports.shm.slots import Cut, SlotSpec, word_of
from tests.transports.shm.test_interleavings import COUNT, SEEDS, USES, Rank, Turns, ranks_of


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "WINDOW_NBYTES", 48)
    monkeypatch.setattr(slots, "MIN_PIECE_NBYTES", 0)


class SlowFrom(Turns):
    """Turns in which a rank is slow from a step on: the others are in the next epoch before it makes another."""

    def __init__(self, seed: int, rank: int, at_step: int) -> None:
        super().__init__(seed, 3)
        self._slow, self._at_step = rank, at_step

    def step(self) -> None:
        if self.steps[self._slow] == self._at_step:
            self.weights = [1 if rank == self._slow else 200 for rank in range(3)]
        super().step()


class Agreement:
    """Ranks that change to the next epoch, and their part of it: they meet when all survivors have come."""

    def __init__(self, ranks: list[Rank], given_up: set[int]) -> None:
        self.survivors = [one.rank for one in ranks if one.rank not in given_up]
        self.came: set[int] = set()

    def enter(self, one: Rank, combine: Any) -> Rank:
        slot, memory = one.slot, one.slot.memory
        slot.is_dead = True
        for kind in slots._KINDS:
            slot._words[kind + slot.number] = 0
        self.came.add(one.rank)
        while len(self.came) < len(self.survivors):
            one.turns.step()
        ranks = {rank: place for place, rank in enumerate(self.survivors)}
        size, rank = len(ranks), ranks[one.rank]
        made = memory.for_next(ranks, one.heaps)
        cut = Cut(COUNT, 8, size, is_turned=True, max_nbytes=slot.nbytes)
        spec = SlotSpec(memory.number_for_next() or 0, slot.at, range(size), rank, 0, np.dtype(np.int64), cut, combine)
        return Rank(rank, size, made.slot(spec), one.heaps, one.turns)


def use(one: Rank, number: int, *, until: Any = None) -> bool:
    """One use, whose result is checked; False if it was left since ``until`` said so."""
    one.x[:] = np.arange(COUNT) * one.size + 100 * number + one.rank
    word = word_of(number * one.slot.num_words, 0)
    one.slot.post(one.x, word)
    while not one.slot.look(word, one.out):
        if until is not None and until():
            one.slot.forget()
            return False
        one.turns.step()
    one.check(one.out, number)
    one.num_complete += 1
    one.scribble()
    return True


def explored(seed: int) -> tuple[list[int], list[int]]:
    """Uses completed by each rank in the former epoch, and by the surviving ones in the next, under a schedule."""
    random = Random(seed)
    given_up, at_step = random.randrange(3), random.randrange(1, 100)
    turns = SlowFrom(seed, given_up, at_step)
    followers: list[Rank] = []
    with ranks_of(3, Cut(COUNT, 8, 3, is_turned=True), turns) as ranks:
        agreement = Agreement(ranks, {given_up})
        combine = ranks[0].slot.combine

        def is_lost() -> bool:
            return turns.steps[given_up] >= at_step or given_up not in turns.running

        def main(one: Rank) -> None:
            for number in range(USES):
                if one.rank != given_up and is_lost():
                    break
                if not use(one, number, until=is_over if one.rank == given_up else is_lost):
                    break
            one.scribble()
            if one.rank == given_up:
                return
            made = agreement.enter(one, combine)
            followers.append(made)
            for number in range(USES):
                use(made, number)

        def is_over() -> bool:
            return len(followers) == 2 and all(one.num_complete == USES for one in followers)

        turns.run([lambda one=one: main(one) for one in ranks])
        found = [one.num_complete for one in ranks], [one.num_complete for one in followers]
        followers.clear()
        return found


@pytest.mark.quick
def test_no_rank_reads_what_is_of_another_epoch() -> None:
    for seed in range(6 * SEEDS):
        assert explored(seed)[1] == [USES, USES], seed


def test_the_search_finds_a_rank_that_does_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parted.PartedSlot, "_is_still_there", lambda *_: True)
    found = []
    for seed in range(20 * SEEDS):
        try:
            explored(seed)
        except AssertionError as error:
            found.append(str(error))
    assert any("expected" in one for one in found)
