"""The least and the greatest of float16 and bfloat16 numbers, compared as integers.

NumPy compares them one by one, in 10 ns each. But the bits of floating-point numbers, as magnitudes with a sign, are in
the order of their values: once those of negative ones are inverted, all but the sign, they compare as 16-bit integers.

Invariants: NaN wins, the first of two; of two zeros the negative one is less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import Array
from kfcomm.arrays.reduce.base import Kernel, Workspace, blocks
from kfcomm.types import Op

_SIGN_BIT = np.int16(15)
_MAGNITUDE = np.int16(0x7FFF)
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
_A, _B, _MASK = range(3)  # blocks of the workspace


def ordered_kernel(op: Op, dtype: np.dtype[Any], space: Workspace) -> Kernel:
    """The kernel for ``min`` or ``max`` of a half-precision dtype.

    Cost: ten passes over blocks in the cache, 0.7 ns for each element of a long buffer; 10 µs for a few.
    """
    choose = np.minimum if op is Op.MIN else np.maximum
    infinity = _INFINITY[dtype.name]

    def fold(a: Array, b: Array, out: Array) -> None:
        a, b, out = a.view(np.int16), b.view(np.int16), out.view(np.int16)
        has_nan = _has_nan(a, infinity) or _has_nan(b, infinity)
        for block in blocks(len(out)):
            fold_block(a[block], b[block], out[block], has_nan)

    def fold_block(a: Array, b: Array, out: Array, has_nan: bool) -> None:
        ours, theirs, mask = (space.take(number, len(out)).view(np.int16)[: len(out)] for number in (_A, _B, _MASK))
        _reorder(a, ours, mask)
        _reorder(b, theirs, mask)
        choose(ours, theirs, out=ours)
        if has_nan:
            ours_wins = (a & _MAGNITUDE) > infinity
            nan = np.flatnonzero(ours_wins | ((b & _MAGNITUDE) > infinity))
            winners = np.where(ours_wins[nan], a[nan], b[nan])
            _reorder(ours, out, mask)
            out[nan] = winners
        else:
            _reorder(ours, out, mask)

    def finish(acc: Array, out: Array, size: int) -> None:
        np.copyto(out, acc)

    def last(a: Array, b: Array, out: Array, size: int) -> None:
        fold(a, b, out)

    return Kernel(op, dtype, dtype, fold, finish, last, False)


def _reorder(bits: Array, out: Array, mask: Array) -> None:
    """Invert the magnitudes of negative numbers; twice is not at all."""
    np.right_shift(bits, _SIGN_BIT, mask)
    np.bitwise_and(mask, _MAGNITUDE, mask)
    np.bitwise_xor(bits, mask, out)


def _has_nan(bits: Array, infinity: int) -> bool:
    """The greatest bit patterns, read as signed or as unsigned numbers."""
    if not len(bits):
        return False
    if np.maximum.reduce(bits) > infinity:
        return True
    return bool(np.maximum.reduce(bits.view(np.uint16)) > 0x8000 | infinity)
