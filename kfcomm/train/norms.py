"""Squared norms of arrays, quickly. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kfcomm.arrays import adapt

BLOCK = 1 << 16
"""Elements whose squares are added in the array's own precision, for float32 to about 1e-6; blocks are in float64."""


def squared_norm(arrays: Iterable[Any]) -> float:
    """Σ x² over all elements of all arrays, which are in host memory.

    Infinite or NaN where an element is, without a warning.

    Cost: one pass over them: about 5 ms for 25 million elements of float32.
    """
    return float(sum(_of_one(adapt(x).flat) for x in arrays))


def share(arrays: Iterable[Any], part: int, parts: int) -> list[np.ndarray[Any, Any]]:
    """One of ``parts`` shares of all elements, end to end: views of the arrays that it touches. Sizes differ by one."""
    flats = [adapt(x).flat for x in arrays]
    total = sum(flat.size for flat in flats)
    first, end, at = part * total // parts, (part + 1) * total // parts, 0
    found = []
    for flat in flats:
        low, high = max(first - at, 0), min(end - at, flat.size)
        if low < high:
            found.append(flat[low:high])
        at += flat.size
    return found


@np.errstate(all="ignore")
def _of_one(flat: np.ndarray[Any, Any]) -> float:
    if flat.dtype not in (np.float32, np.float64):
        return float(sum(_of_block(flat[at : at + BLOCK].astype(np.float32)) for at in range(0, flat.size, BLOCK)))
    return float(sum(_of_block(flat[at : at + BLOCK]) for at in range(0, flat.size, BLOCK)))


def _of_block(block: np.ndarray[Any, Any]) -> float:
    return float(np.dot(block, block))
