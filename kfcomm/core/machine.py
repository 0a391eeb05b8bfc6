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

A lane with a window sends only its first chunks at once: each result lets the chunk follow that is one window later.

A lane without an up phase begins in *waiting*, or, where its data enters, at *complete*. The machine is
complete when all its chunks are complete and no link reads from its memory any more.

In an exchange (`kfcomm.core.exchange`) each arriving chunk is a state of its own: a contribution of a later step is
held until the steps before it are over, a result is stored at once. A step begins, and its messages are sent, when the
last chunk of the step before has come.

The machine owns no memory and knows no clock, socket or array. It takes events and decides what follows, and its
*driver* does that at once. `kfcomm.core.recorder.EffectRecorder` is a driver that only records the decisions.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

from kfcomm.core.program import ABSENT, ExchangeStep, Lane, LaneRoute, Program


class Phase(IntEnum):
    """Direction of a chunk in the graph."""

    UP = 0
    DOWN = 1


class Source(IntEnum):
    """Memory of the collective that a chunk is sent from."""

    INPUT = 0
    PARTIAL = 1
    RESULT = 2
    PAYLOAD = 3


class Do(IntEnum):
    """Tags of recorded effects; the fields after the tag are in brackets. See `CollectiveDriver`."""

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
    BEGIN = 10
    """[machine, lane, index]: partial = input."""


UP, DOWN = int(Phase.UP), int(Phase.DOWN)
INPUT, PARTIAL, RESULT, PAYLOAD = (int(source) for source in Source)
SEND, FOLD, HOLD, FINISH, STORE, COPY, RELEASE, DONE, FOLD_LAST, FOLD_UP, BEGIN = (int(do) for do in Do)

Effect = tuple[Any, ...]
Effects = list[Effect]


class CollectiveDriver(Protocol):
    """Carries out the decisions of one machine."""

    # Called, not handed a list of events: events would cost three times as much for each chunk (a tuple, a list and a
    # dispatch), and a chunk in shared memory takes microseconds.

    def begin(self, machine: Any) -> None:
        """Call ``machine.start``, now or later: it has its place among those in flight."""

    def send(self, to: tuple[int, ...], lane: Lane, index: int, phase: int, source: int, payload: Any) -> None:
        """Send a chunk from ``source``, or ``payload`` if that is PAYLOAD, to group ranks.

        Add one to ``machine.sends`` for each destination whose chunk is still read after this call, and call
        ``machine.was_read`` when it no longer is.
        """

    def fold(self, tag: int, lane: Lane, index: int, payload: Any, first: bool) -> None:
        """Make partial = (input if first else partial) ∘ payload, and release the payload.

        ``tag`` is ``Do.FOLD``, ``FOLD_LAST`` (make the finished result instead: it was the last) or ``FOLD_UP`` (it was
        the last, and a SEND of the partial result comes next).
        """

    def hold(self, payload: Any) -> Any:
        """Return the payload in a form that lasts until it is folded or released."""

    def finish(self, lane: Lane, index: int) -> None:
        """Make result = the finished input: there are no other contributions."""

    def store(self, lane: Lane, index: int, payload: Any) -> None:
        """Make result = payload, and release the payload."""

    def copy(self, lane: Lane, index: int) -> None:
        """Make result = input."""

    def begin_partial(self, lane: Lane, index: int) -> None:
        """Make partial = input."""

    def release(self, payload: Any) -> None:
        """Release a payload that is neither folded nor stored."""

    def completed(self) -> None:
        """The result is complete, and no memory of the caller is in use."""


