"""Squared norms of arrays in host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kfcomm.arrays import adapt

BLOCK = 1 << 16
"""Elements whose squares are added in the array's own precision, for float32 to about 1e-6; blocks are in float64."""


def squared_norm(arrays: Iterable[Any]) -> float:
    """Σ x² over all elements of arrays in host memory; infinite or NaN where an element is, without a warning."""
    # One pass: about 5 ms for 25 million elements of float32.
    return float(sum(_of_one(adapt(x).flat) for x in arrays))


@np.errstate(all="ignore")
def _of_one(flat: np.ndarray[Any, Any]) -> float:
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    # Squares of float16 overflow above 256, and bfloat16 loses most of its digits in a sum.
    dtype = flat.dtype if flat.dtype in (np.float32, np.float64) else np.dtype(np.float32)
    blocks = (flat[at : at + BLOCK].astype(dtype, copy=False) for at in range(0, flat.size, BLOCK))
    return float(sum(float(np.dot(block, block)) for block in blocks))
