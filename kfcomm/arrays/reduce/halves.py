"""Kernels of float16 and bfloat16: sums and products in float32, the least and the greatest as integers.

Sums and products: blocks are widened, folded, and rounded once, at the end. Conversions are IEEE 754's, to nearest
with ties to even, as NumPy's are, and no floating-point exception becomes a warning. Whether partial results travel,
and as what, is not known here.

The least and the greatest: NumPy compares halves one by one, in 10 ns each. The bits of floating-point numbers are a
sign and a magnitude; with the magnitudes of negative numbers inverted they compare as 16-bit integers. NaN wins, the
first of two; of two zeros the negative one is less.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import Array
from kfcomm.arrays.reduce import float16
from kfcomm.arrays.reduce.kernels import BLOCK, SINGLE, Kernel, Quiet, Workspace, blocks, divide, workspace
from kfcomm.arrays.reduce.ops import REDUCTIONS
from kfcomm.types import Op

HALVES = frozenset({"float16", "bfloat16"})
_FLOAT16 = np.dtype(np.float16)
_ACC, _FIRST, _SECOND, _BUFFER = range(4)  # blocks of the workspace
_SIGN_BIT = np.int16(15)
_MAGNITUDE = np.int16(0x7FFF)
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}


def half_kernel(op: Op, dtype: np.dtype[Any]) -> Kernel:
    """The kernel of an op that accumulates: partial results are float32.

    Folding one element of a long buffer into float32 costs 0.2 ns in bfloat16 and 0.5 ns in float16 (NumPy's way:
    2.2); rounding it back, once, costs 0.5 ns and 1.4 ns (NumPy's way: 3 to 9).
    """
    quiet, math = Quiet(), half_math(op)

    def fold(a: Array, b: Array, out: Array) -> None:
        quiet.run(math.fold, a, b, out)

    def finish(acc: Array, out: Array, size: int) -> None:
        quiet.run(_finish, acc, out, size)

    def _finish(acc: Array, out: Array, size: int) -> None:
        for block, scaled in math.finished(acc, size):
            math.narrow(scaled, out[block])

    def last(a: Array, b: Array, out: Array, size: int) -> None:
        quiet.run(_last, a, b, out, size)

    def _last(a: Array, b: Array, out: Array, size: int) -> None:
        for block, scaled in math.last(a, b, size):
            math.narrow(scaled, out[block])

    return Kernel(op, dtype, SINGLE, fold, finish, last, True)


class HalfMath:
    """One op in float32, on operands of any floating dtype of at most 64 bits; and conversions to and from float32.

    NumPy's floating-point warnings are to be off. Several threads may use it at once.
    """

    def __init__(self, op: Op) -> None:
        self._combine = REDUCTIONS[op].fold
        self._is_average = op is Op.AVG
        self._space = workspace()
        self._smallest = _smallest_normal()

    def fold(self, a: Array, b: Array, out: Array) -> None:
        """``out = a ∘ b`` in float32; ``out`` may be ``a`` or ``b``."""
        if len(out) < float16.SHORT or _FLOAT16 not in (a.dtype, b.dtype):
            self._combine(a, b, out=out, dtype=SINGLE)  # NumPy widens as it goes
            return
        # Asked once for the whole buffer: with no infinity or NaN the blocks below need one pass less each.
        finite_a, finite_b = _finite(a), _finite(b)
        for block in blocks(len(out)):
            self._fold_block(a[block], finite_a, b[block], finite_b, out[block])

    def finished(self, acc: Array, size: int) -> Iterator[tuple[slice, Array]]:
        """Block by block, what was folded, divided by ``size`` if it is an average: to be used before the next."""
        finite = _finite(acc)
        for block in blocks(len(acc)):
            part = acc[block]
            buffer = self._space.take(_ACC, len(part))
            single = self._single(part, finite, buffer)
            if self._is_average:
                divide(single, size, buffer)
                single = buffer
            yield block, single

    def last(self, a: Array, b: Array, size: int) -> Iterator[tuple[slice, Array]]:
        """As `finished`, of ``a ∘ b``."""
        finite_a, finite_b = _finite(a), _finite(b)
        for block in blocks(len(a)):
            part = a[block]
            acc = self._space.take(_ACC, len(part))
            self._fold_block(part, finite_a, b[block], finite_b, acc)
            if self._is_average:
                divide(acc, size, acc)
            yield block, acc

    def convert(self, x: Array, out: Array) -> None:
        """``out = x``, rounded to float32 and then to the dtype of ``out``."""
        if x.dtype == out.dtype:
            np.copyto(out, x)
            return
        finite = _finite(x)
        for block in blocks(len(out)):
            part, to = x[block], out[block]
            buffer = to if to.dtype == SINGLE else self._space.take(_BUFFER, len(part))
            single = self._single(part, finite, buffer)
            if to.dtype.name in HALVES:
                self.narrow(single, to)
            elif to.dtype != SINGLE:
                np.copyto(to, single)

    def narrow(self, single: Array, out: Array) -> None:
        """``out = single``, rounded to a half-precision dtype; a block at most."""
        if out.dtype != _FLOAT16:
            np.copyto(out, single, casting="unsafe")
            return
        count = len(out)
        magnitude, units = self._space.take(_FIRST, count), self._space.take(_SECOND, count)
        float16.narrow(single, out, magnitude, units, self._smallest[:count])

    def _fold_block(self, a: Array, finite_a: bool, b: Array, finite_b: bool, out: Array) -> None:
        if len(out) >= float16.SHORT:
            if a.dtype == _FLOAT16:
                a = self._single(a, finite_a, self._space.take(_FIRST, len(out)))
            if b.dtype == _FLOAT16:
                b = self._single(b, finite_b, self._space.take(_SECOND, len(out)))
        self._combine(a, b, out=out, dtype=SINGLE)

    def _single(self, x: Array, finite: bool, buffer: Array) -> Array:
        """``x`` in float32: itself, or in ``buffer``."""
        if x.dtype == SINGLE:
            return x
        if x.dtype == _FLOAT16:
            float16.widen(x, buffer, finite=finite)
        else:
            np.copyto(buffer, x, casting="same_kind")
        return buffer


def _finite(x: Array) -> bool:
    """Whether all are known to be; only asked where the answer helps."""
    return len(x) >= float16.SHORT and x.dtype == _FLOAT16 and float16.is_finite(x)


@cache
def half_math(op: Op) -> HalfMath:
    """The arithmetic of ``op``, made once."""
    return HalfMath(op)


@cache
def _smallest_normal() -> Array:
    block = np.full(BLOCK, float16.SMALLEST_NORMAL)
    block.flags.writeable = False
    return block


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
        ours, theirs, mask = (
            space.take(number, len(out)).view(np.int16)[: len(out)] for number in (_FIRST, _SECOND, _ACC)
        )
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
