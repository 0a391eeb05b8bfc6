"""Operation whose chunks travel in another dtype than the caller's.

Invariants: links read memory of the operation, never the caller's. The place of each chunk in it has the converted
bytes of one chunk at a time: a chunk goes up at most once, and its result comes or is sent down only after the other
end has read all of that. A rank sends down the bytes that it received, or that it has rounded as the root: so all ranks
make their results of the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kfcomm.core.machine import INPUT, PARTIAL, RESULT
from kfcomm.core.program import Lane
from kfcomm.engine.memory import Array, Work
from kfcomm.engine.operation import Operation
from kfcomm.types import override

if TYPE_CHECKING:
    from kfcomm.arrays.reduce import Kernel, Wire

_EMPTY = memoryview(b"")


class WiredWork(Work):
    """Work on data that travels in another dtype."""

    __slots__ = ("wire",)

    def __init__(
        self, kernel: Kernel | None, dtype: np.dtype[Any] | None, size: int, *, in_result: bool, wire: Wire
    ) -> None:
        super().__init__(kernel, dtype, size, in_result=in_result)
        self.is_partial_shared = in_result and wire.dtype == np.float32
        self.wire = wire


class WiredOperation(Operation):
    """An operation that converts what it sends and gets; ``wire`` folds in float32, so the kernel is not used."""

    def __init__(self, future: Any, source: Array | None, result: Array | None, work: WiredWork, **others: Any) -> None:
        super().__init__(future, source, result, work, **others)
        self._wire = work.wire
        self._converted: Array | None = None
        self._sent_up: set[int] = set()

    @override
    def to_send(self, lane: Lane, index: int, source: int) -> memoryview:
        # what is shown is a copy already
        return self.bytes_of(lane, index, source)

    def bytes_of(self, lane: Lane, index: int, source: int) -> memoryview:
        """The bytes of one chunk as it travels; what goes up is converted when it is first asked for."""
        if not lane.count:
            return _EMPTY
        last = self._last
        if last is not None and last[1] == index and last[0] is lane and last[2] == source:
            return last[3]
        start, stop = self._bounds(lane, index)
        place = self._place(lane, start, stop)
        if source == PARTIAL or (source == INPUT and lane.up):
            slot = lane.base + index
            if slot not in self._sent_up:  # asked for again if its sender had to wait
                self._sent_up.add(slot)
                self._wire.encode(self._part(lane, source, start, stop), place)
        view = place.view(np.uint8).data
        self._last = (lane, index, source, view)
        return view

    def fold_partial(self, lane: Lane, index: int, view: memoryview, first: bool) -> None:
        """Make the partial result: (input if first else partial) ∘ what ``view`` holds."""
        start, stop = self._bounds(lane, index)
        partial = self._part(lane, PARTIAL, start, stop)
        own = self._part(lane, INPUT, start, stop) if first else partial
        self._wire.fold(own, self._arrived(view), partial)

    @override
    def fold_up(self, lane: Lane, index: int, view: memoryview, first: bool) -> None:
        # what is sent is converted, and never where the partial result is
        self.fold_partial(lane, index, view, first)

    def fold_last(self, lane: Lane, index: int, view: memoryview, first: bool) -> None:
        """Make the result: (input if first else partial) ∘ what ``view`` holds, finished, and rounded if it travels."""
        start, stop = self._bounds(lane, index)
        own = self._part(lane, INPUT if first else PARTIAL, start, stop)
        sent = self._place(lane, start, stop) if lane.down else None
        self._wire.last(own, self._arrived(view), self.work.size, self._part(lane, RESULT, start, stop), sent)

    def finish(self, lane: Lane, index: int) -> None:
        """Make the result of the input, the only contribution."""
        start, stop = self._bounds(lane, index)
        sent = self._place(lane, start, stop) if lane.down else None
        own = self._part(lane, INPUT, start, stop)
        self._wire.finish(own, self.work.size, self._part(lane, RESULT, start, stop), sent)

    def write(self, lane: Lane, index: int, view: memoryview) -> None:
        """Make the result of what ``view`` holds, and keep its bytes if they are to be passed on."""
        start, stop = self._bounds(lane, index)
        if lane.targets or lane.forwards:
            self._place(lane, start, stop)[:] = self._arrived(view)
        self._wire.decode(self._arrived(view), self._part(lane, RESULT, start, stop))

    def written(self, lane: Lane, index: int, view: memoryview) -> None:
        """Make the result of what has arrived where converted bytes belong."""
        start, stop = self._bounds(lane, index)
        self._wire.decode(self._arrived(view), self._part(lane, RESULT, start, stop))

    def copy(self, lane: Lane, index: int) -> None:
        """Make the result of the input, and its bytes for those who get it."""
        start, stop = self._bounds(lane, index)
        place = self._place(lane, start, stop)
        self._wire.encode(self._part(lane, INPUT, start, stop), place)
        self._wire.decode(place, self._part(lane, RESULT, start, stop))

    def _arrived(self, view: memoryview) -> Array:
        return np.frombuffer(view, self._wire.wire_dtype)

    def _place(self, lane: Lane, start: int, stop: int) -> Array:
        """Place of a chunk's converted bytes. Lanes that share one offset differ in the other."""
        if self._converted is None:
            self._converted = np.empty(max(self.given.size, self.out.size), self._wire.wire_dtype)
        offset = max(lane.input_offset, lane.result_offset)
        return self._converted[offset + start : offset + stop]

    def _array(self, source: int) -> Array:
        if source == PARTIAL and self._partial is None:
            self._partial = np.empty(self.given.size, np.float32)
        return super()._array(source)
