"""One collective: a machine that folds what arrives, forwards it, and knows when it is complete.

The life of one chunk, on one rank (``P`` partial results folded so far out of ``C`` children)::

    state         event                    next          effects
    ------------  -----------------------  ------------  ------------------------------------------
    folding P<C   child P arrives          folding P+1   FOLD (and again for children held back)
    folding P<C   a later child arrives    folding P     HOLD
    folding C-1   the last arrives         waiting       FOLD_UP, SEND up
    folding C-1   the last arrives, root   complete      FOLD_LAST, SEND down to every target
    folding 0=C   (at once) not the root   waiting       SEND up
    folding 0=C   (at once) the root       complete      FINISH, SEND down to every target
    waiting       the result arrives       complete      STORE if kept, SEND down to every target
    any           anything else            the machine refuses it: the other side broke the protocol

A lane without an up phase begins in *waiting*, or, where its data enters, at *complete*. The machine is
complete when all its chunks are and when nothing that it sent is still being read from its memory.

It owns no memory and knows no clock, socket or array: it takes events and decides what follows. What follows goes
through a few methods (``_send``, ``_fold``, ...). Here they append *effects* to the caller's list, for the caller to
carry out in order: tuples that begin with their tag. The runtime's operations override these methods and do at once
what they say, which costs a third; the decisions are the same code.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from enum import IntEnum
from typing import Any

from kfcomm.core.program import NOBODY, Lane, Program


class Phase(IntEnum):
    """Which way a chunk travels."""

    UP = 0
    DOWN = 1


class Source(IntEnum):
    """Which memory of the collective an effect reads."""

    INPUT = 0
    PARTIAL = 1
    RESULT = 2
    PAYLOAD = 3


class Do(IntEnum):
    """Tags of a machine's effects; the fields after the tag are in brackets."""

    SEND = 0
    """[machine, destinations, lane, index, phase, source, payload]: payload is None unless source is PAYLOAD."""
    FOLD = 1
    """[machine, lane, index, payload, first]: partial = (input if first else partial) ∘ payload; then release it."""
    HOLD = 2
    """[machine, payload]: keep this payload until a FOLD or RELEASE names it."""
    FINISH = 3
    """[machine, lane, index]: result = the finished input: there is nothing to fold it with."""
    STORE = 4
    """[machine, lane, index, payload]: result = payload; then release it."""
    COPY = 5
    """[machine, lane, index]: result = input."""
    RELEASE = 6
    """[machine, payload]: nothing reads this payload any more; only of those that are neither folded nor stored."""
    DONE = 7
    """[machine]: the result is complete, and no memory of the caller is in use."""
    FOLD_LAST = 8
    """[machine, lane, index, payload, first]: as FOLD, but result = finished(...): it was the last."""
    FOLD_UP = 9
    """[machine, lane, index, payload, first]: as FOLD; it was the last, and SEND of the partial result comes next."""


UP, DOWN = int(Phase.UP), int(Phase.DOWN)
INPUT, PARTIAL, RESULT, PAYLOAD = (int(source) for source in Source)
SEND, FOLD, HOLD, FINISH, STORE, COPY, RELEASE, DONE, FOLD_LAST, FOLD_UP = (int(do) for do in Do)

Effect = tuple[Any, ...]
Effects = list[Effect]


