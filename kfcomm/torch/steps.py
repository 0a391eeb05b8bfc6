"""Steps of an optimizer: hooks that run once per step, steps with a closure, and steps of some of its parameters.

torch calls the hooks on steps in the ``step`` of every class: a subclass that calls ``super().step()`` runs them twice.

A step can be divided by parameters if the update of each needs only its gradient and the optimizer's state of it. That
holds for all optimizers of torch that need no closure, and for subclasses without a ``step`` of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kfcomm.torch.buckets import Place

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


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step, as a pre-hook gets them (``args[0]`` is the optimizer)."""
    found: Callable[[], Any] | None = kwargs.get("closure") if len(args) < 2 else args[1]
    return found


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """The arguments of a step with another closure in the place of the program's, for a pre-hook to return."""
    if len(args) < 2:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def mean_loss(comm: Any, loss: Any, name: str) -> Any:
    """The mean of all ranks' losses, as a tensor or a number like ``loss``.

    Code that looks at a loss, as a line search does, has to reach the same decision on all ranks.
    """
    found = comm.all_reduce(torch.as_tensor(loss).detach(), name=name, op="avg")
    return found if isinstance(loss, torch.Tensor) else float(found)


class Updates:
    """Steps of one optimizer, made later and in parts, as if they were made when the program asked.

    The options of the groups are copied at that time: a scheduler changes learning rates right after a step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        hooked = type(optimizer).step
        self._step = getattr(hooked, "__wrapped__", hooked)
        """The step without its hooks, which are for the program's own call."""
        self._groups: list[dict[str, Any]] = []

    def ask(self) -> None:
        """Copy the options of the groups, for a step that the program asks for now."""
        self._groups = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    def do(self, places: Collection[Place]) -> None:
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
