"""Local AdaAlter: formulas for one array, of any kind that has arithmetic. Pure.

Xie, Koyejo, Gupta, Lin, "Local AdaAlter: Communication-Efficient Stochastic Gradient Descent with Adaptive Learning
Rates", 2019, https://arxiv.org/abs/1911.09030, algorithm 4. AdaGrad whose denominators must not differ between ranks,
though these meet at every H-th step only: between two meetings the denominator is the accumulator of the last one plus
t·ε², whatever a rank has seen since.
"""

from __future__ import annotations

from typing import Any


def direction(gradient: Any, accumulated: Any, num_local: int, epsilon: float) -> Any:
    """The quotient g / √(B² + t ε²): what is to be multiplied by the learning rate and subtracted.

    Args:
        gradient: g, of this rank.
        accumulated: B², averaged over the ranks at their last meeting.
        num_local: t, the steps since then, this one included.
        epsilon: ε.
    """
    return gradient / (accumulated + num_local * epsilon**2) ** 0.5


def accumulate(local: Any, gradient: Any) -> Any:
    """A² + g∘g: what a rank brings to the next meeting."""
    return local + gradient * gradient
