"""Execution in slots of shared memory, in which every rank reads the contributions of all ranks.

An operation is carried out in a slot, if its series has one: nothing is sent then, and all uses of slots are polled
together (``slots.SlotTable``). Otherwise it goes along graphs, or in one step from every rank to every other. Anything
unusual makes a rank *leave the slot* for good: it does not post a use there. The other ranks learn this from a chunk of
that use, or from the first rank, and leave, too. A rank that leaves sends the chunks that it would have sent without a
slot.

Invariants:

- A rank sends chunks of a use only if it has not stored its word for it, or knows that another rank has left. So if
  there is a chunk, the word of some rank is missing, and no rank completes the use in the slot.
- Results have the same bits, in a slot or not.

Collectives among several hosts use a slot inside each host. Where the graphs make a star of a host's ranks, its centre
is the *hub* of that host's slot. The others show their contributions there. When all are there, the hub takes them as
if they had come by links, follows its program with other hosts, and shows the result instead of sending it to each. So
hosts need not agree: one may use its slot while another sends chunks, and the bits are the same.

For the ranks of one host the rules above hold, with chunks to and from the hub.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from os import sched_yield
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np

from kfcomm.core.collective import Shortcut
from kfcomm.core.machine import DOWN, UP
from kfcomm.engine.slots import FEW
from kfcomm.transports.shm.slot import HubSlot
from kfcomm.transports.shm.slots import word_of
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.core.graph import GraphPair
    from kfcomm.core.program import Lane
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.memory import Array
    from kfcomm.engine.operation import Operation
    from kfcomm.engine.shown import SharedWork
    from kfcomm.transports.shm.slot import Slot

LOOKS = 8
"""Polls by the caller that awaits a use, before it waits for descriptors."""
LATE_S = 1e-3
"""A yield that takes longer says that somebody else wants the processor."""


class InSlot(ABC):
    """A collective that is under way in a slot, or may be."""

    slot: Slot | None = None  # None if it is not in one, or is over
    word = 0
    is_operation = False
    seq: int  # number of this use of its name
    posted_s: float  # by the monotonic clock
    nbytes: int  # see ``Operation``
    engine: Engine

    @abstractmethod
    def look(self) -> bool:
        """Poll; return whether it is over now, and was not."""

    def look_at_once(self) -> None:
        """Poll for its end a few times: a turn of the loop would take several times as long."""
        slots, slot, word = self.engine.slots, self.slot, self.word
        for _ in range(LOOKS):
            if slot is None or self.slot is None:
                return
            begun_s = monotonic()
            sched_yield()
            if len(slots.pending) > FEW:  # they are looked at together
                slots.look()
            else:
                words = slot.posted()
                if min(words) < word:
                    slot.late = words
                elif self.look():
                    return
            if monotonic() - begun_s > LATE_S:
                return

    @abstractmethod
    def enter(self) -> Operation:
        """Continue as an operation in the same slot, unless it already is one."""

    @abstractmethod
    def as_operation(self) -> Operation:
        """A read-only view of it as an operation; for any thread."""


class SlotExecutor(InSlot, Shortcut):
    """Carries out one operation in a slot if there is one, until anything unusual; links do the rest."""

    is_operation = True
    needs_slot = True
    """Without a slot, an operation is carried out as if it had no executor."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.collective = operation.collective
        self.engine = operation.engine
        self.work = cast("SharedWork", operation.work)
        self.seq = operation.collective.seq
        self.posted_s = operation.posted_s
        self.nbytes = operation.nbytes

    def begin(self) -> None:
        """Begin in a slot, if there is one."""
        operation, collective, slots = self.operation, self.collective, self.engine.slots
        slot = slots.of(self)
        if slot is None:
            self._go_ordinary()
            return
        self.engine.begins(operation)
        self.use(slot, word_of(self.seq * slot.num_words, collective.generation))
        if slot.post(operation.given, self.word):
            slots.wake(slot)
        slots.add(self)
        self.look()

    def use(self, slot: Slot | None, word: int) -> None:
        """Enter this slot."""
        self.slot, self.word = slot, word
        self.operation.executor = self.collective.shortcut = self

    @override
    def enter(self) -> Operation:
        return self.operation

    @override
    def as_operation(self) -> Operation:
        return self.operation

    @override
    def look(self) -> bool:
        slot, engine, operation = self.slot, self.engine, self.operation
        if slot is None:
            return False
        try:
            is_over = slot.look(self.word, operation.out)
        except Exception as error:  # noqa: BLE001  it ends this collective alone
            engine.failures.broke(self.collective, error)
            return True
        if slot.has_news or (is_over and slot.late):
            engine.slots.told(slot, self, is_over=is_over)
        if not is_over:
            return False
        slot.num_uses += 1
        if slot.outcome is not None:
            operation.value = slot.take_outcome(operation.value)
        self._leave_slot()
        operation.completed()
        return True

    @override
    def covers(self, rank: int) -> bool:
        return True

    @override
    def heard(self) -> int:
        # Words tell as much as chunks.
        slot, index, posted = self.slot, self.collective.group.index, 0
        if slot is not None:
            for world, word in zip(slot.members, slot.posted(), strict=True):
                if slot.has_come([word], self.word):
                    posted |= 1 << index[world]
        return posted

    def behind(self) -> list[int]:
        """Group ranks that keep it waiting although they may have posted it."""
        slot, index = self.slot, self.collective.group.index
        return [] if slot is None else [index[slot.members[place]] for place in slot.behind(self.word)]

    @override
    def leave(self) -> None:
        if self.slot is None:
            return
        self._spoil(self.slot)
        self._leave_slot()
        self._go_ordinary()

    # What the operation tells it.

    def far(self, to: tuple[int, ...], phase: int) -> tuple[int, ...]:
        """Return the destinations that get a chunk by links."""
        return to

    def show(self, lane: Lane, index: int, phase: int) -> None:
        """Show a chunk to the other destinations."""

    def combine(self) -> bool:
        """Make the result, now that all chunks have come; return whether that was possible."""
        return True

    def give_up(self) -> None:
        """End a failed operation, whose contribution peers may still read."""
        if self.slot is not None:
            self._spoil(self.slot)
        self._leave_slot()

    def _spoil(self, slot: Slot) -> None:
        slot.is_dead = True
        slot.forget()

    def _leave_slot(self) -> None:
        """Let go of the slot and the operation, so that they are in no cycle."""
        if self.slot is not None:
            self.engine.slots.drop(self)
        self.slot = self.operation.executor = self.collective.shortcut = None

    def _go_ordinary(self) -> None:
        self.engine.slots.take_back(self)
        if not self.operation.is_cached:
            self.engine.begins(self.operation)
        self.collective.start()


