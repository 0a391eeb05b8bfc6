"""State machine of one collective on one rank: folds chunks, forwards them, and knows when it is complete.

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
    any           anything else            refused: the other side broke the protocol

A lane without an up phase begins in *waiting*, or, where its data enters, at *complete*. The machine is
complete when all its chunks are and when nothing that it sent is still being read from its memory.

It owns no memory and knows no clock, socket or array: it takes events and decides what follows. Consequences go through
a few methods (``_send``, ``_fold``, ...). Here they append *effects* to the caller's list, for the caller to carry out
in order: tuples that begin with their tag. The operations of the engine override these methods and act at once, at a
third of the cost; the decisions are the same code.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from enum import IntEnum
from typing import Any

from kfcomm.core.program import ABSENT, Lane, Program, Route


class Phase(IntEnum):
    """Direction of a chunk in the graph."""

    UP = 0
    DOWN = 1


class Source(IntEnum):
    """Memory of the collective that an effect reads."""

    INPUT = 0
    PARTIAL = 1
    RESULT = 2
    PAYLOAD = 3


class Do(IntEnum):
    """Tags of a machine's effects; the fields after the tag are in brackets."""

    SEND = 0
    """[machine, destinations, lane, index, phase, source, payload]: a payload only if source is PAYLOAD."""
    FOLD = 1
    """[machine, lane, index, payload, first]: partial = (input if first else partial) ∘ payload; then release it."""
    HOLD = 2
    """[machine, payload]: keep this payload until a FOLD or RELEASE names it."""
    FINISH = 3
    """[machine, lane, index]: result = the finished input: there are no other contributions."""
    STORE = 4
    """[machine, lane, index, payload]: result = payload; then release it."""
    COPY = 5
    """[machine, lane, index]: result = input."""
    RELEASE = 6
    """[machine, payload]: release a payload that is neither folded nor stored."""
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
        sends: payloads handed out by SEND and not yet reported by ``was_read``.
        finished: DONE was emitted.
    """

    # Class attributes: most machines never change them, and pay neither time nor memory for them.
    sends = _gate = 0
    finished = False
    _held: dict[tuple[int, int], Any] | None = None

    def __init__(self, program: Program) -> None:
        """Begin with no chunk complete."""
        self.program = program
        self.remaining = num_slots = program.num_slots
        if program.gate:
            self._gate = program.gate
        # Children folded per chunk; one more than there are children once the result is here.
        # A bytearray where it suffices: the garbage collector need not visit it, as it must a list.
        self._folded: MutableSequence[int] = bytearray(num_slots) if program.small_counts else [0] * num_slots

    def start(self, effects: Effects) -> None:
        """Do everything that needs no other rank."""
        for lane in self.program.first:
            if lane.up:
                for index in range(lane.num_chunks):
                    self._reduced(lane, index, INPUT, effects)
            else:
                self._begin(lane, effects)
        if not (self.remaining or self.sends):
            self._end(effects)

    def accepts(self, route: Route, index: int) -> bool:
        """Return whether this chunk is valid now: its number exists, and it has not arrived before."""
        lane = route.lane
        if not 0 <= index < lane.num_chunks:
            return False
        slot = lane.base + index
        if route.phase == DOWN:
            return self._folded[slot] == route.position
        return self._folded[slot] <= route.position and not (self._held and (slot, route.position) in self._held)

    def awaits(self, sender: int) -> bool:
        """Return whether a chunk of this sender is still to come. O(chunks)."""
        for (_, _, other), route in self.program.routes.items():
            if other == sender:
                lane = route.lane
                for index in range(lane.num_chunks):
                    if route.phase == DOWN and self._folded[lane.base + index] <= len(lane.children):
                        return True
                    if self.accepts(route, index):
                        return True
        return False

    def take(self, route: Route, index: int, payload: Any, effects: Effects) -> bool:
        """Take a chunk of this lane; False, with no effect, if it has arrived before."""
        lane, position = route.lane, route.position
        slot = lane.base + index
        folded = self._folded
        if folded[slot] != position or self._held:
            return self._take_in_turn(route, index, payload, effects)
        folded[slot] = position + 1
        if route.phase:
            if lane.keeps:
                self._store(lane, index, payload, effects)
                if lane.targets:
                    self._send(lane.targets, lane, index, DOWN, RESULT, None, effects)
            else:
                if lane.targets:
                    self._send(lane.targets, lane, index, DOWN, PAYLOAD, payload, effects)
                self._release(payload, effects)
            self.remaining -= 1
            if self._gate:
                self._passed(effects)
        else:
            if not lane.count:
                self._release(payload, effects)
            elif not route.is_last:
                self._fold(FOLD, lane, index, payload, not position, effects)
            else:
                self._fold(FOLD_LAST if lane.parent == ABSENT else FOLD_UP, lane, index, payload, not position, effects)
            if route.is_last:
                self._reduced(lane, index, PARTIAL, effects)
        if not (self.remaining or self.sends):
            self._end(effects)
        return True

    def _take_in_turn(self, route: Route, index: int, payload: Any, effects: Effects) -> bool:
        """Take a chunk that is out of turn, or that others wait for: children are folded in their order."""
        lane, position = route.lane, route.position
        slot = lane.base + index
        folded = self._folded[slot]
        if folded != position:
            if route.phase or position < folded or (self._held and (slot, position) in self._held):
                return False
            if self._held is None:
                self._held = {}
            self._held[slot, position] = self._hold(payload, effects)
            return True
        # Without ``_held``, ``take`` folds directly instead of coming back here.
        held, self._held = self._held or {}, None
        try:
            self.take(route, index, payload, effects)
            position += 1
            while (slot, position) in held and not route.phase:
                following = self.program.routes[lane.number, UP, lane.children[position]]
                self.take(following, index, held.pop((slot, position)), effects)
                position += 1
        finally:
            self._held = held or None
        return True

    def arrived(self, route: Route, index: int, payload: Any, effects: Effects) -> None:
        """Take a chunk that ``accepts`` has admitted.

        A chunk may be admitted twice, on two links at a time: the first to be complete counts.
        """
        if not self.take(route, index, payload, effects):
            self._release(payload, effects)

    def done_elsewhere(self, effects: Effects) -> None:
        """Complete a program without lanes, which is carried out outside the core."""
        self.remaining -= 1
        self._end(effects)

    def take_held(self) -> list[Any]:
        """Return the payloads that are held, to be dropped: the machine will not run any more."""
        held = list(self._held.values()) if self._held else []
        self._held = None
        return held

    def was_read(self, effects: Effects, times: int = 1) -> None:
        """Record that payloads that SEND handed out, one for each destination, are no longer read."""
        self.sends -= times
        if not (self.remaining or self.sends):
            self._end(effects)

    def _reduced(self, lane: Lane, index: int, source: int, effects: Effects) -> None:
        """Pass on ``source``, which holds every contribution of this rank's subtree."""
        if lane.parent != ABSENT:
            self._send((lane.parent,), lane, index, UP, source, None, effects)
            if not lane.down:
                self._completed(effects)
            return
        if lane.count and source == INPUT:
            self._finish(lane, index, effects)
        self._folded[lane.base + index] += 1
        if lane.targets:
            self._send(lane.targets, lane, index, DOWN, RESULT, None, effects)
        self._completed(effects)

    def _begin(self, lane: Lane, effects: Effects) -> None:
        for index in range(lane.num_chunks):
            if lane.keeps:
                self._copy(lane, index, effects)
            self._folded[lane.base + index] += 1
            if lane.targets:
                self._send(lane.targets, lane, index, DOWN, INPUT, None, effects)
            self._completed(effects)

    def _completed(self, effects: Effects) -> None:
        self.remaining -= 1
        if self._gate:
            self._passed(effects)

    def _passed(self, effects: Effects) -> None:
        """Count a complete chunk; the last one that is not gated lets the gated lanes begin."""
        self._gate -= 1
        if not self._gate:
            for lane in self.program.lanes.values():
                if lane.gated:
                    self._begin(lane, effects)

    def _end(self, effects: Effects) -> None:
        self.finished = True
        self._done(effects)

    # Consequences of an event.

    def _send(
        self, to: tuple[int, ...], lane: Lane, index: int, phase: int, source: int, payload: Any, effects: Effects
    ) -> None:
        self.sends += len(to)
        effects.append((SEND, self, to, lane, index, phase, source, payload))

    def _fold(self, tag: int, lane: Lane, index: int, payload: Any, first: bool, effects: Effects) -> None:
        effects.append((tag, self, lane, index, payload, first))

    def _hold(self, payload: Any, effects: Effects) -> Any:
        effects.append((HOLD, self, payload))
        return payload

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
