"""The optimizer's step for some parameters, later than the program asked for it, as if it were then.

Each update of a parameter needs its gradient and the optimizer's state of this parameter alone: true of all optimizers
of torch that need no closure, and of subclasses that have no ``step`` of their own. What the groups said when the
program asked (learning rates, which a scheduler changes right after) is kept for them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from kfcomm.torch.buckets import Place


def is_divisible(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step can be made for some parameters at a time."""
    step = type(optimizer).step
    return step.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


class Updates:
    """Steps of one optimizer in parts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        hooked = type(optimizer).step
        self._step = getattr(hooked, "__wrapped__", hooked)
        """Without the hooks on steps, which are for the program's own call."""
        self._groups: list[dict[str, Any]] = []

    def ask(self) -> None:
        """The program asks for a step now: keep what the groups say."""
        self._groups = [
            {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    def do(self, places: Collection[Place]) -> None:
        """The step for these parameters, with what is in their places."""
        wanted = {place.parameter for place in places}
        parts = [[one for one in group["params"] if one in wanted] for group in self._groups]
        groups = [{**group, "params": part} for group, part in zip(self._groups, parts, strict=True) if part]
        if not groups:
            return
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
