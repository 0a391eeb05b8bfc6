"""Wire dtypes: numbers that travel in fewer bits than they are stored in, and the arithmetic on both sides.

Invariants: numbers are rounded once before they travel, to nearest with ties to even, by way of float32; on arrival
they are widened exactly; sums, averages and products are accumulated in float32. Rounding a rounded number changes
nothing, so that all ranks that forward a number forward the same bits.

A number x that is rounded to a wire dtype of precision p (11 bits in float16, 8 in bfloat16) is wrong by at most
``2**-p * abs(x)``, or half the smallest subnormal number (``2**-25`` in float16, ``2**-134`` in bfloat16) if that is
more; beyond the wire dtype's largest number (65504 in float16) it becomes infinite.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import Array, checked, dtype_called, dtype_of
from kfcomm.arrays.reduce.halves import HALVES, half_math
from kfcomm.arrays.reduce.kernels import Quiet
from kfcomm.common.arguments import hint
from kfcomm.errors import ConfigError
from kfcomm.types import Op

_CARRIED = {
    "float16": frozenset({"float16", "float32", "float64"}),
    "bfloat16": frozenset({"bfloat16", "float32", "float64"}),
}


def wire_dtype_of(given: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that is meant (see ``dtype_called``), if it may carry numbers of ``dtype``.

    Raises:
        ConfigError: it may not, the name is unknown, or its package is missing.
    """
    try:
        name = given if isinstance(given, str) and given in HALVES else dtype_called(given).name
    except ConfigError:
        name = ""
    if name not in HALVES:
        near = hint(given, _CARRIED)
        raise ConfigError(f"wire_dtype {given!r:.60} is unknown; known are {', '.join(sorted(_CARRIED))}{near}")
    if checked(dtype).name not in _CARRIED[name]:
        raise ConfigError(f"wire_dtype {name} cannot carry {dtype}: it takes {', '.join(sorted(_CARRIED[name]))}")
    return dtype_of(name)


class Wire:
    """Numbers of ``dtype`` that travel as ``wire_dtype``; what is folded is folded by ``op``, in float32.

    All arrays are one-dimensional and those of one call of one length. Several threads may use it at once.
    """

    __slots__ = ("_math", "_quiet", "dtype", "wire_dtype")

    def __init__(self, op: Op, dtype: np.dtype[Any], wire_dtype: np.dtype[Any]) -> None:
        self.dtype = dtype  # of the caller's arrays
        self.wire_dtype = wire_dtype  # of what travels
        self._math = half_math(op)
        self._quiet = Quiet()  # not its ``run``, which is that of this thread: another may use the wire meanwhile

    def encode(self, x: Array, out: Array) -> None:
        """``out`` (of ``wire_dtype``) = ``x`` (of ``dtype`` or float32), rounded."""
        self._quiet.run(self._math.convert, x, out)

    def decode(self, x: Array, out: Array) -> None:
        """``out`` (of ``dtype``) = ``x`` (of ``wire_dtype``), exactly."""
        self._quiet.run(self._math.convert, x, out)

    def fold(self, a: Array, b: Array, out: Array) -> None:
        """``out`` (float32, may be ``a``) = ``a`` (of ``dtype`` or float32) ∘ ``b`` (of ``wire_dtype``)."""
        self._quiet.run(self._math.fold, a, b, out)

    def last(self, a: Array, b: Array, size: int, out: Array, sent: Array | None) -> None:
        """As ``fold``, and then ``finish`` while it is in the cache."""
        self._quiet.run(self._put, self._math.last(a, b, size), out, sent)

    def finish(self, acc: Array, size: int, out: Array, sent: Array | None) -> None:
        """``out`` (of ``dtype``) = the result of ``acc``, to which ``size`` ranks have contributed.

        If the result travels, ``sent`` (of ``wire_dtype``) gets the rounded numbers, and ``out`` these numbers widened,
        as on the receiving ranks. Else the result is not rounded to ``wire_dtype``.
        """
        self._quiet.run(self._put, self._math.finished(acc, size), out, sent)

    def _put(self, results: Iterator[tuple[slice, Array]], out: Array, sent: Array | None) -> None:
        convert = self._math.convert
        for block, single in results:
            if sent is None:
                convert(single, out[block])
            else:
                convert(single, sent[block])
                convert(sent[block], out[block])


@cache
def wire_of(op: Op | None, dtype: np.dtype[Any], wire_dtype: np.dtype[Any]) -> Wire:
    """The wire for a pair of dtypes that `wire_dtype_of` accepts, made once; no op where nothing is folded."""
    return Wire(Op.SUM if op is None else op, dtype, wire_dtype)
