"""Adasum: the formula. Pure, scalars in, scalars out.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, https://arxiv.org/abs/2006.02924, as
Horovod's ``adasum.h`` has it. Two gradients a and b become

    (1 − a·b / 2|a|²) a + (1 − a·b / 2|b|²) b,

their sum where they are orthogonal and their mean where they are parallel. Of n ranks (0, 1), (2, 3), ... are combined
first, then pairs of pairs; a rank that is left over passes to the next round unchanged.

Each combination is a sum of the ranks' gradients with coefficients that depend on their inner products alone. So the
products of all pairs of ranks determine the result of the whole tree.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

LEAST_SQ_NORM = float(np.sqrt(np.finfo(np.float64).tiny))
"""A shorter gradient counts as zero: its coefficient is 1, as in Horovod."""
ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""A combination whose terms cancel down to this fraction of them is zero up to rounding."""


def adasum_weights(products: Matrix) -> Matrix:
    """w, so that the Adasum of all ranks' gradients is Σ w_i g_i.

    Args:
        products: g_i·g_j for each pair of ranks, a symmetric matrix.

    Returns:
        A number for each rank.
    """
    combined = list(np.eye(len(products)))
    while len(combined) > 1:
        pairs = [_pair(one, other, products) for one, other in zip(combined[::2], combined[1::2], strict=False)]
        combined = pairs + combined[len(pairs) * 2 :]
    return combined[0]


def _pair(a: Matrix, b: Matrix, products: Matrix) -> Matrix:
    """The coefficients of two combinations' Adasum."""
    together = float(a @ products @ b)
    return _coefficient(together, a, products) * a + _coefficient(together, b, products) * b


def _coefficient(together: float, a: Matrix, products: Matrix) -> float:
    sq_norm = float(a @ products @ a)
    if sq_norm < LEAST_SQ_NORM or sq_norm <= ROUNDING * float(abs(a) @ abs(products) @ abs(a)):
        return 1.0
    return 1 - together / (2 * sq_norm)
