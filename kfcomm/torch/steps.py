"""The points of a training step at which torch calls us: the ends of backward passes, and an optimizer's steps.

*Backward passes.* Autograd calls a callback that a hook has queued when the graph task is complete, and drops it
uncalled when the pass raises, which the callback's destructor notices. A pass within a pass (activation checkpointing
with ``use_reentrant=True``) is a graph task of its own on the same stack. Its callbacks are dropped when it is
complete, at which time the outer task is the current one again, and are queued on that. Nodes of a device run on a
thread of autograd's own, on whose stack the outermost pass is not.

*Steps.* torch calls the hooks on steps in the ``step`` of every class: a subclass that calls ``super().step()`` runs
them twice. A step can be divided by parameters if the update of each needs only its gradient and the optimizer's state
of it. That holds for all optimizers of torch that need no closure, and for subclasses without a ``step`` of their own.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.graph import _engine_run_backward

from kfcomm.torch.compiling import uncompiled

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kfcomm.torch.buckets import BucketPlace

BACKWARD_CODE = _engine_run_backward.__code__
NO_TASK = -1
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class Passes:
    """The backward passes of one thread. ``has_workers``: some nodes run on autograd's own threads."""

    def __init__(
        self, end: Callable[[], None], settle: Callable[[], None], fail: Callable[[], None], *,
        has_workers: bool = False,
    ) -> None:  # fmt: skip
        # After the outermost pass: ``end``, then, after the ends of all exchanges, ``settle``; ``backward()`` raises
        # their errors. If the pass has raised: ``fail``, which must not.
        self._end, self._settle, self._fail = end, settle, fail
        self._has_workers = has_workers
        self._lock = threading.Lock()  # nodes of a device and of the host run at the same time
        self._is_inner: dict[int, bool] = {}  # by the id of a graph task

    def join(self) -> bool:
        """Register the end of this pass, within a hook; returns whether it is a pass within another."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            known = self._is_inner.get(task)
            return self._queue(task, self._is_within(1)) if known is None else known

    def _is_within(self, passes: int) -> bool:
        """Whether there are more passes than these on the stack; that of autograd's own threads lacks the outermost."""
        is_worker = self._has_workers and type(threading.current_thread()) is threading._DummyThread
        return _depth() + is_worker > passes

    def _queue(self, task: int, is_inner: bool) -> bool:
        # A graph task has hooks for each of its gradients, and one callback.
        self._is_inner[task] = is_inner
        queue_callback(_StepEnding(self, is_inner))
        return is_inner

    def over(self) -> None:
        """Handle the end of the outermost pass."""
        self._is_inner.clear()
        # All exchanges send before one waits: else another model's gradients would leave only after this one's came.
        self._end()
        queue_callback(PassEnding(self._settle, self._fail))

    def dropped(self, *, is_inner: bool, is_over: bool) -> None:
        """Handle the end of a graph task, complete or not."""
        if not is_inner:
            if not is_over:
                self._is_inner.clear()
                self._fail()
            return
        task = torch._C._current_graph_task_id()
        if task != NO_TASK and task not in self._is_inner:
            self._queue(task, self._is_within(2))  # the inner one is still on the stack


class _StepEnding:
    """Callback that autograd keeps until a graph task is complete."""

    def __init__(self, passes: Passes, is_inner: bool) -> None:
        self._passes = passes
        self._is_inner = is_inner
        self._is_over = False

    @uncompiled
    def __call__(self) -> None:
        self._is_over = True
        if not self._is_inner:
            self._passes.over()

    # A pass that raises calls no callback; autograd only drops them.
    @uncompiled
    def __del__(self) -> None:
        self._passes.dropped(is_inner=self._is_inner, is_over=self._is_over)


class PassEnding:
    """Callback of autograd at the end of a pass: ``settle``, or ``fail`` where it is dropped as the pass has raised."""

    def __init__(self, settle: Callable[[], None], fail: Callable[[], None]) -> None:
        self._settle, self._fail = settle, fail
        self._is_called = False

    @uncompiled
    def __call__(self) -> None:
        """Settle."""
        self._is_called = True
        self._settle()

    @uncompiled
    def __del__(self) -> None:
        if not self._is_called:
            self._fail()


def called_by_pass() -> bool:
    """Whether the caller was called from C++ by a node of a backward pass that is not within another one."""
    frame = sys._getframe(1).f_back  # none on autograd's own threads
    if frame is None or frame.f_code is not BACKWARD_CODE or _depth() > 1:
        return False
    return torch._C._current_autograd_node() is not None  # else by a callback at the end of the pass


