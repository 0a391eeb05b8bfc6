"""Backward passes as autograd runs them: when one is over, and when it has failed.

Autograd calls what a hook has queued on its graph task when that is over, and drops it uncalled where the pass raises:
a destructor sees that. A pass within a pass (activation checkpointing with ``use_reentrant=True``) is a graph task of
its own on the same stack; what it has queued is dropped when it is over, while the outer task is the current one again,
and is queued on that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.autograd.graph import _engine_run_backward

BACKWARD_CODE = _engine_run_backward.__code__
NO_TASK = -1
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class Passes:
    """The backward passes of one thread.

    Args:
        end: called when the outermost pass is over; what it raises, ``backward()`` raises.
        settle: called after every registered ``end`` of this pass, in the same way.
        fail: called when the outermost pass has raised; it may not raise.
    """

    def __init__(self, end: Callable[[], None], settle: Callable[[], None], fail: Callable[[], None]) -> None:
        self._end, self._settle, self._fail = end, settle, fail
        self._is_inner: dict[int, bool] = {}
        """By the number of a graph task."""

    def join(self) -> bool:
        """Register the end of this pass, within a hook; returns whether it is a pass within another."""
        task = torch._C._current_graph_task_id()
        known = self._is_inner.get(task)
        return self._queue(task, _depth() > 1) if known is None else known

    def _queue(self, task: int, is_inner: bool) -> bool:
        self._is_inner[task] = is_inner
        queue_callback(_Ending(self, is_inner))
        return is_inner

    def over(self) -> None:
        """The outermost pass has reached its end."""
        self._is_inner.clear()
        self._end()
        queue_callback(_Settling(self._settle, self._fail))

    def dropped(self, *, is_inner: bool, is_over: bool) -> None:
        """A graph task is gone."""
        if not is_inner:
            if not is_over:
                self._is_inner.clear()
                self._fail()
            return
        task = torch._C._current_graph_task_id()
        if task != NO_TASK and task not in self._is_inner:
            self._queue(task, _depth() > 2)  # the inner one is on the stack yet


class _Ending:
    """Callback that autograd keeps until a graph task is over."""

    def __init__(self, passes: Passes, is_inner: bool) -> None:
        self._passes = passes
        self._is_inner = is_inner
        self._is_over = False

    def __call__(self) -> None:
        self._is_over = True
        if not self._is_inner:
            self._passes.over()

    def __del__(self) -> None:
        self._passes.dropped(is_inner=self._is_inner, is_over=self._is_over)


class _Settling:
    """Callback that autograd calls after all registered ends of a pass, unless one of these has raised."""

    def __init__(self, settle: Callable[[], None], fail: Callable[[], None]) -> None:
        self._settle, self._fail = settle, fail
        self._is_called = False

    def __call__(self) -> None:
        self._is_called = True
        self._settle()

    def __del__(self) -> None:
        if not self._is_called:
            self._fail()


def _depth() -> int:
    """How many backward passes are on the stack of this thread."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is BACKWARD_CODE
        frame = frame.f_back
    return count
