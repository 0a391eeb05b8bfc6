"""Hooks on the steps of an optimizer that count once, whatever its class is made of.

torch calls the hooks in the ``step`` of every class: a subclass that calls ``super().step()`` has them called twice.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

HOOKED_CODE = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def is_outermost(optimizer: torch.optim.Optimizer) -> bool:
    """Within a hook on steps: whether it belongs to the step that the program has called."""
    frame: Any = sys._getframe(1)
    count = 0
    while frame is not None:
        if frame.f_code is HOOKED_CODE and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count < 2
