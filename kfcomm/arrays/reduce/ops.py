"""Table of the ops: one record for each, with its NumPy function, its names, its NCCL op and the dtypes it refuses.

To add an op: a member of ``kfcomm.types.Op`` and a record here.

Invariants: no library is imported. A name that is not one of our own is looked up as its library spells it; a function
of the caller's own is never taken for one of a library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfcomm.arrays.dtypes import Array
from kfcomm.common.arguments import hint
from kfcomm.errors import ConfigError
from kfcomm.types import Op


@dataclass(frozen=True, slots=True)
class Reduction:
    """One op."""

    ufunc: np.ufunc  # of NumPy, which combines two arrays
    names: tuple[str, ...]  # ours, and those of other libraries
    refused: str  # kinds of dtypes (``numpy.dtype.kind``; V is bfloat16) for which it is not defined
    refusal: str  # error for these, a template with ``{op}`` and ``{dtype}``
    logical_names: tuple[str, ...] = ()  # names that mean this op for bool alone
    nccl: str | None = None  # NCCL's constant; None for an op that NCCL lacks
    is_accumulated: bool = False  # partial results of float16 and bfloat16 are float32

    @property
    def fold(self) -> Callable[..., object]:
        """``fold(a, b, out)`` by position, which saves 40 ns, and which NumPy refuses only to minimum and maximum."""
        return _by_position(self.ufunc) if self.ufunc in (np.minimum, np.maximum) else self.ufunc

    def refuses(self, op: Op, dtype: np.dtype[Any]) -> str | None:
        """Why the op has no meaning for ``dtype``; None if it has one."""
        return self.refusal.format(op=op, dtype=dtype) if dtype.kind in self.refused else None


def _by_position(ufunc: np.ufunc) -> Callable[..., object]:
    def fold(a: Array, b: Array, out: Array, **options: Any) -> None:
        ufunc(a, b, out=out, **options)

    return fold


_SUM = "op sum of bool would not be of dtype bool: use or, or give integers to count"
_AVG = "op avg of {dtype} would not be of that dtype: use sum and divide, or give floating-point numbers"
_ORDER = "op {op} has no meaning for {dtype}: complex numbers have no order"
_PROD = "op prod of bool: use and"
_BITS = "op {op} has no meaning for {dtype}: it takes integers and bool"

REDUCTIONS: dict[Op, Reduction] = {
    Op.SUM: Reduction(np.add, ("sum", "add"), "b", _SUM, nccl="NCCL_SUM", is_accumulated=True),
    Op.AVG: Reduction(np.add, ("avg", "average", "mean"), "biu", _AVG, nccl="NCCL_AVG", is_accumulated=True),
    Op.MIN: Reduction(np.minimum, ("min", "minimum"), "c", _ORDER, nccl="NCCL_MIN"),
    Op.MAX: Reduction(np.maximum, ("max", "maximum"), "c", _ORDER, nccl="NCCL_MAX"),
    Op.PROD: Reduction(
        np.multiply, ("prod", "product", "multiply", "mul"), "b", _PROD, nccl="NCCL_PROD", is_accumulated=True
    ),
    Op.AND: Reduction(np.bitwise_and, ("and", "and_", "band", "bitwise_and"), "fcV", _BITS, ("land", "logical_and")),
    Op.OR: Reduction(np.bitwise_or, ("or", "or_", "bor", "bitwise_or"), "fcV", _BITS, ("lor", "logical_or")),
    Op.XOR: Reduction(np.bitwise_xor, ("xor", "bxor", "bitwise_xor"), "fcV", _BITS, ("lxor", "logical_xor")),
}

_LIBRARIES = frozenset({"numpy", "torch", "jax", "cupy", "mpi4py", "horovod", "operator", "_operator", "builtins"})
"""Whose functions mean what their names say."""

_BY_WORD = {word: op for op, reduction in REDUCTIONS.items() for word in reduction.names}
_BY_LOGICAL_WORD = {word: op for op, reduction in REDUCTIONS.items() for word in reduction.logical_names}


def op_of(given: Any, dtype: np.dtype[Any] | None = None) -> Op:
    """The op that ``given`` means for elements of ``dtype``.

    Takes our own names in any case and those of others (``"mean"``, ``"SUM"``, ``"bitwise_and"``), ``ReduceOp.SUM`` of
    torch, ``MPI.SUM`` of mpi4py, and functions: ``np.add``, ``torch.maximum``, ``operator.xor``, ``max``.

    Raises:
        ConfigError: it means none.
    """
    word = _word(given)
    op = _BY_WORD.get(word)
    if op is not None:
        return op
    op = _BY_LOGICAL_WORD.get(word)
    if word == "adasum":
        raise ConfigError("adasum combines whole arrays: it is an op of all_reduce and all_reduce_many alone")
    # A function has no similar spelling to suggest.
    if op is None:
        near = hint(given, [*Op, *_BY_WORD, *_BY_LOGICAL_WORD, "adasum"]) if isinstance(given, str) else ""
        raise ConfigError(f"op {given!r:.60} is unknown; known are {', '.join(Op)}, and of all_reduce adasum{near}")
    if dtype is not None and dtype.kind != "b":
        raise ConfigError(f"op {given!r:.60} is for bool, not for {dtype}: op {op} combines bits")
    return op


def _word(given: Any) -> str:
    """The name by which ``given`` may be known."""
    if isinstance(given, str):
        return given.strip().lower().removeprefix("mpi_")
    home = getattr(given, "__module__", None) or type(given).__module__
    if home.partition(".")[0] not in _LIBRARIES and not isinstance(given, np.ufunc):
        return ""
    name = getattr(given, "name", None) or getattr(given, "__name__", None)
    return name.lower().removeprefix("mpi_") if isinstance(name, str) else ""
