"""How contributions are combined: one kernel for each op and dtype, in NumPy, on flat host buffers.

What always holds: a kernel works element by element, so that a result does not depend on how a buffer is cut into
chunks; only which of two different NaN an operation on both gives (their sign and payload) is up to the processor.
Integers wrap around, NaN wins in ``min`` and ``max``, and no overflow or invalid value becomes a Python warning.
float16 and bfloat16 are summed and multiplied in float32 and rounded once, at the end.

Kernels know neither ranks nor chunks, and hold no state between calls.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from kfcomm.arrays.dtypes import Array, checked
from kfcomm.errors import ConfigError
from kfcomm.reduce import float16
from kfcomm.types import Op

Fold: TypeAlias = Callable[[Array, Array, Array], object]
Finish: TypeAlias = Callable[[Array, Array, int], object]


def _minimum(a: Array, b: Array, out: Array) -> None:
    np.minimum(a, b, out=out)


def _maximum(a: Array, b: Array, out: Array) -> None:
    np.maximum(a, b, out=out)


# Called as f(a, b, out): by position, which saves 40 ns and which NumPy refuses only to minimum and maximum.
_FOLDS: dict[Op, Callable[..., object]] = {
    Op.SUM: np.add,
    Op.AVG: np.add,
    Op.MIN: _minimum,
    Op.MAX: _maximum,
    Op.PROD: np.multiply,
    Op.AND: np.bitwise_and,
    Op.OR: np.bitwise_or,
    Op.XOR: np.bitwise_xor,
}
_BITWISE = frozenset({Op.AND, Op.OR, Op.XOR})
_ACCUMULATING = frozenset({Op.SUM, Op.AVG, Op.PROD})
_HALVES = frozenset({"float16", "bfloat16"})
_SINGLE = np.dtype(np.float32)
_COMPLEX_BLOCK = 8192  # elements multiplied at a time, so that the four products stay in the cache


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
            contributions of ``size`` ranks were folded into; ``out`` may be ``acc`` if their dtypes are equal.
        needs_finish: if False, what was folded is the result, and `finish` only copies.
    """

    op: Op
    dtype: np.dtype[Any]
    accumulate_dtype: np.dtype[Any]
    fold: Fold
    finish: Finish
    needs_finish: bool


@cache
def kernel(op: Op | str, dtype: np.dtype[Any]) -> Kernel:
    """The kernel for ``op`` on ``dtype``, made once.

    Raises:
        ConfigError: no such op, the dtype is not supported, or the op has no meaning for it; says what would do.
    """
    if op not in _FOLDS:
        raise ConfigError(f"op {op!r} is unknown; known are {', '.join(Op)}")
    op, dtype = Op(op), checked(dtype)
    refusal = _refusal(op, dtype)
    if refusal is not None:
        raise ConfigError(refusal)
    if op in _ACCUMULATING and dtype.name in _HALVES:
        return _half_kernel(op, dtype)
    return _plain_kernel(op, dtype)


def supports(op: Op | str, dtype: np.dtype[Any]) -> bool:
    """Whether there is a kernel for ``op`` on ``dtype``."""
    return op in _FOLDS and _refusal(Op(op), dtype) is None


def _refusal(op: Op, dtype: np.dtype[Any]) -> str | None:
    if op in _BITWISE and dtype.kind not in "biu":
        return f"op {op} has no meaning for {dtype}: it takes integers and bool"
    if op is Op.AVG and dtype.kind in "biu":
        return f"op avg of {dtype} would not be a {dtype}: use sum and divide, or give floating-point numbers"
    if op in (Op.MIN, Op.MAX) and dtype.kind == "c":
        return f"op {op} has no meaning for {dtype}: complex numbers have no order"
    if op is Op.SUM and dtype.kind == "b":
        return "op sum of bool would not be a bool: use or, or give integers to count"
    if op is Op.PROD and dtype.kind == "b":
        return "op prod of bool: use and"
    return None