class Machine:
    """State of one collective on one rank."""

    # Class attributes: most machines never change them, and pay neither time nor memory for them.
    sends = _gate = 0  # sends: chunks handed out, one for each destination, and not yet reported by ``was_read``
    _step = 0  # of an exchange: the one that has begun, from 1 on
    _held: dict[tuple[int, int], Any] | None = None
    driver: CollectiveDriver

    def __init__(self, program: Program, driver: CollectiveDriver) -> None:
        """Begin with no chunk complete."""
        self.program = program
        self.driver = driver
        self.remaining = program.num_slots  # chunks that are not complete
        if program.gate:
            self._gate = program.gate
        # Children folded per chunk; one more than there are children once the result is here.
        self._folded = program.no_folds.copy()

    def start(self) -> None:
        """Do everything that needs no other rank."""
        program = self.program
        if program.first_sends is not None:
            send = self.driver.send
            for to, lane, index in program.first_sends:
                send(to, lane, index, UP, INPUT, None)
            return
        for lane in program.first:
            if lane.up:
                for index in range(lane.num_at_once):
                    self._reduced(lane, index, INPUT)
            else:
                self._begin(lane)
        if program.steps:
            self._begin_step()
        if not (self.remaining or self.sends):
            self.driver.completed()

    def accepts(self, route: LaneRoute, index: int) -> bool:
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

    def take(self, route: LaneRoute, index: int, payload: Any) -> bool:
        """Take a chunk of this lane; False, and nothing is done, if it has arrived before."""
        lane, position = route.lane, route.position
        folded, driver = self._folded, self.driver
        slot = lane.base + index
        if folded[slot] != position or self._held:
            return self._take_in_turn(route, index, payload)
        folded[slot] = position + 1
        if route.phase:
            if lane.window and index + lane.window < lane.num_chunks:
                self._reduced(lane, index + lane.window, INPUT)
            if lane.keeps:
                driver.store(lane, index, payload)
                if lane.targets:
                    driver.send(lane.targets, lane, index, DOWN, RESULT, None)
            else:
                if lane.targets:
                    driver.send(lane.targets, lane, index, DOWN, PAYLOAD, payload)
                driver.release(payload)
            self.remaining -= 1
            if self._gate:
                self._passed()
        else:
            if not lane.count:
                driver.release(payload)
            elif not route.is_last:
                driver.fold(FOLD, lane, index, payload, not position)
            else:
                driver.fold(FOLD_LAST if lane.parent == ABSENT else FOLD_UP, lane, index, payload, not position)
            if route.is_last:
                self._reduced(lane, index, PARTIAL)
        if not (self.remaining or self.sends):
            self.driver.completed()
        return True

    def _take_in_turn(self, route: LaneRoute, index: int, payload: Any) -> bool:
        """Take a chunk that is out of turn, or that others wait for: children are folded in their order."""
        if route.step:
            return self._take_of_step(route, index, payload)
        lane, position = route.lane, route.position
        slot = lane.base + index
        folded = self._folded[slot]
        if folded != position:
            if route.phase or position < folded or (self._held and (slot, position) in self._held):
                return False
            if self._held is None:
                self._held = {}
            self._held[slot, position] = self.driver.hold(payload)
            return True
        # Without ``_held``, ``take`` folds directly instead of coming back here.
        held, self._held = self._held or {}, None
        try:
            self.take(route, index, payload)
            position += 1
            while (slot, position) in held and not route.phase:
                following = self.program.routes[lane.number, UP, lane.children[position]]
                self.take(following, index, held.pop((slot, position)))
                position += 1
        finally:
            self._held = held or None
        return True

    def arrived(self, route: LaneRoute, index: int, payload: Any) -> None:
        """Take a chunk that ``accepts`` has admitted."""
        # It may have been admitted on two links at a time: the first to be complete counts.
        if not self.take(route, index, payload):
            self.driver.release(payload)

    def done_elsewhere(self) -> None:
        """Complete a program without lanes, which is carried out outside the core."""
        self.remaining -= 1
        self.driver.completed()

    def take_held(self) -> list[Any]:
        """Return the payloads that are held, to be dropped: the machine will not run any more."""
        held = list(self._held.values()) if self._held else []
        self._held = None
        return held

    def was_read(self) -> None:
        """Record that a chunk is no longer read by one of its destinations."""
        self.sends -= 1
        if not (self.remaining or self.sends):
            self.driver.completed()

    def _reduced(self, lane: Lane, index: int, source: int) -> None:
        """Pass on ``source``, which holds every contribution of this rank's subtree."""
        driver = self.driver
        if lane.parent != ABSENT:
            driver.send((lane.parent,), lane, index, UP, source, None)
            # With a down phase the chunk is complete when its result has come.
            if not lane.down:
                self._completed()
            return
        if lane.count and source == INPUT:
            driver.finish(lane, index)
        self._folded[lane.base + index] += 1
        if lane.targets:
            driver.send(lane.targets, lane, index, DOWN, RESULT, None)
        self._completed()

    def _begin(self, lane: Lane) -> None:
        for index in range(lane.num_chunks):
            if lane.keeps:
                self.driver.copy(lane, index)
            self._folded[lane.base + index] += 1
            if lane.targets:
                self.driver.send(lane.targets, lane, index, DOWN, INPUT, None)
            self._completed()

    def _completed(self) -> None:
        self.remaining -= 1
        if self._gate:
            self._passed()

    def _passed(self) -> None:
        """Count a complete chunk; the last one that is not gated lets the gated lanes begin, or the next step."""
        if self._step:
            self._next_steps()
            return
        self._gate -= 1
        if not self._gate:
            for lane in self.program.lanes.values():
                if lane.gated:
                    self._begin(lane)

    # ---------------------------------------------------------------- exchanges

    def _take_of_step(self, route: LaneRoute, index: int, payload: Any) -> bool:
        """Take a contribution, or a result while contributions are held."""
        slot = route.lane.base + index
        if not self.accepts(route, index):
            return False
        if route.phase:
            self._folded[slot] = route.position + 1
            self.driver.store(route.lane, index, payload)
            self.remaining -= 1
        elif route.step > self._step:
            if self._held is None:
                self._held = {}
            self._held[slot, route.position] = self.driver.hold(payload)
            return True
        else:
            self._fold_of_step(route, index, payload)
        self._next_steps()
        if not (self.remaining or self.sends):
            self.driver.completed()
        return True

    def _fold_of_step(self, route: LaneRoute, index: int, payload: Any) -> None:
        lane = route.lane
        self._folded[lane.base + index] = route.position + 1
        if lane.count:
            self.driver.fold(FOLD_LAST if route.is_last else FOLD, lane, index, payload, route.position == 1)
        else:
            self.driver.release(payload)
        self.remaining -= 1

    def _next_steps(self) -> None:
        """Begin the next step if no chunk of this one is missing, and so on."""
        steps = self.program.steps
        while self._step < len(steps) and not self._is_awaited(steps[self._step - 1]):
            self._begin_step()

    def _is_awaited(self, step: ExchangeStep) -> bool:
        """Whether a chunk of a step is missing."""
        missing = self.program.no_folds[step.begin]
        return bytes(self._folded[step.begin : step.end]).count(missing) > 0

    def _begin_step(self) -> None:
        step = self.program.steps[self._step]
        self._step += 1
        driver = self.driver
        for lane in step.fresh:
            for index in range(lane.num_chunks):
                if lane.up:
                    driver.begin_partial(lane, index)
                else:
                    driver.copy(lane, index)
        for send in step.sends:
            for index in range(send.lane.num_chunks):
                driver.send((send.to,), send.lane, index, send.phase, send.source, None)
        for route in step.arrivals if self._held else ():
            self._fold_held(route)

    def _fold_held(self, route: LaneRoute) -> None:
        """Fold what came before its step."""
        held = self._held or {}
        for index in range(route.lane.num_chunks):
            key = route.lane.base + index, route.position
            if key in held:
                self._fold_of_step(route, index, held.pop(key))
        self._held = held or None
