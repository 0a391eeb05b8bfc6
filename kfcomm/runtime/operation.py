"""The memory of one collective in flight: the caller's input, the partial result and the result.

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

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_NOTHING = np.empty(0, np.uint8)
_EMPTY = memoryview(b"")


class Operation:
    """One posted collective and its memory. It owns what links read for it: see ``transports.base.Owner``.

    Args:
        future: resolved with ``outcome()``, or rejected; anything with the methods of a future.
        source: flat input, or None where this rank gives nothing.
        result: flat memory of the result, or None where this rank keeps nothing.
        kernel: how contributions are folded, or None for verbs that only move data.
        dtype: of both, or None where there is no data.
        size: number of contributions (for averages).
        in_result: this rank keeps every chunk that it folds, so that partial results may live in ``result``.
        outcome: makes what the caller gets.
        priority: see ``transports.base.Link.send``.

    Attributes:
        collective: the machine; set when it is posted.
        failed: an error was raised for it; nothing touches its memory any more.
    """

    __slots__ = (
        "_chunk",
        "_dtype",
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
        "collective",
        "failed",
        "future",
        "on_sent",
        "outcome",
        "posted_s",
        "priority",
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
        outcome: Callable[[], Any],
        priority: int = 0,
    ) -> None:
        self.future = future
        self.outcome = outcome
        self.priority = priority
        self.collective: Collective
        self.failed = False
        self.on_sent: Callable[[Operation], None]
        self.posted_s = time.monotonic()
        self._in = _NOTHING if source is None else source
        self._out = _NOTHING if result is None else result
        self._dtype = dtype
        self._item = 1 if dtype is None else dtype.itemsize
        self._kernel = kernel
        self._size = size
        self._chunk = 0
        self._partial_shared = in_result and kernel is not None and kernel.accumulate_dtype == kernel.dtype
        self._partial: Array | None = self._out if self._partial_shared else None
        self._in_view: memoryview | None = None
        self._partial_view: memoryview | None = None
        self._out_view: memoryview | None = None
        self._last: tuple[Lane, int, int, memoryview] | None = None

    def sent(self) -> None:
        """A link no longer reads one of this operation's payloads."""
        self.on_sent(self)

    def waited_s(self) -> float:
        """Seconds since it was posted."""
        return time.monotonic() - self.posted_s

    def resolve(self) -> None:
        """It is complete: hand the outcome to whoever waits."""
        if self.future.done():
            return
        try:
            outcome = self.outcome()
        except Exception as error:  # noqa: BLE001  of the caller's array library: it belongs to the caller, not to this loop
            self.future.set_exception(error)
        else:
            self.future.set_result(outcome)

    def reject(self, error: BaseException) -> None:
        """It failed: tell whoever waits, and touch no memory any more."""
        self.failed = True
        if not self.future.done():
            self.future.set_exception(error)

    def bind(self, collective: Collective) -> None:
        """Take the collective that was posted for this operation."""
        self.collective = collective
        self._chunk = collective.program.chunk_elements

    def bytes_of(self, lane: Lane, index: int, source: int) -> memoryview:
        """The bytes of one chunk of the input, the partial result or the result.

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
        start = index * self._chunk
        stop = min(start + self._chunk, lane.count)
        offset = self._offset(lane, source)
        view = view[(offset + start) * item : (offset + stop) * item]
        self._last = (lane, index, source, view)
        return view

    def fold(self, lane: Lane, index: int, payload: Payload, first: bool) -> None:
        """Make the partial result: (input if first else partial) ∘ payload."""
        start = index * self._chunk
        stop = min(start + self._chunk, lane.count)
        partial = self._part(lane, PARTIAL, start, stop)
        own = self._part(lane, INPUT, start, stop) if first else partial
        self._folding().fold(own, self._contribution(payload, stop - start), partial)

    def fold_last(self, lane: Lane, index: int, payload: Payload, first: bool) -> None:
        """Make the result: (input if first else partial) ∘ payload, finished."""
        start = index * self._chunk
        stop = min(start + self._chunk, lane.count)
        own = self._part(lane, INPUT if first else PARTIAL, start, stop)
        result = self._part(lane, RESULT, start, stop)
        self._folding().last(own, self._contribution(payload, stop - start), result, self._size)

    def finish(self, lane: Lane, index: int) -> None:
        """Make the result of the input, the only contribution."""
        start = index * self._chunk
        stop = min(start + self._chunk, lane.count)
        source = self._part(lane, INPUT, start, stop)
        self._folding().finish(source, self._part(lane, RESULT, start, stop), self._size)

    def store(self, lane: Lane, index: int, payload: Payload) -> None:
        """Make the result of a payload, unless it arrived there."""
        if payload.owner is not self:
            self.bytes_of(lane, index, RESULT)[:] = payload.view

    def copy(self, lane: Lane, index: int) -> None:
        """Make the result of the input."""
        self.bytes_of(lane, index, RESULT)[:] = self.bytes_of(lane, index, INPUT)

    def _contribution(self, payload: Payload, count: int) -> Array:
        """What ``count`` elements of a child are: its input, or a partial result."""
        kernel = self._folding()
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
        offset = self._offset(lane, source)
        return self._array(source)[offset + start : offset + stop]