def _depth() -> int:
    """Number of backward passes on the stack of this thread."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is BACKWARD_CODE
        frame = frame.f_back
    return count


Closure: TypeAlias = Callable[[], Any]
HOOKED_CODE = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def is_outermost(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook on steps is called for the program's own ``step()``, not for a ``super().step()`` within it."""
    frame: Any = sys._getframe(1)
    count = 0
    while frame is not None:
        if frame.f_code is HOOKED_CODE and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count < 2


def is_divisible(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step can be made for some parameters at a time."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def hook_steps(
    optimizer: torch.optim.Optimizer, before: Callable[[], object], around: Callable[[], Callable[[Closure], Any]]
) -> RemovableHandle:
    """Take part in each step that the program makes: the one place where an exchange meets an optimizer.

    ``before`` is called before a step without a closure; after it gradients and parameters are final. ``around`` is
    called before a step with one, and returns a function that evaluates it, to the loss that the optimizer sees.
    """

    @uncompiled
    def hook(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if not is_outermost(optimizer):
            return None
        # As torch calls pre-hooks: args[0] is the optimizer.
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            before()
            return None
        closed = partial(around(), closure)

        if len(args) < 2:
            return args, {**kwargs, "closure": closed}
        return (args[0], closed, *args[2:]), kwargs

    return optimizer.register_step_pre_hook(hook)


def mean_loss(comm: Any, loss: Any, name: str) -> Any:
    """The mean of all ranks' losses, as a tensor or a number like ``loss``."""
    # Code that looks at a loss, as a line search does, has to reach the same decision on all ranks.
    if loss is None:
        return None
    # In host memory, since that code reads it; and there it survives the loss of a rank.
    found = comm.all_reduce(torch.as_tensor(loss).detach().cpu(), name=name, op="avg")
    return found.to(loss.device) if isinstance(loss, torch.Tensor) else float(found)


class Updates:
    """Steps of one optimizer, made later and in parts, as if they were made when the program asked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        hooked = type(optimizer).step
        # Without its hooks, which are for the program's own call
        self._step = getattr(hooked, "__wrapped__", hooked)
        self._groups: list[dict[str, Any]] = []

    def ask(self) -> None:
        """Copy the options of the groups, for a step that the program asks for now."""
        # A scheduler changes learning rates right after a step, which is made only later.
        self._groups = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    def do(self, places: Collection[BucketPlace]) -> None:
        """Make the step for these parameters, with the gradients in their places."""
        wanted = {place.parameter for place in places}
        parts = [[one for one in group["params"] if one in wanted] for group in self._groups]
        groups = [{**group, "params": part} for group, part in zip(self._groups, parts, strict=True) if part]
        if not groups:
            return
        # torch's ``step`` reads its groups and ``parameter.grad``: both are replaced for the time of the call.
        all_groups, gradients = self._optimizer.param_groups, [place.parameter.grad for place in places]
        try:
            for place in places:
                place.parameter.grad = place.view
            self._optimizer.param_groups = groups
            with torch.inference_mode(mode=False):
                self._step(self._optimizer)
        finally:
            self._optimizer.param_groups = all_groups
            for place, gradient in zip(places, gradients, strict=True):
                place.parameter.grad = gradient


SCALED_CODE = torch.amp.GradScaler.step.__code__


def loss_scale(optimizer: torch.optim.Optimizer) -> float:
    """The factor of the loss whose gradients the exchange has seen: of a ``GradScaler`` whose step calls; 1 without."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # A scaler tells an optimizer nothing about itself, unless the optimizer is fused.
        if frame.f_code is SCALED_CODE and frame.f_locals.get("optimizer") is optimizer:
            scaler = frame.f_locals["self"]
            return float(scaler.get_scale()) if scaler.is_enabled() else 1.0
        frame = frame.f_back
    return 1.0


def is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of a fused optimizer will do nothing, since a ``GradScaler`` has found infinite gradients."""
    found: Any = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


class Withholding:
    """Steps of an optimizer that update nothing: its groups have no parameters meanwhile."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Take the parameters away."""
        # Rather than gradients of None, for which optimizers of the program's own may still decay their weights.
        if self._groups is None:
            self._groups = self._optimizer.param_groups
            self._optimizer.param_groups = [{**group, "params": []} for group in self._groups]

    def end(self) -> None:
        """Give them back."""
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None


class ModelCopy:
    """Copy of an optimizer's parameters and state, for a step with a closure, which may update before it is judged."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        each = [one for group in optimizer.param_groups for one in group["params"]]
        self._values = [(one, one.detach().clone()) for one in each]
        self._state = {one: copy.deepcopy(state) for one, state in optimizer.state.items()}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def put_back(self) -> None:
        """Make parameters and state what they were."""
        for parameter, value in self._values:
            parameter.copy_(value)
        state = self._optimizer.state
        state.clear()
        state.update(self._state)
