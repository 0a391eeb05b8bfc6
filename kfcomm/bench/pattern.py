"""Values with an exactly known reduction, and the search for the first wrong element.

Every rank can derive the values of every other. They repeat with a period that is prime, so that no chunk, row or
tensor boundary coincides with it and data in a wrong place shows. They are small integers: all sums are exact in
every dtype as long as they are within its range of exact integers (`_EXACT`), and wrap in integer dtypes as NumPy's
do. For ``avg`` they are multiples of the number of ranks, for ``prod`` mostly ones.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kfcomm.types import Op

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

PERIOD = 8191
_BLOCK = 32 * PERIOD
"""Elements compared at a time: the intermediate result stays in the cache."""

_EXACT = {"bool": 1, "int8": 127, "uint8": 255, "float16": 1 << 11, "bfloat16": 1 << 8}
_MOST = 7


def contributions(dtype: np.dtype[Any], op: Op | None, size: int) -> Array:
    """One period of the values of each rank: an array of shape (size, `PERIOD`)."""
    rank = np.arange(size, dtype=np.int64)[:, None]
    place = np.arange(PERIOD, dtype=np.int64)
    if op is Op.PROD:
        # one rank in turn has a factor of 2, 3 or 4
        return np.where((place + rank) % size == 0, 2 + place % 3, 1).astype(dtype)
    top = max(1, min(_MOST, _EXACT.get(dtype.name, 1 << 24) // size))
    values = (place * (2 * rank + 3) + place // 7 + 5 * rank) % (top + 1)
    if op is Op.AVG:
        values *= size
    if dtype.kind == "c":
        return (values + 1j * np.roll(values, 1, axis=1)).astype(dtype)
    return values.astype(dtype)


def reduced(values: Array, op: Op) -> Array:
    """One period of the reduction of the ranks' ``values``, computed exactly and rounded once."""
    exact = values.astype(np.float64) if values.dtype.kind not in "biuc" else values
    match op:
        case Op.SUM:
            found = np.add.reduce(exact)
        case Op.AVG:
            found = np.add.reduce(exact) / len(values)
        case Op.PROD:
            found = np.multiply.reduce(exact)
        case Op.MIN:
            found = np.minimum.reduce(exact)
        case Op.MAX:
            found = np.maximum.reduce(exact)
        case Op.AND:
            found = np.bitwise_and.reduce(exact)
        case Op.OR:
            found = np.bitwise_or.reduce(exact)
        case Op.XOR:
            found = np.bitwise_xor.reduce(exact)
    return np.asarray(found).astype(values.dtype)


def tiled(values: Array, start: int, count: int) -> Array:
    """``count`` elements of the endless repetition of ``values``, from element ``start`` on."""
    return np.ascontiguousarray(np.resize(np.roll(values, -start), count))


def first_wrong(found: Array, values: Array, start: int) -> tuple[int, Any, Any] | None:
    """Index, value and due value of the first element that is not ``tiled(values, start, len(found))``."""
    due = np.roll(values, -(start % PERIOD))
    # Whole periods are compared with one broadcast row: building all expected values would take as much memory again.
    for begin in range(0, len(found), _BLOCK):
        block = found[begin : begin + _BLOCK]
        whole = len(block) // PERIOD * PERIOD
        if bool((block[:whole].reshape(-1, PERIOD) == due).all()) and bool(
            (block[whole:] == due[: len(block) - whole]).all()
        ):
            continue
        where = int(np.flatnonzero(block != np.resize(due, len(block)))[0])
        return begin + where, block[where], due[where % PERIOD]
    return None


def spoil(array: Array) -> None:
    """Overwrite with values that no result has, so that an old result is not taken for a new one."""
    if array.dtype.kind in "iu":
        array.fill(np.iinfo(array.dtype).max)
    else:
        array.fill(False if array.dtype.kind == "b" else np.nan)
