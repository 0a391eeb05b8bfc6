"""How contributions are combined: one kernel for each op and dtype, in NumPy, on flat host buffers.

What always holds: a kernel works element by element, so that a result does not depend on how a buffer is cut into
chunks. Integers wrap around, NaN wins in ``min`` and ``max``, and no overflow or invalid value becomes a Python
warning. float16 and bfloat16 are summed and multiplied in float32 and rounded once, at the end.

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

from kfcomm.errors import ConfigError
from kfcomm.types import Op

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Fold: TypeAlias = Callable[[Array, Array, Array], object]
Finish: TypeAlias = Callable[[Array, Array, int], object]

_UFUNCS = {
    Op.SUM: np.add,
    Op.AVG: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PROD: np.multiply,
    Op.AND: np.bitwise_and,
    Op.OR: np.bitwise_or,
    Op.XOR: np.bitwise_xor,
}
_BITWISE = frozenset({Op.AND, Op.OR, Op.XOR})
_ACCUMULATING = frozenset({Op.SUM, Op.AVG, Op.PROD})
_HALVES = frozenset({"float16", "bfloat16"})
_BLOCK = 8192  # elements converted at a time: a block and its float32 form stay in the first-level cache


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
        finish: ``finish(acc, out, size)`` writes the result into ``out``, of ``dtype``, from the fold ``acc``, of
            ``accumulate_dtype``, of the contributions of ``size`` ranks; ``out`` may be ``acc`` if the dtypes are equal.
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
    """The kernel for ``op`` on ``dtype`` (a dtype that `kfcomm.dtypes` supports), made once.

    Raises:
        ConfigError: there is no such op, or it has no meaning for ``dtype``; the message says what would do.
    """
    if op not in _UFUNCS:
        raise ConfigError(f"op {op!r} is unknown; known are {', '.join(Op)}")
    op = Op(op)
    refusal = _refusal(op, dtype)
    if refusal is not None:
        raise ConfigError(refusal)
    if op in _ACCUMULATING and dtype.name in _HALVES:
        return _half_kernel(op, dtype)
    return _plain_kernel(op, dtype)


def supports(op: Op | str, dtype: np.dtype[Any]) -> bool:
    """Whether there is a kernel for ``op`` on ``dtype``."""
    return op in _UFUNCS and _refusal(Op(op), dtype) is None


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
    ufunc = _UFUNCS[op]
    if dtype.kind in "biu":

        def fold_exact(a: Array, b: Array, out: Array) -> None:
            ufunc(a, b, out=out)

        return Kernel(op, dtype, dtype, fold_exact, _copy, False)

    quiet = _Quiet()

    def fold(a: Array, b: Array, out: Array) -> None:
        quiet.run(ufunc, a, b, out=out)

    if op is not Op.AVG:
        return Kernel(op, dtype, dtype, fold, _copy, False)
    part = np.zeros(0, dtype).real.dtype

    def divide(acc: Array, out: Array, size: int) -> None:
        quiet.run(np.true_divide, acc.view(part), size, out=out.view(part))

    return Kernel(op, dtype, dtype, fold, divide, True)


def _half_kernel(op: Op, dtype: np.dtype[Any]) -> Kernel:
    """Partial results are float32; blocks of the caller's dtype are widened in scratch memory of each call."""
    ufunc = _UFUNCS[op]
    single = np.dtype(np.float32)
    quiet = _Quiet()

    def fold_block(a: Array, b: Array, out: Array, scratch: Array) -> None:
        if b.dtype != single:
            if a.dtype != single:
                np.copyto(out, a)
                a = out
            np.copyto(scratch, b)
            b = scratch
        else:
            np.copyto(scratch, a)
            a = scratch
        quiet.run(ufunc, a, b, out=out)

    def fold(a: Array, b: Array, out: Array) -> None:
        if a.dtype == b.dtype == single:
            quiet.run(ufunc, a, b, out=out)
            return
        size = len(out)
        scratch = np.empty(min(size, _BLOCK), single)
        for at in range(0, size, _BLOCK):
            end = min(at + _BLOCK, size)
            fold_block(a[at:end], b[at:end], out[at:end], scratch[: end - at])

    def finish(acc: Array, out: Array, size: int) -> None:
        if op is not Op.AVG:
            quiet.run(np.copyto, out, acc, casting="unsafe")
            return
        scratch = np.empty(min(len(acc), _BLOCK), single)
        for at in range(0, len(acc), _BLOCK):
            part = scratch[: min(_BLOCK, len(acc) - at)]
            quiet.run(np.true_divide, acc[at : at + _BLOCK], size, out=part)
            quiet.run(np.copyto, out[at : at + _BLOCK], part, casting="unsafe")

    return Kernel(op, dtype, single, fold, finish, True)


def _copy(acc: Array, out: Array, size: int) -> None:
    np.copyto(out, acc)