class Machine:
    """The state of one collective on one rank.

    Attributes:
        program: what this rank does.
        remaining: chunks that are not complete.
        sends: payloads handed out by SEND of which ``was_read`` has not told.
        finished: DONE was emitted.
    """

    __slots__ = ("_folded", "_gate", "_held", "finished", "program", "remaining", "sends")

    _folded: MutableSequence[int]
    _held: dict[tuple[int, int], Any] | None

    def __init__(self, program: Program) -> None:
        """Nothing has happened yet."""
        self.program = program
        self.remaining = program.num_slots
        self.sends = 0
        self.finished = False
        self._gate = program.gate
        # Children folded per chunk; one more than there are children once the result is here.
        # Bytes where they suffice: unlike a list they are nothing that the garbage collector has to look at.
        num_slots = program.num_slots
        self._folded = bytearray(num_slots) if program.small_counts else [0] * num_slots
        self._held = None

    def start(self, effects: Effects) -> None:
        """Do all that needs nobody else."""
        for lane in self.program.first:
            if lane.up:
                for index in range(lane.num_chunks):
                    self._reduced(lane, index, INPUT, effects)
            else:
                self._begin(lane, effects)
        if not self.remaining:
            self._check(effects)

    def accepts(self, lane: Lane, index: int, phase: int, sender: int) -> int:
        """The position of ``sender`` among the lane's children (0 for the down phase) if this chunk may come now.

        ``NOBODY`` if it may not: a wrong phase, a sender who is not on this lane, a chunk that was here before.
        """
        if not 0 <= index < lane.num_chunks:
            return NOBODY
        slot = lane.base + index
        folded = self._folded[slot]
        children = lane.children
        if phase == UP:
            if sender not in children:
                return NOBODY
            position = children.index(sender)
            return NOBODY if position < folded or (self._held and (slot, position) in self._held) else position
        if phase != DOWN or not lane.down or sender != lane.source:
            return NOBODY
        return 0 if folded == len(children) else NOBODY

    def awaits(self, sender: int) -> bool:
        """Whether a chunk of this rank is still to come. O(chunks)."""
        for lane in self.program.lanes.values():
            for index in range(lane.num_chunks):
                if sender == lane.source and self._folded[lane.base + index] <= len(lane.children):
                    return True
                if self.accepts(lane, index, UP, sender) != NOBODY:
                    return True
        return False

    def arrived(self, lane: Lane, index: int, phase: int, position: int, payload: Any, effects: Effects) -> None:
        """A chunk is here; ``position`` is what ``accepts`` said of it.

        Of a chunk that was accepted twice, because it came on two links at a time, only the first to be complete
        counts.
        """
        if phase == UP:
            self._arrived_up(lane, index, position, payload, effects)
        else:
            self._arrived_down(lane, index, payload, effects)
        if not self.remaining:
            self._check(effects)

    def done_elsewhere(self, effects: Effects) -> None:
        """What a program without lanes stands for has been carried out."""
        self.remaining -= 1
        self._check(effects)

    def take_held(self) -> list[Any]:
        """Give up the payloads that are held: the machine will not run any more."""
        held = list(self._held.values()) if self._held else []
        self._held = None
        return held

    def was_read(self, effects: Effects, times: int = 1) -> None:
        """Payloads that SEND handed out, one for each destination, are no longer read."""
        self.sends -= times
        if not (self.remaining or self.sends):
            self._check(effects)

    def _arrived_up(self, lane: Lane, index: int, position: int, payload: Any, effects: Effects) -> None:
        slot = lane.base + index
        folded = self._folded[slot]
        if position != folded:
            if self._held is None:
                self._held = {}
            if position < folded or (slot, position) in self._held:
                self._release(payload, effects)
                return
            self._held[slot, position] = payload
            self._hold(payload, effects)
            return
        held = self._held
        while True:
            if lane.count:
                is_last = folded + 1 == len(lane.children)
                tag = FOLD if not is_last else FOLD_LAST if lane.parent == NOBODY else FOLD_UP
                self._fold(tag, lane, index, payload, folded == 0, effects)
            else:
                self._release(payload, effects)
            folded += 1
            if not held or (slot, folded) not in held:
                break
            payload = held.pop((slot, folded))
        self._folded[slot] = folded
        if folded == len(lane.children):
            self._reduced(lane, index, PARTIAL, effects)

    def _reduced(self, lane: Lane, index: int, source: int, effects: Effects) -> None:
        """Every contribution of this rank's subtree is in ``source``."""
        if lane.parent != NOBODY:
            self._send((lane.parent,), lane, index, UP, source, None, effects)
            if not lane.down:
                self._completed(lane, effects)
            return
        if lane.count and source == INPUT:
            self._finish(lane, index, effects)
        self._folded[lane.base + index] += 1
        if lane.targets:
            self._send(lane.targets, lane, index, DOWN, RESULT, None, effects)
        self._completed(lane, effects)

    def _begin(self, lane: Lane, effects: Effects) -> None:
        for index in range(lane.num_chunks):
            if lane.keeps:
                self._copy(lane, index, effects)
            self._folded[lane.base + index] += 1
            if lane.targets:
                self._send(lane.targets, lane, index, DOWN, INPUT, None, effects)
            self._completed(lane, effects)

    def _arrived_down(self, lane: Lane, index: int, payload: Any, effects: Effects) -> None:
        if self._folded[lane.base + index] != len(lane.children):
            self._release(payload, effects)
            return
        self._folded[lane.base + index] += 1
        if lane.keeps:
            self._store(lane, index, payload, effects)
            if lane.targets:
                self._send(lane.targets, lane, index, DOWN, RESULT, None, effects)
        else:
            if lane.targets:
                self._send(lane.targets, lane, index, DOWN, PAYLOAD, payload, effects)
            self._release(payload, effects)
        self._completed(lane, effects)

    def _completed(self, lane: Lane, effects: Effects) -> None:
        self.remaining -= 1
        if self._gate and not lane.gated:
            self._gate -= 1
            if not self._gate:
                for other in self.program.lanes.values():
                    if other.gated:
                        self._begin(other, effects)

    def _check(self, effects: Effects) -> None:
        if not self.remaining and not self.sends and not self.finished:
            self.finished = True
            self._done(effects)

    # What follows from an event.

    def _send(
        self, to: tuple[int, ...], lane: Lane, index: int, phase: int, source: int, payload: Any, effects: Effects
    ) -> None:
        self.sends += len(to)
        effects.append((SEND, self, to, lane, index, phase, source, payload))

    def _fold(self, tag: int, lane: Lane, index: int, payload: Any, first: bool, effects: Effects) -> None:
        effects.append((tag, self, lane, index, payload, first))

    def _hold(self, payload: Any, effects: Effects) -> None:
        effects.append((HOLD, self, payload))

    def _finish(self, lane: Lane, index: int, effects: Effects) -> None:
        effects.append((FINISH, self, lane, index))

    def _store(self, lane: Lane, index: int, payload: Any, effects: Effects) -> None:
        effects.append((STORE, self, lane, index, payload))

    def _copy(self, lane: Lane, index: int, effects: Effects) -> None:
        effects.append((COPY, self, lane, index))

    def _release(self, payload: Any, effects: Effects) -> None:
        effects.append((RELEASE, self, payload))

    def _done(self, effects: Effects) -> None:
        effects.append((DONE, self))
