"""Record of a kernel, warnings switched off, scratch memory; and kernels without conversions."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays.dtypes import Array
from kfcomm.arrays.reduce.ops import REDUCTIONS
from kfcomm.types import Op

Fold: TypeAlias = Callable[[Array, Array, Array], object]
Finish: TypeAlias = Callable[[Array, Array, int], object]
FoldAll: TypeAlias = Callable[[Any, Array], object]
Last: TypeAlias = Callable[[Array, Array, Array, int], object]

SINGLE = np.dtype(np.float32)
BLOCK = 65536
"""Elements worth working on at a time. Several passes go over a block: it must be long enough that NumPy's overhead
for a call, about 1 µs, is small beside them, and its float32 form must stay in a second-level cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The arithmetic of one op on one dtype.

    Attributes:
        op: what is computed.
        dtype: of the caller's arrays.
        accumulate_dtype: in which partial results are kept and travel: float32 for the ``sum``, ``avg`` and ``prod``
            of float16 and bfloat16, else ``dtype``.
        fold: ``fold(a, b, out)`` writes ``a ∘ b`` into ``out``. One-dimensional, of one length; ``a`` and ``b`` of
            ``dtype`` or ``accumulate_dtype`` each, ``out`` of ``accumulate_dtype``; ``out`` may be ``a`` or ``b``.
            About 0.6 µs for a few elements of float32; for long buffers see the functions that make kernels.
        finish: ``finish(acc, out, size)`` writes the result into ``out`` (of ``dtype``) from ``acc``, what the
            contributions of ``size`` ranks were folded into, or one of ``dtype``; ``out`` may be ``acc`` if their
            dtypes are equal.
        last: ``last(a, b, out, size)`` is ``fold``, then ``finish``, to the bit, block by block, so that what was
            folded is finished while it is in the cache. ``out`` is of ``dtype``; it may be ``a`` or ``b``.
        fold_all: ``fold_all(rows, out)`` writes the fold of all rows of a two-dimensional array into ``out``, finished,
            to the bit as ``fold`` after ``fold``: in one call, whose overhead is most of the time for short rows. At
            least two elements each: NumPy may add up a single column in another order. A list of rows is copied first.
            None where NumPy has no such call.
        fold_two: the same of two rows, of any length, given as a list: half the time of ``fold_all``, whose loop over
            an axis costs 0.6 µs. None where that is.
        needs_finish: if False, what was folded is the result, and `finish` only copies.
    """

    op: Op
    dtype: np.dtype[Any]
    accumulate_dtype: np.dtype[Any]
    fold: Fold
    finish: Finish
    last: Last
    needs_finish: bool
    fold_all: FoldAll | None = None
    fold_two: FoldAll | None = None


class Quiet(threading.local):
    """`run(f, ...)` calls ``f`` with NumPy's floating-point warnings off, in 20 ns (`numpy.errstate`: 1.4 µs).

    NumPy keeps that setting in the context; each thread enters a context of its own, where it is off for good.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


class Workspace(threading.local):
    """Scratch blocks of float32, of each thread its own, made at first use and kept.

    So their pages are warm, and threads do not share them. A block is valid until it is taken again.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Array] = {}

    def take(self, number: int, count: int) -> Array:
        """The first ``count`` elements (at most `BLOCK`) of block ``number``."""
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = np.empty(BLOCK, SINGLE)
        return block[:count]


@cache
def workspace() -> Workspace:
    """The workspace of all kernels on a thread, which runs one at a time."""
    return Workspace()


def blocks(count: int, length: int = BLOCK) -> Iterator[slice]:
    """``count`` elements, ``length`` at a time."""
    for start in range(0, count, length):
        yield slice(start, start + length)


def divide(acc: Array, size: int, out: Array) -> None:
    """``out = acc / size``, each rounded once. By a power of two it is the product: the same bits, in half the time."""
    if size & (size - 1):
        np.true_divide(acc, size, out)
    else:
        np.multiply(acc, 1 / size, out)


_COMPLEX_BLOCK = 8192  # elements multiplied at a time, so that the four products stay in the cache
_BLOCK_NBYTES = 1 << 18  # folded and then divided, so that it is divided in the cache


def plain_kernel(op: Op, dtype: np.dtype[Any]) -> Kernel:
    """The kernel of an op that needs no wider numbers."""
    reduction = REDUCTIONS[op]
    combine, combine_all = reduction.fold, reduction.ufunc.reduce
    if dtype.kind in "biu":  # nothing to warn of
        return Kernel(
            op, dtype, dtype, combine, _copy, _only(combine), False, _all_of(combine_all, None),
            lambda rows, out: combine(rows[0], rows[1], out),
        )  # fmt: skip
    quiet = Quiet()
    is_plain = op is not Op.PROD or dtype.kind != "c"
    if not is_plain:
        combine = _complex_product
    fold_all = _all_of(combine_all, quiet) if is_plain else None
    fold_two: FoldAll | None = (lambda rows, out: quiet.run(combine, rows[0], rows[1], out)) if is_plain else None

    def fold(a: Array, b: Array, out: Array) -> None:
        quiet.run(combine, a, b, out)

    if op is not Op.AVG:
        return Kernel(op, dtype, dtype, fold, _copy, _only(fold), False, fold_all, fold_two)
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
