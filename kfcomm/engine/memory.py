"""Memory of one collective on one rank: the caller's input, the partial result and the result.

Partial results are stored in the result's own memory if possible (it has the same dtype, and the rank keeps every chunk
that it folds), otherwise in scratch memory of the accumulation dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.arrays import same_memory
from kfcomm.core.machine import INPUT, PARTIAL, RESULT
from kfcomm.errors import InternalError

if TYPE_CHECKING:
    from kfcomm.arrays.reduce import Kernel
    from kfcomm.core.collective import Collective
    from kfcomm.core.program import Lane
    from kfcomm.engine.executors import SlotExecutor

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

COPIED_NBYTES = 1 << 11
"""A chunk up to this size is sent from a copy: 0.1 µs, where a view costs 0.3 and the garbage collector two objects."""

_EMPTY = memoryview(b"")


class Work:
    """Arithmetic and dtype of one kind of collective; shared by all operations of a plan.

    Args:
        kernel: folds contributions; None for verbs that only move data.
        dtype: of input and result, or None without data.
        size: number of contributions (for averages).
        in_result: this rank keeps every chunk that it folds, so that partial results may live in the result.

    Attributes:
        item: bytes of an element of input and result.
        is_partial_shared: partial results do live in the result.
        executor: runs the operations in a slot if it can, see ``kfcomm.engine.executors``; None: over links.
    """

    __slots__ = ("dtype", "executor", "in_result", "is_partial_shared", "item", "kernel", "size")

    def __init__(self, kernel: Kernel | None, dtype: np.dtype[Any] | None, size: int, *, in_result: bool) -> None:
        self.kernel = kernel
        self.dtype = dtype
        self.size = size
        self.executor: type[SlotExecutor] | None = None
        self.in_result = in_result
        self.item = 1 if dtype is None else dtype.itemsize
        self.is_partial_shared = in_result and kernel is not None and kernel.accumulate_dtype == kernel.dtype


class OperationMemory:
    """Arrays of one collective, by chunk.

    A base of the operation, not a part of it: a second object for each call would cost 25 bytecodes, and the garbage
    collector a visit.
    """

    collective: Collective  # set before any method is called
    given: Array  # flat; it and ``out`` may be `ChainedArrays`
    out: Array  # flat
    work: Work
    # Most stay what they are here: then they cost an operation neither time nor memory.
    is_small = False
    _partial: Array | None = None
    _last: tuple[Lane, int, int, memoryview] | None = None

    def to_send(self, lane: Lane, index: int, source: int) -> memoryview | bytes:
        """The bytes of one chunk, to be read by links: a copy of them if they are few."""
        if self.is_small and source == INPUT:
            return self.given.tobytes()
        start, stop = self._bounds(lane, index)
        if (stop - start) * self.work.item > COPIED_NBYTES:
            return self.bytes_of(lane, index, source)
        return self._part(lane, source, start, stop).tobytes() if stop else b""

    def bytes_of(self, lane: Lane, index: int, source: int) -> memoryview:
        """Return the memory of one chunk of the input, the partial result or the result.

        A repeated request returns the same view object: by that links know that one copy serves several peers.
        """
        if not lane.count:
            return _EMPTY
        last = self._last
        if last is not None and last[1] == index and last[0] is lane and last[2] == source:
            return last[3]
        view = self._part(lane, source, *self._bounds(lane, index)).view(np.uint8).data
        self._last = (lane, index, source, view)
        return view

    def fold_partial(self, lane: Lane, index: int, view: memoryview, first: bool) -> None:
        """Make the partial result: (input if first else partial) ∘ what ``view`` holds."""
        start, stop = self._bounds(lane, index)
        partial = self._part(lane, PARTIAL, start, stop)
        own = self._part(lane, INPUT, start, stop) if first else partial
        kernel = self.work.kernel or self._folding()
        kernel.fold(own, self._contribution(kernel, view, stop - start), partial)

    def fold_last(self, lane: Lane, index: int, view: memoryview, first: bool) -> None:
        """Make the result: (input if first else partial) ∘ what ``view`` holds, finished."""
        start, stop = self._bounds(lane, index)
        own = self._part(lane, INPUT if first else PARTIAL, start, stop)
        result = self._part(lane, RESULT, start, stop)
        kernel = self.work.kernel or self._folding()
        kernel.last(own, self._contribution(kernel, view, stop - start), result, self.work.size)

    def finish(self, lane: Lane, index: int) -> None:
        """Make the result of the input, the only contribution."""
        start, stop = self._bounds(lane, index)
        source = self._part(lane, INPUT, start, stop)
        self._folding().finish(source, self._part(lane, RESULT, start, stop), self.work.size)

    def write(self, lane: Lane, index: int, view: memoryview) -> None:
        """Make the result of what ``view`` holds."""
        result = self.out
        if lane.count != result.size or lane.num_chunks != 1:
            start, stop = self._bounds(lane, index)
            result = self._part(lane, RESULT, start, stop)
        if lane.count:
            result[:] = np.frombuffer(view, result.dtype)

    def written(self, lane: Lane, index: int, view: memoryview) -> None:
        """Handle a chunk that has arrived in place, in the memory of the result."""

    def copy(self, lane: Lane, index: int) -> None:
        """Make the result of the input."""
        if lane.count:
            start, stop = self._bounds(lane, index)
            source, result = self._part(lane, INPUT, start, stop), self._part(lane, RESULT, start, stop)
            if not same_memory(source, result):
                result[:] = source

    def begin_partial(self, lane: Lane, index: int) -> None:
        """Make the partial result of the input."""
        if lane.count:
            start, stop = self._bounds(lane, index)
            self._part(lane, PARTIAL, start, stop)[:] = self._part(lane, INPUT, start, stop)

    def _bounds(self, lane: Lane, index: int) -> tuple[int, int]:
        """The elements of a chunk, counted from the beginning of its lane."""
        if lane.num_chunks == 1:
            return 0, lane.count
        chunk = self.collective.program.chunk_elements
        start = index * chunk
        return start, min(start + chunk, lane.count)

    @staticmethod
    def _contribution(kernel: Kernel, view: memoryview, count: int) -> Array:
        """The ``count`` elements of a child as an array: its input, or a partial result, by their size."""
        dtype = kernel.dtype if view.nbytes == count * kernel.dtype.itemsize else kernel.accumulate_dtype
        return np.frombuffer(view, dtype)

    def _folding(self) -> Kernel:
        if self.work.kernel is None:
            raise InternalError("a verb that does not reduce was given something to fold")
        return self.work.kernel

    def _array(self, source: int) -> Array:
        if source == INPUT:
            return self.given
        if source == PARTIAL:
            if self._partial is None:
                self._partial = np.empty(self.given.size, self._folding().accumulate_dtype)
            return self._partial
        return self.out

    def _offset(self, lane: Lane, source: int) -> int:
        if source == INPUT or (source == PARTIAL and not self.work.is_partial_shared):
            return lane.input_offset
        return lane.result_offset

    def _part(self, lane: Lane, source: int, start: int, stop: int) -> Array:
        if source == INPUT:
            array: Array | None = self.given
        else:
            array = self.out if source == RESULT or self.work.is_partial_shared else self._partial
        if array is None:
            array = self._array(source)
        if stop - start == array.size and isinstance(array, np.ndarray):  # all of it: a slice costs 0.15 µs
            return array
        offset = self._offset(lane, source)
        return array[offset + start : offset + stop]
