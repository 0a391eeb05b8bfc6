"""Kernels whose partial results have the caller's dtype, without conversions."""

from __future__ import annotations

from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import Array
from kfcomm.arrays.reduce.base import FoldAll, Kernel, Quiet, blocks, divide
from kfcomm.arrays.reduce.ops import REDUCTIONS
from kfcomm.types import Op

_COMPLEX_BLOCK = 8192  # elements multiplied at a time, so that the four products stay in the cache
_BLOCK_NBYTES = 1 << 18  # folded and then divided, so that it is divided in the cache


def plain_kernel(op: Op, dtype: np.dtype[Any]) -> Kernel:
    """The kernel of an op that needs no wider numbers."""
    reduction = REDUCTIONS[op]
    combine, combine_all = reduction.fold, reduction.ufunc.reduce
    if dtype.kind in "biu":  # nothing to warn of
        return Kernel(op, dtype, dtype, combine, _copy, _only(combine), False, _all_of(combine_all, None))
    quiet = Quiet()
    is_plain = op is not Op.PROD or dtype.kind != "c"
    if not is_plain:
        combine = _complex_product
    fold_all = _all_of(combine_all, quiet) if is_plain else None

    def fold(a: Array, b: Array, out: Array) -> None:
        quiet.run(combine, a, b, out)

    if op is not Op.AVG:
        return Kernel(op, dtype, dtype, fold, _copy, _only(fold), False, fold_all)
    # A complex number is divided part by part, each rounded once.
    part = _part_dtype(dtype) if dtype.kind == "c" else dtype
    length = _BLOCK_NBYTES // dtype.itemsize

    def finish(acc: Array, out: Array, size: int) -> None:
        quiet.run(divide, acc.view(part), size, out.view(part))

    def last(a: Array, b: Array, out: Array, size: int) -> None:
        quiet.run(_last, a, b, out, size)

    def _last(a: Array, b: Array, out: Array, size: int) -> None:
        for block in blocks(len(out), length):
            piece = out[block]
            combine(a[block], b[block], piece)
            piece = piece.view(part)
            divide(piece, size, piece)

    return Kernel(op, dtype, dtype, fold, finish, last, True)


def _all_of(reduce: Any, quiet: Quiet | None) -> FoldAll:
    if quiet is None:
        return lambda rows, out: reduce(rows, 0, None, out)
    return lambda rows, out: quiet.run(reduce, rows, 0, None, out)


def _only(fold: Any) -> Any:
    """The last fold where nothing is left to finish."""

    def last(a: Array, b: Array, out: Array, size: int) -> None:
        fold(a, b, out)

    return last


def _copy(acc: Array, out: Array, size: int) -> None:
    np.copyto(out, acc)


def _complex_product(a: Array, b: Array, out: Array) -> None:
    """``out = a · b`` by the schoolbook formula, every product and sum rounded on its own.

    `numpy.multiply` fuses some of them for all but the last few elements of a buffer, so that its last bit depends on
    where a buffer is cut.
    """
    for block in blocks(len(out), _COMPLEX_BLOCK):
        a_real, a_imag = _parts(a[block])
        b_real, b_imag = _parts(b[block])
        real = a_real * b_real
        real -= a_imag * b_imag
        imag = a_real * b_imag
        imag += a_imag * b_real
        out_real, out_imag = _parts(out[block])
        out_real[:] = real
        out_imag[:] = imag


def _parts(x: Array) -> tuple[Array, Array]:
    """Views of the real and of the imaginary parts of a complex array."""
    pairs = x.view(_part_dtype(x.dtype))
    return pairs[0::2], pairs[1::2]


def _part_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}")
