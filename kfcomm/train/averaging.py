"""How models are averaged: formulas for one array, of any kind that has arithmetic. Pure."""

from __future__ import annotations

from typing import Any


def towards(x: Any, mean: Any, alpha: float) -> Any:
    """A step of the way from a rank's model to the mean of all: x − α(x − mean).

    Crossbow's synchronous model averaging (Koliousis et al., VLDB 2019, https://arxiv.org/abs/1901.02244), as KungFu
    has it: [1, 3, 5, 7] with α = 0.1 becomes [1.3, 3.1, 4.9, 6.7]. With α = 1 it is the mean; with 1/2, and another
    model in place of the mean, AD-PSGD's.
    """
    moved = mean - x
    moved *= alpha
    moved += x
    return moved


def elastic(x: Any, center: Any, mean: Any, alpha: float, size: int) -> tuple[Any, Any]:
    """A rank's model and the center, each drawn to the other: x − α(x − z) and z + αΣ(x_i − z).

    Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015,
    https://arxiv.org/abs/1412.6651, equations 3 and 4. The sum is n(mean − z), so that the mean is all that travels,
    and every rank keeps the same center.

    Args:
        x: a rank's array.
        center: z.
        mean: of all ranks' arrays.
        alpha: α.
        size: n.

    Returns:
        The rank's array and the center, both from the old ones.
    """
    return towards(x, center, alpha), towards(center, mean, alpha * size)