class _Quiet(threading.local):
    """`run(f, ...)` calls ``f`` with NumPy's floating-point warnings off, in 20 ns (`numpy.errstate`: 1.4 µs).

    NumPy keeps that setting in the context; each thread enters a context of its own, where it is off for good.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self.run = context.run


def _plain_kernel(op: Op, dtype: np.dtype[Any]) -> Kernel:
    """Partial results are of the caller's dtype, and nothing is converted."""
    if dtype.kind in "biu":  # nothing to warn of
        return Kernel(op, dtype, dtype, _FOLDS[op], _copy, False)
    quiet = _Quiet()
    combine = _complex_product if op is Op.PROD and dtype.kind == "c" else _FOLDS[op]

    def fold(a: Array, b: Array, out: Array) -> None:
        quiet.run(combine, a, b, out)

    if op is not Op.AVG:
        return Kernel(op, dtype, dtype, fold, _copy, False)

    def divide(acc: Array, out: Array, size: int) -> None:
        quiet.run(np.true_divide, acc, size, out)

    def divide_parts(acc: Array, out: Array, size: int) -> None:
        part = _part_dtype(dtype)
        quiet.run(np.true_divide, acc.view(part), size, out.view(part))

    return Kernel(op, dtype, dtype, fold, divide_parts if dtype.kind == "c" else divide, True)


def _complex_product(a: Array, b: Array, out: Array) -> None:
    """``out = a · b`` by the schoolbook formula, every product and sum rounded on its own.

    `numpy.multiply` fuses some of them for all but the last few elements of a buffer, so that its last bit depends on
    where a buffer is cut.
    """
    for at in range(0, len(out), _COMPLEX_BLOCK):
        block = slice(at, at + _COMPLEX_BLOCK)
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


def _half_kernel(op: Op, dtype: np.dtype[Any]) -> Kernel:
    """Partial results are float32; NumPy widens as it goes, except that long runs of float16 are widened by us.

    Adding one element of a long buffer costs 0.2 ns in bfloat16 and 0.7 ns in float16 (NumPy's way: 2.2); rounding it
    back, once, costs 0.5 ns and 3.1 ns.
    """
    ufunc = _FOLDS[op]
    quiet = _Quiet()
    is_float16 = dtype == np.float16

    def fold(a: Array, b: Array, out: Array) -> None:
        if is_float16 and len(out) >= float16.SHORT:
            for at in range(0, len(out), float16.BLOCK):
                block = slice(at, at + float16.BLOCK)
                fold_float16(a[block], b[block], out[block])
        else:
            quiet.run(ufunc, a, b, out=out, dtype=_SINGLE)

    def fold_float16(a: Array, b: Array, out: Array) -> None:
        if a.dtype != _SINGLE:
            a = _widened(a, out if b.dtype != _SINGLE else None)
        if b.dtype != _SINGLE:
            b = _widened(b, None)
        quiet.run(ufunc, a, b, out)

    def finish(acc: Array, out: Array, size: int) -> None:
        quiet.run(np.copyto, out, acc, casting="unsafe")

    def finish_avg(acc: Array, out: Array, size: int) -> None:
        for at in range(0, len(acc), float16.BLOCK):
            block = slice(at, at + float16.BLOCK)
            quiet.run(np.copyto, out[block], quiet.run(np.true_divide, acc[block], size), casting="unsafe")

    return Kernel(op, dtype, _SINGLE, fold, finish_avg if op is Op.AVG else finish, True)


def _widened(half: Array, out: Array | None) -> Array:
    """``half`` in float32, written to ``out`` or to new memory (of each call, so that threads do not meet in it)."""
    wide = np.empty(len(half), _SINGLE) if out is None else out
    float16.widen(half, wide)
    return wide


def _copy(acc: Array, out: Array, size: int) -> None:
    np.copyto(out, acc)