class OneStepExecutor(SlotExecutor):
    """Without a slot, each input is sent whole to every rank: the machine gathers, and this folds at the end."""

    needs_slot = False
    _result: Array | None = None

    def _go_ordinary(self) -> None:
        operation, work = self.operation, self.work
        operation.executor = self
        self._result = operation.out
        operation.out = np.empty(work.cut.count * work.size, work.shown)
        super()._go_ordinary()

    @override
    def combine(self) -> bool:
        operation, result, self._result = self.operation, self._result, None
        operation.executor = None
        if result is not None:
            try:
                rows = operation.out.reshape(self.work.size, -1)
                if self.collective.program.steps:  # the first row is that of this rank
                    rows = np.roll(rows, self.collective.group.rank, axis=0)
                self.work.combine(rows, result)
            except Exception as error:  # noqa: BLE001  as in ``look``
                self.engine.failures.broke(self.collective, error)
                return False
        return True


HOSTED_NBYTES = 1 << 18
"""Longer messages go by links: there a host's ranks fold while others still give."""


def hub_of(pairs: Sequence[GraphPair], ranks: Sequence[int]) -> int | None:
    """The centre of the star that all graphs make of these ranks of a group; None if they do not. O(pairs x ranks)."""
    graphs = [graph for pair in pairs for graph in (pair.reduce, pair.broadcast)]
    for hub in ranks:
        ends = [(graph.parents[rank], graph.children[rank]) for graph in graphs for rank in ranks if rank != hub]
        if ends and all(parent == hub and not children for parent, children in ends):
            return hub
    return None


class HubExecutor(SlotExecutor):
    """Executor of a host's hub, which waits first for the contributions of the others of this host."""

    _host_slot: HubSlot | None = None
    _num_shown = 0

    @override
    def look(self) -> bool:
        # it is not over, but in the slot nothing is waited for any more
        slot, engine = self.slot, self.engine
        if type(slot) is not HubSlot:
            return False
        try:
            if not slot.look(self.word, self.operation.out):
                return False
            if slot.late:
                engine.slots.told(slot, self, is_over=True)
            engine.slots.drop(self)
            self._host_slot, self.slot, self.collective.shortcut = slot, None, None
            self._take_shown(slot)
        except Exception as error:  # noqa: BLE001  it ends this collective alone
            engine.failures.broke(self.collective, error)
        if engine.links.dirty:
            engine.links.flush()
        return True

    @override
    def give_up(self) -> None:
        # the others of this host, who wait for the result, are told by the abort
        if self._host_slot is not None:
            self._spoil(self._host_slot)
        super().give_up()

    @override
    def covers(self, rank: int) -> bool:
        return rank in self.work.ranks

    def _take_shown(self, slot: HubSlot) -> None:
        collective = self.collective
        program, own = collective.program, collective.group.rank
        size, item, routes = program.chunk_elements, self.work.item, program.routes
        for place, rank in enumerate(self.work.ranks):
            if rank == own:
                continue
            collective.posted |= 1 << rank
            given = slot.given(place)
            for lane in program.lanes.values():
                route = routes[lane.number, UP, rank]
                for index in range(lane.num_chunks):
                    begin = lane.input_offset + index * size
                    end = min(begin + size, lane.input_offset + lane.count)
                    collective.take(route, index, given[begin * item : end * item])

    @override
    def far(self, to: tuple[int, ...], phase: int) -> tuple[int, ...]:
        if self._host_slot is None or phase != DOWN:
            return to
        return tuple(rank for rank in to if rank not in self.work.ranks)

    @override
    def show(self, lane: Lane, index: int, phase: int) -> None:
        slot = self._host_slot
        if slot is None or phase != DOWN:
            return
        program = self.collective.program
        begin = lane.result_offset + index * program.chunk_elements
        end = min(begin + program.chunk_elements, lane.result_offset + lane.count)
        slot.show(begin, end, self.operation.out)
        self._num_shown += 1
        if self._num_shown == program.num_slots:
            self.operation.executor = None
            slot.num_uses += 1
            if slot.share(self.word):
                self.engine.slots.wake(slot)
