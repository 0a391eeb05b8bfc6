"""One collective in flight, with its memory: the caller's input, the partial result and the result.

An operation carries out what its machine decides: it folds, stores and copies chunks, and shows links the
bytes to send. Partial results are kept in the result's own memory where that can be (the same dtype, and the
rank keeps every chunk that it folds); else in scratch memory of the accumulation dtype.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kfcomm.core.collective import Collective
from kfcomm.core.machine import INPUT, PARTIAL, RESULT
from kfcomm.core.program import Lane
from kfcomm.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kfcomm.reduce import Kernel
    from kfcomm.runtime.buffers import Payload
    from kfcomm.runtime.engine import Engine

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Reserve: TypeAlias = "Callable[[Operation, int, int], memoryview | None]"
"""From an operation, a group rank and a number of bytes to memory that its link sends from, if there is any."""

COPIED_NBYTES = 1 << 11
"""A chunk up to this size is sent from a copy: 0.1 µs, where a view costs 0.3 and the garbage collector two objects."""

_NOTHING = np.empty(0, np.uint8)
_EMPTY = memoryview(b"")


class Operation(Collective):
    """A collective and its memory. It owns what links read for it: see ``transports.base.Owner``.

    It is one object with its machine, and it and its future let go of each other at the end: ten thousand of them in
    flight are half the work for the garbage collector, and no work at all when they are over.

    Args:
        future: resolved with what the caller gets, or rejected. Its slot ``operation`` is emptied at the end.
        source: flat input, or None where this rank gives nothing.
        result: flat memory of the result, or None where this rank keeps nothing.
        kernel: how contributions are folded, or None for verbs that only move data.
        dtype: of both, or None where there is no data.
        size: number of contributions (for averages).
        in_result: this rank keeps every chunk that it folds, so that partial results may live in ``result``.
        value: what the caller gets.
        outcome: if given, the caller gets ``outcome(value)``.
        priority: see ``transports.base.Link.send``.

    Attributes:
        engine: set when it is posted.
        failed: an error was raised for it; nothing touches its memory any more.
        posted_s: when it was made, by the monotonic clock.
        heard_s: when a chunk for it came last, or else it was posted; kept up by the meter alone.
    """

    __slots__ = (
        "_in",
        "_in_view",
        "_item",
        "_kernel",
        "_last",
        "_out",
        "_out_view",
        "_partial",
        "_partial_shared",
        "_partial_view",
        "_size",
        "engine",
        "failed",
        "future",
        "heard_s",
        "outcome",
        "posted_s",
        "priority",
        "value",
    )  # fmt: skip

    def __init__(
        self,
        future: Any,
        *,
        source: Array | None,
        result: Array | None,
        kernel: Kernel | None,
        dtype: np.dtype[Any] | None,
        size: int,
        in_result: bool,
        value: Any = None,
        outcome: Callable[[Any], Any] | None = None,
        priority: int = 0,
    ) -> None:
        self.future = future
        self.value = value
        self.outcome = outcome
        self.priority = priority
        self.engine: Engine
        self.failed = False
        self.posted_s = self.heard_s = time.monotonic()
        self._in = _NOTHING if source is None else source
        self._out = _NOTHING if result is None else result
        self._item = 1 if dtype is None else dtype.itemsize
        self._kernel = kernel
        self._size = size
        self._partial_shared = in_result and kernel is not None and kernel.accumulate_dtype == kernel.dtype
        self._partial: Array | None = self._out if self._partial_shared else None
        self._in_view: memoryview | None
        self._partial_view: memoryview | None
        self._out_view: memoryview | None
        self._last: tuple[Lane, int, int, memoryview] | None
        self._in_view = self._partial_view = self._out_view = self._last = None

    def sent(self) -> None:
        """A link no longer reads one of this operation's payloads."""
        self.engine.sent(self)

    def waited_s(self) -> float:
        """Seconds since it was posted."""
        return time.monotonic() - self.posted_s

    @property
    def nbytes(self) -> int:
        """Bytes of the result on this rank, or of the input where it gets none."""
        return self._out.nbytes or self._in.nbytes

    @property
    def is_over(self) -> bool:
        """Whether it is complete or has failed."""
        return self.future is None

    def resolve(self) -> None:
        """It is complete: hand the outcome to whoever waits."""
        future, self.future = self.future, None
        future.operation = None
        if future.done():
            return
        try:
            outcome = self.value if self.outcome is None else self.outcome(self.value)
        except Exception as error:  # noqa: BLE001  of the caller's array library: it belongs to the caller, not to this loop
            future.set_exception(error)
        else:
            future.set_result(outcome)

    def reject(self, error: BaseException) -> None:
        """It failed: tell whoever waits, and touch no memory any more."""
        self.failed = True
        future, self.future = self.future, None
        future.operation = None
        if not future.done():
            future.set_exception(error)

    def to_send(self, lane: Lane, index: int, source: int) -> memoryview | bytes:
        """The bytes of one chunk, to be read by links: a copy of them if they are few."""
        start, stop = self._bounds(lane, index)
        if (stop - start) * self._item > COPIED_NBYTES:
            return self.bytes_of(lane, index, source)
        return self._part(lane, source, start, stop).tobytes() if stop else b""

    def bytes_of(self, lane: Lane, index: int, source: int) -> memoryview:
        """The memory of one chunk of the input, the partial result or the result.

        The same view again when it was asked for last: by that links know that one copy serves several peers.
        """
        if not lane.count:
            return _EMPTY
        last = self._last
        if last is not None and last[1] == index and last[0] is lane and last[2] == source:
            return last[3]
        item = self._item
        if source == INPUT:
            view = self._in_view
            if view is None:
                view = self._in_view = self._in.view(np.uint8).data
        elif source == RESULT or self._partial_shared:
            view = self._out_view
            if view is None:
                view = self._out_view = self._out.view(np.uint8).data
        else:
            item = self._folding().accumulate_dtype.itemsize
            view = self._partial_view
            if view is None:
                view = self._partial_view = self._array(PARTIAL).view(np.uint8).data
        start, stop = self._bounds(lane, index)
        offset = self._offset(lane, source)
        view = view[(offset + start) * item : (offset + stop) * item]
        self._last = (lane, index, source, view)
        return view

    def fold(self, lane: Lane, index: int, payload: Payload, first: bool) -> None:
        """Make the partial result: (input if first else partial) ∘ payload."""
        start, stop = self._bounds(lane, index)
        partial = self._part(lane, PARTIAL, start, stop)
        own = self._part(lane, INPUT, start, stop) if first else partial
        kernel = self._kernel or self._folding()
        kernel.fold(own, self._contribution(kernel, payload, stop - start), partial)

    def fold_up(self, lane: Lane, index: int, payload: Payload, first: bool, reserve: Reserve) -> None:
        """As ``fold``, for a partial result that is complete and goes to the lane's parent next.

        It is made where the link sends from, if the link has room: then nothing is copied.
        """
        start, stop = self._bounds(lane, index)
        kernel = self._kernel or self._folding()
        nbytes = (stop - start) * kernel.accumulate_dtype.itemsize
        room = reserve(self, lane.parent, nbytes) if nbytes > COPIED_NBYTES else None
        if room is None:
            self.fold(lane, index, payload, first)
            return
        own = self._part(lane, INPUT if first else PARTIAL, start, stop)
        made = np.frombuffer(room, kernel.accumulate_dtype)
        kernel.fold(own, self._contribution(kernel, payload, stop - start), made)
        self._last = (lane, index, PARTIAL, room)

    def fold_last(self, lane: Lane, index: int, payload: Payload, first: bool) -> None:
        """Make the result: (input if first else partial) ∘ payload, finished."""
        start, stop = self._bounds(lane, index)
        own = self._part(lane, INPUT if first else PARTIAL, start, stop)
        result = self._part(lane, RESULT, start, stop)
        kernel = self._kernel or self._folding()
        kernel.last(own, self._contribution(kernel, payload, stop - start), result, self._size)

    def finish(self, lane: Lane, index: int) -> None:
        """Make the result of the input, the only contribution."""
        start, stop = self._bounds(lane, index)
        source = self._part(lane, INPUT, start, stop)
        self._folding().finish(source, self._part(lane, RESULT, start, stop), self._size)

    def store(self, lane: Lane, index: int, payload: Payload) -> None:
        """Make the result of a payload, unless it arrived there."""
        if payload.owner is not self and lane.count:
            start, stop = self._bounds(lane, index)
            result = self._part(lane, RESULT, start, stop)
            result[:] = np.frombuffer(payload.view, result.dtype)

    def copy(self, lane: Lane, index: int) -> None:
        """Make the result of the input."""
        if lane.count:
            start, stop = self._bounds(lane, index)
            self._part(lane, RESULT, start, stop)[:] = self._part(lane, INPUT, start, stop)

    def _bounds(self, lane: Lane, index: int) -> tuple[int, int]:
        """The elements of a chunk, counted from the beginning of its lane."""
        if lane.num_chunks == 1:
            return 0, lane.count
        chunk = self.program.chunk_elements
        start = index * chunk
        return start, min(start + chunk, lane.count)

    @staticmethod
    def _contribution(kernel: Kernel, payload: Payload, count: int) -> Array:
        """What ``count`` elements of a child are: its input, or a partial result."""
        view = payload.view
        dtype = kernel.dtype if view.nbytes == count * kernel.dtype.itemsize else kernel.accumulate_dtype
        return np.frombuffer(view, dtype)

    def _folding(self) -> Kernel:
        if self._kernel is None:
            raise InternalError("a verb that does not reduce was given something to fold")
        return self._kernel

    def _array(self, source: int) -> Array:
        if source == INPUT:
            return self._in
        if source == PARTIAL:
            if self._partial is None:
                self._partial = np.empty(self._in.size, self._folding().accumulate_dtype)
            return self._partial
        return self._out

    def _offset(self, lane: Lane, source: int) -> int:
        if source == INPUT or (source == PARTIAL and not self._partial_shared):
            return lane.input_offset
        return lane.result_offset

    def _part(self, lane: Lane, source: int, start: int, stop: int) -> Array:
        array = self._in if source == INPUT else self._out if source == RESULT else self._partial
        if array is None:
            array = self._array(source)
        if stop - start == array.size:  # all of it: a slice costs 0.15 µs
            return array
        offset = self._offset(lane, source)
        return array[offset + start : offset + stop]
