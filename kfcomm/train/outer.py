"""The outer optimizer of DiLoCo: formulas for one array, of any kind that has arithmetic. Pure.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
https://arxiv.org/abs/2311.08105, algorithm 1: what the ranks have come from the global model in H local steps is taken
for a gradient, and Nesterov's momentum is applied to that.
"""

from __future__ import annotations

from typing import Any


def pseudo_gradient(start: Any, mean: Any) -> Any:
    """Δ: the mean over the ranks of (global − local), which is global − mean(local)."""
    return start - mean


def nesterov(x: Any, velocity: Any, gradient: Any, lr: float, momentum: float) -> tuple[Any, Any]:
    """One step: v ← μv + g, x ← x − lr (g + μv), as ``torch.optim.SGD(nesterov=True)`` has it.

    With lr 0.7 and μ 0.9 a constant gradient of 1 takes 0 to −1.33, −3.227, −5.6343.

    Returns:
        The array and its velocity, both new.
    """
    faster = momentum * velocity + gradient
    return x - lr * (gradient + momentum * faster), faster
