"""Backward passes as autograd runs them: the end of each, and its failure.

Autograd calls a callback that a hook has queued when the graph task is complete, and drops it uncalled when the pass
raises, which the callback's destructor notices. A pass within a pass (activation checkpointing with
``use_reentrant=True``) is a graph task of its own on the same stack. Its callbacks are dropped when it is complete, at
which time the outer task is the current one again, and are queued on that.
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
        end: called when the outermost pass is complete; ``backward()`` raises its errors.
        settle: called after every registered ``end`` of this pass, in the same way.
        fail: called when the outermost pass has raised; must not raise.
    """

    def __init__(self, end: Callable[[], None], settle: Callable[[], None], fail: Callable[[], None]) -> None:
        self._end, self._settle, self._fail = end, settle, fail
        self._is_inner: dict[int, bool] = {}
        """By the id of a graph task."""

    def join(self) -> bool:
        """Register the end of this pass, within a hook; returns whether it is a pass within another."""
        task = torch._C._current_graph_task_id()
        known = self._is_inner.get(task)
        return self._queue(task, _depth() > 1) if known is None else known

    def _queue(self, task: int, is_inner: bool) -> bool:
        # A graph task has hooks for each of its gradients, and one callback.
        self._is_inner[task] = is_inner
        queue_callback(_Ending(self, is_inner))
        return is_inner

    def over(self) -> None:
        """Handle the end of the outermost pass."""
        self._is_inner.clear()
        self._end()
        queue_callback(_Settling(self._settle, self._fail))

    def dropped(self, *, is_inner: bool, is_over: bool) -> None:
        """Handle the end of a graph task, complete or not."""
        if not is_inner:
            if not is_over:
                self._is_inner.clear()
                self._fail()
            return
        task = torch._C._current_graph_task_id()
        if task != NO_TASK and task not in self._is_inner:
            self._queue(task, _depth() > 2)  # the inner one is still on the stack


class _Ending:
    """Callback that autograd keeps until a graph task is complete."""

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
    """Number of backward passes on the stack of this thread."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is BACKWARD_CODE
        frame = frame.f_back
    return count
