"""Lightweight in-flight record of the slot fast path."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from kfcomm.core.collective import Collective
from kfcomm.engine.executors import InSlot
from kfcomm.engine.observer import BATCH
from kfcomm.transports.shm.slots import generation_of
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.collectives.compiled import Compiled
    from kfcomm.core.signature import Signature
    from kfcomm.engine.memory import Array
    from kfcomm.engine.operation import Operation
    from kfcomm.transports.shm.slot import Slot


class Over(tuple[Any]):
    """Use that was complete at the first look: the result, in the place of an operation."""

    __slots__ = ()
    seq, is_over = -1, True

    def done(self) -> bool:
        """Whether it is over."""
        return True

    def result(self) -> Any:
        """The caller's result."""
        return self[0]

    def cancel(self) -> bool:
        """Return False: there is nothing to end."""
        return False

    def give_up(self) -> None:
        """Return False: there is nothing to end."""


class SlotUse(InSlot):
    """One use of a slot by a cached name, which has been posted. Most are over before an ``Operation`` is needed.

    If anything is unusual, or more has to be known of it, it must ``enter``.

    Args:
        name: the compiled name, with nothing unusual: see ``Compiled.begin``.
        slot: of its series.
        posted: number of the use, its word, and the time of its post.
        future: see ``Operation``. None: it belongs to its caller alone, who holds the engine lock; before the caller
            releases that, the use has to be over or to ``enter``.
        source: see ``Operation``.
        out: flat memory of the result.
        value: see ``Operation``.

    Attributes:
        is_over: it has ended, and did not ``enter``.
    """

    is_over = failed = False
    value: Any
    _operation: Operation | None = None

    def __init__(
        self, name: Compiled, slot: Slot, posted: tuple[int, int, float], future: Any, source: Array, out: Array,
        value: Array | None,
    ) -> None:  # fmt: skip
        self._name = name
        self.nbytes = name.nbytes
        self.engine = name.engine
        self.slot = slot
        self.seq, self.word, self.posted_s = posted
        self.future = future
        self._in = source
        self._out = out
        self.value = value
        name.series.key.begun = self

    @override
    def look(self) -> bool:
        slot = self.slot
        if slot is None:
            return False
        name, engine = self._name, self.engine
        series, slots = name.series, engine.slots
        try:
            is_over = slot.look(self.word, self._out)
        except Exception as error:  # noqa: BLE001  it ends this collective alone
            engine.failures.broke(self.enter().collective, error)
            return True
        if slot.has_news or (is_over and slot.late):
            slots.told(slot, self, is_over=is_over)
        if not is_over:
            return False
        slot.num_uses += 1
        if slot.outcome is not None:
            self.value = slot.take_outcome(self.value)
        if slots.pending:
            slots.drop(self)
        self.slot = series.key.begun = None
        self.is_over = True
        ended = engine.recorder.ended
        ended.append((series, self.seq, self.posted_s, monotonic(), self.nbytes))
        if len(ended) >= BATCH:
            engine.recorder.settle()
        if engine.observers is not None:
            engine.tell_done(self)
        future = self.future
        if future is not None:
            self.future = future.operation = None
            if not future.done():
                future.set_result(self.value)
        return True

    def begin(self) -> None:
        """Poll once; if it is not over, add it to the uses that are polled together."""
        if not self.look():
            engine = self.engine
            engine.slots.add(self)
            due_s = self.posted_s + self._name.first_s
            if due_s < engine.deadlines.next_s:
                engine.deadlines.hurry(due_s)
            engine.on_wait()

    @override
    def enter(self) -> Operation:
        operation = self._operation
        if operation is None:
            operation = self._operation = self.as_operation()
            engine, series = self.engine, self._name.series
            engine.slots.drop(self)
            self.slot = series.key.begun = None
            if series.version != engine.router.names.version:  # chunks may have to be sent for it
                operation.collective.series = engine.router.series(
                    series.group, series.key.name, cast("Signature", series.signature), series.program, series.sizes
                )
            engine.slots.add(cast("InSlot", operation.executor))
            engine.enter(operation)
            future = self.future
            if future is not None:
                self.future, future.operation = None, operation
        return operation

    @override
    def as_operation(self) -> Operation:
        operation: Operation = self._name.operation(self._name, self.future, self._in, self._out, self.value)
        stamp = generation_of(self.word, self._name.group.plans.generation) << 1
        operation.collective = collective = Collective(self._name.series, self.seq, stamp, operation)
        operation.posted_s = collective.heard_s = self.posted_s
        operation.due_s = self.posted_s + self._name.first_s
        executor = self._name.work.executor
        if executor is not None:
            executor(operation).use(self.slot, self.word)
        return operation

    def done(self) -> bool:
        """Whether it is over."""
        return self.is_over or (self._operation is not None and self._operation.is_over)

    def result(self) -> Any:
        """The caller's result, once it is over."""
        return self.value if self._operation is None else self._operation.result()

    def cancel(self) -> bool:
        """End it everywhere; return False if it is over already."""
        return not self.is_over and self.enter().cancel()

    def give_up(self) -> None:
        """Cancel it, for a caller who was interrupted."""
        self.cancel()
