"""Slots of all kinds under random interleavings of loads and stores: who reads a buffer reads what is of that use.

Each rank is a thread with its own view of the memory, and one of them runs at a time: at each load and store of a word,
and in the middle of each copy and fold, chance says which rank goes on. Programs write over their arrays before and
after each use. A rank may stop at any step and never come back, as after a cancelled call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.core.signature import split
from kfcomm.transports.shm import slots
from kfcomm.transports.shm.heap import Heaps, PeerHeap
from kfcomm.transports.shm.one_way import ScatterSlot
from kfcomm.transports.shm.slots import Cut, SlotMemory, SlotSpec, word_of

SEEDS = 12
USES = 4
COUNT = 10
MAX_STEPS = 50_000
STEPS_AFTER_A_STOP = 2000
"""In which the other ranks complete whatever they can."""


class Stopped(BaseException):
    """This rank goes no further."""


class Turns:
    """Hands the turn from thread to thread. ``stops``: a rank, and the step at which it stops."""

    def __init__(self, seed: int, size: int, stops: tuple[int, int] | None = None) -> None:
        self.random = Random(seed)
        self.weights = [self.random.choice((1, 4, 16)) for _ in range(size)]
        self.stops = stops
        self.steps, self.last_step = [0] * size, MAX_STEPS
        self.now = 0
        self.running: list[int] = []
        self.errors: list[BaseException] = []
        self._mine = [threading.Semaphore(0) for _ in range(size)]

    def run(self, mains: Sequence[Callable[[], object]]) -> None:
        """Run the programs of all ranks; raises what one of them raises."""
        threads = [threading.Thread(target=self._run, args=pair) for pair in enumerate(mains)]
        self.running = list(range(len(mains)))
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        for error in self.errors:
            raise error

    def step(self) -> None:
        """Let chance say which rank goes on."""
        me = self.now
        self.steps[me] += 1
        if self.stops == (me, self.steps[me]):
            self.stops, self.last_step = None, sum(self.steps) + STEPS_AFTER_A_STOP
            raise Stopped
        if self.errors or sum(self.steps) > self.last_step:
            assert self.errors or self.last_step < MAX_STEPS, "the ranks wait for ever"
            raise Stopped
        self._pass_on(me)

    def _pass_on(self, me: int | None = None) -> None:
        weights = [self.weights[rank] for rank in self.running]
        (chosen,) = self.random.choices(self.running, weights)
        self.now = chosen
        if chosen != me:
            self._mine[chosen].release()
            if me is not None:
                self._mine[me].acquire()

    def _run(self, me: int, main: Callable[[], object]) -> None:
        self._mine[me].acquire()
        try:
            main()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  raised where all ranks are run
            self.errors.append(error)
        self.running.remove(me)
        if self.running:
            self._pass_on()


class Halves(np.ndarray[Any, np.dtype[Any]]):
    """An array whose elements are written in two steps."""

    turns: Turns

    def __array_finalize__(self, source: Any) -> None:
        self.turns = getattr(source, "turns", None)  # type: ignore[assignment]

    def __setitem__(self, key: Any, value: Any) -> None:
        there = np.asarray(self)[key]
        given = np.broadcast_to(np.asarray(value), there.shape)
        half = len(there) // 2
        for part in (slice(half), slice(half, None)):
            there[part] = given[part]
            self.turns.step()


def stepped(x: Any, turns: Turns) -> Any:
    made = x.view(Halves)
    made.turns = turns
    return made


def part_of(x: Halves, part: slice) -> Any:
    return stepped(np.asarray(x)[part], x.turns)  # a slice of ``x`` itself would keep it from garbage collection


class Words:
    """The words that a rank stores."""

    def __init__(self, words: memoryview, turns: Turns) -> None:
        self._words, self._turns = words, turns

    def __setitem__(self, index: int, word: int) -> None:
        self._words[index] = word
        if index < slots.RELEASED:  # a finalizer releases results, and an error would end there
            self._turns.step()


class SteppedMemory(SlotMemory):
    """Slots as one rank uses them, a step at each load and store."""

    turns: Turns
    sees: Callable[[list[int]], list[int]] = staticmethod(lambda words: words)

    def words(self, kind: int, number: int, places: tuple[int, ...]) -> Any:
        load = super().words(kind, number, places)

        def words() -> list[int]:
            self.turns.step()
            return self.sees(load())

        return words

    def own_array(self, at: int, dtype: Any, count: int) -> Any:
        return stepped(super().own_array(at, dtype, count), self.turns)

    def slot(self, spec: SlotSpec) -> Any:
        made = super().slot(spec)
        assert made is not None
        made._words = Words(self.own_words, self.turns)  # type: ignore[assignment]
        return made


@contextmanager
def ranks_of(size: int, cut: Cut, turns: Turns) -> Iterator[list[Rank]]:
    """All ranks, each with a slot of its own view of one memory."""
    heaps = [Heaps(rank) for rank in range(size)]
    first = SlotMemory.make(range(size), heaps[0])
    memories = [SteppedMemory(os.dup(first.descriptor), range(size), one) for one in heaps]
    first.close()
    for one in heaps:
        for peer, other in enumerate(heaps):
            if other is not one:
                one.add(peer, PeerHeap(os.dup(other.own().descriptor)))  # type: ignore[union-attr]
    number, at = first.hand_out(cut) or (0, 0)

    def combine(parts: Any, out: Any) -> None:
        half = len(out) // 2
        out[:] = parts[0]
        for part in parts[1:]:
            for some in (slice(half), slice(half, None)):
                np.asarray(out)[some] += part[some]
                turns.step()

    made = []
    for rank, memory in enumerate(memories):
        memory.turns = turns
        spec = SlotSpec(number, at, range(size), rank, 0, np.dtype(np.int64), cut, combine)
        made.append(Rank(rank, size, memory.slot(spec), heaps[rank], turns))
    try:
        yield made
    finally:
        made.clear()
        for one in (*memories, *heaps):
            one.close()


class Rank:
    """The program of one rank: ``USES`` uses of a slot."""

    def __init__(self, rank: int, size: int, slot: Any, heaps: Heaps, turns: Turns) -> None:
        self.rank, self.size, self.slot, self.heaps, self.turns = rank, size, slot, heaps, turns
        self.kind = ""
        self.x = self.out = self.array()
        self.num_complete = 0

    def array(self, count: int = COUNT, *, in_place: bool = False) -> Any:
        if not in_place:
            return stepped(np.zeros(count, np.int64), self.turns)
        block = self.heaps.empty(8 * count)
        assert block is not None
        return stepped(block.view(np.int64), self.turns)

    def main(self) -> None:
        """Use the slot; whatever ends that, write over the arrays."""
        try:
            for use in range(USES):
                self.x[:] = np.arange(COUNT) * self.size + 100 * use + self.rank
                word = word_of(use * self.slot.num_words, 0)
                self.slot.post(self.x, word)
                while not self.slot.look(word, self.out):
                    self.turns.step()
                if self.slot.is_relayed:
                    self.relay(word)
                else:
                    self.check(self.slot.take_outcome(self.out), use)
                self.num_complete += 1
                self.scribble()
        except Stopped:
            self.slot.forget()
            self.turns.stops = None
            self.scribble()
            raise

    def relay(self, word: int) -> None:
        """Show what comes of the contributions, as a hub does."""
        total = np.array(self.x)
        for place in range(1, self.size):
            total += np.frombuffer(self.slot.given(place), np.int64)
            self.turns.step()
        self.slot.show(0, 5, total)
        self.slot.show(5, COUNT, total)
        self.slot.share(word)

    def check(self, result: Any, use: int) -> None:
        if self.kind.startswith("gathered"):
            given = [np.arange(COUNT) * self.size + 100 * use + rank for rank in range(self.size)]
            want = np.concatenate(given)
        else:
            want = np.arange(COUNT) * self.size**2 + 100 * use * self.size + sum(range(self.size))
        if self.kind.startswith("scattered"):
            want = want[self.part]
        assert np.array_equal(result, want), f"rank {self.rank} in use {use}: {result}, expected {want}"

    @property
    def part(self) -> slice:
        """Elements of the sum that this rank gets if it is scattered."""
        at, length = split(COUNT, self.size)[self.rank]
        return slice(at, at + length)

    def scribble(self) -> None:
        for array in (self.x, self.out):
            array[:] = -1


KINDS: dict[str, tuple[dict[str, Any], tuple[bool, bool]]] = {
    "whole": ({"is_whole": True}, (False, False)),
    "one window": ({}, (False, False)),
    "hub": ({"has_hub": True, "is_whole": True}, (False, False)),
    "windows": ({"is_turned": True}, (False, False)),
    "in place": ({"is_turned": True}, (True, True)),
    "from in place": ({"is_turned": True}, (True, False)),
    "into in place": ({"is_turned": True}, (False, True)),
    "over what is given": ({"is_turned": True}, (True, True)),
    "one result": ({"is_turned": True, "is_shared": True}, (False, False)),
    "one result of in place": ({"is_turned": True, "is_shared": True}, (True, False)),
    "scattered": ({"is_turned": True, "is_scattered": True}, (False, False)),
    "scattered in windows": ({"is_turned": True, "is_scattered": True}, (False, False)),
    "scattered over what is given": ({"is_turned": True, "is_scattered": True}, (False, False)),
    "scattered over what is given in windows": ({"is_turned": True, "is_scattered": True}, (False, False)),
    "scattered from in place": ({"is_turned": True, "is_scattered": True}, (True, False)),
    "gathered": ({"is_turned": True, "is_gathered": True}, (False, False)),
    "gathered in windows": ({"is_turned": True, "is_gathered": True}, (False, False)),
    "gathered from in place": ({"is_turned": True, "is_gathered": True}, (True, False)),
    "gathered around what is given": ({"is_turned": True, "is_gathered": True}, (True, True)),
}
"""How messages are cut, and whether contribution and result are in symmetric memory."""


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["kind"].endswith(" in windows"):
        monkeypatch.setattr(ScatterSlot, "_is_ready", lambda _: False)
    monkeypatch.setattr(slots, "SHOWN_WHOLE_NBYTES", 0)
    monkeypatch.setattr(slots, "WINDOW_NBYTES", 24)
    monkeypatch.setattr(slots, "MIN_PIECE_NBYTES", 0)


def explored(kind: str, size: int, seed: int, stops: tuple[int, int] | None = None) -> tuple[list[int], list[int]]:
    """Uses completed and steps made by each rank under the schedule of a seed."""
    options, (given, shown) = KINDS[kind]
    turns = Turns(seed, size, stops)
    if kind.startswith("gathered"):
        options = {**options, "bounds": [(COUNT * rank, COUNT) for rank in range(size)]}
    with ranks_of(size, Cut(COUNT, 8, size, **options), turns) as ranks:
        for rank in ranks:
            rank.kind = kind
            rank.x = rank.array(in_place=given)
            if kind == "over what is given":
                rank.out = rank.x
            elif kind.startswith("gathered"):
                rank.out = rank.array(size * COUNT, in_place=shown)
                if shown:
                    rank.x = part_of(rank.out, slice(COUNT * rank.rank, COUNT * (rank.rank + 1)))
            else:
                rank.out = rank.array(in_place=shown)
                if kind.startswith("scattered"):
                    rank.out = part_of(rank.x if "over" in kind else rank.out, rank.part)
        turns.run([rank.main for rank in ranks])
        return [rank.num_complete for rank in ranks], turns.steps


on_all_kinds = pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.quick) for kind in KINDS])


@on_all_kinds
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_read_what_is_of_their_use(kind: str, size: int) -> None:
    for seed in range(SEEDS):
        assert explored(kind, size, seed)[0] == [USES] * size


@on_all_kinds
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_stops_tears_no_result_of_another(kind: str, size: int) -> None:
    random = Random(f"{kind} {size}")
    _, steps = explored(kind, size, 0)
    for seed in range(2 * SEEDS):
        who = random.randrange(size)
        complete, _ = explored(kind, size, seed, (who, random.randrange(1, steps[who])))
        # A use that has ended on the rank that stops in the next one ends on all.
        assert min(complete) >= complete[who], (seed, who, complete)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("one result")])
def test_the_search_finds_ranks_that_do_not_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SteppedMemory, "sees", staticmethod(lambda words: [max(words)] * len(words)))
    found = []
    for seed in range(SEEDS):
        try:
            explored(kind, 2, seed)
        except AssertionError as error:
            found.append(str(error))  # not the error itself, whose frames hold arrays of a heap
    assert any("expected" in one for one in found)
