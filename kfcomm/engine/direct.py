"""Operations of the strategy ``direct``, in which every rank reads the contributions of all ranks.

They are carried out in a slot, if their series has one: nothing is sent then, and all uses of slots are polled together
(``slots.SlotTable``). Else they go along graphs, or in one step from every rank to every other. Anything unusual makes
a rank *leave the slot* for good: it does not post a use there, or hears that another rank did not, by a chunk of that
use, or from the first rank. A rank that leaves sends what it would have sent without a slot; so all ranks follow the
first that left.

Invariants:

- A rank sends chunks of a use only if it has not stored its word for it, or has heard of another that has left. So if
  there is any, the word of some rank does not come, and no rank completes it in the slot.
- Results have the same bits, whether they are made in a slot or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import sched_yield
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.collective import Collective, Shortcut
from kfcomm.engine.operation import Array, Operation
from kfcomm.engine.shown import SharedWork
from kfcomm.engine.slots import FEW
from kfcomm.transports.shm.slots import word_of
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.engine.engine import Engine
    from kfcomm.transports.shm.slot import Slot


LOOKS = 8
"""Polls by the caller that awaits a use, before it waits for descriptors."""
LATE_S = 1e-3
"""A yield that takes longer says that somebody else wants the processor."""


class InSlot(ABC):
    """A collective that is under way in a slot, or may be.

    Attributes:
        slot: in which it is; None if it is not, or is over.
        word: of its use of the slot; the first.
        seq: the number of this use of its name.
        posted_s: when it began, by the monotonic clock.
        value, nbytes, failed: see ``Operation``.
        is_operation: it is among those in flight.
    """

    slot: Slot | None = None
    word = 0
    is_operation = False
    seq: int
    posted_s: float
    value: Any
    nbytes: int
    failed: bool
    engine: Engine
    _out: Array

    @abstractmethod
    def look(self) -> bool:
        """Whether it is over now, and was not."""

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
    def enter(self) -> SlottedOperation:
        """Continue as an operation in the same slot, unless it already is one."""

    @abstractmethod
    def as_operation(self) -> SlottedOperation:
        """A view of it as an operation, for reading; on any thread."""


class SlottedOperation(InSlot, Operation, Shortcut):
    """Operation that uses a slot if there is one; the arguments are those of an ``Operation``."""

    work: SharedWork
    is_operation = True

    @override
    def enter(self) -> SlottedOperation:
        return self

    @override
    def as_operation(self) -> SlottedOperation:
        return self

    @override
    def begin(self, machine: Collective) -> None:
        self.collective = machine
        slot = self.engine.slots.of(self)
        if slot is None:
            self._go_ordinary()
            return
        self.engine.begins(self)
        self.word = word_of(machine.seq * slot.num_words, machine.generation)
        if slot.post(self._in, self.word):
            self.engine.slots.wake(slot)
        self.slot = slot
        machine.shortcut = self
        self.engine.slots.add(self)
        self.look()

    @override
    def look(self) -> bool:
        slot, engine = self.slot, self.engine
        if slot is None:
            return False
        try:
            is_over = slot.look(self.word, self._out)
        except Exception as error:  # noqa: BLE001  it ends this collective alone
            engine.broke(self.collective, error)
            return True
        if slot.has_news or (is_over and slot.late):
            engine.slots.told(slot, self, is_over=is_over)
        if not is_over:
            return False
        slot.num_uses += 1
        if slot.outcome is not None:
            self.value = slot.take_outcome(self.value)
        engine.slots.drop(self)
        self.slot = self.collective.shortcut = None
        Operation.completed(self)
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

    @override
    def behind(self) -> list[int]:
        slot, index = self.slot, self.collective.group.index
        return [] if slot is None else [index[slot.members[place]] for place in slot.behind(self.word)]

    @override
    def reject(self, error: BaseException) -> None:
        # Peers may still read what was shown for it.
        if self.slot is not None:
            self._forget(self.slot)
        super().reject(error)

    @override
    def leave(self) -> None:
        if self.slot is None:
            return
        self._forget(self.slot)
        self._go_ordinary()

    def _forget(self, slot: Slot) -> None:
        slot.is_dead = True
        slot.forget()
        self.engine.slots.drop(self)
        self.slot = self.collective.shortcut = None

    def _go_ordinary(self) -> None:
        self.engine.slots.take_back(self)
        super().begin(self.collective)


class OneStepOperation(SlottedOperation):
    """Without a slot, each input is sent whole to every rank: the machine gathers, and this folds at the end."""

    _result: Array

    def _go_ordinary(self) -> None:
        self._result = self._out
        self._out = np.empty(self.work.cut.count * self.work.size, self.work.shown)
        super()._go_ordinary()

    @override
    def completed(self) -> None:
        try:
            self.work.combine(self._out.reshape(self.work.size, -1), self._result)
        except Exception as error:  # noqa: BLE001  as in ``look``
            self.engine.broke(self.collective, error)
        else:
            super().completed()
