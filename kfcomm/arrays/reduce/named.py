"""What callers may say for an op: its name, and what other libraries have for it.

Invariants: no library is imported. What is not one of our own names is looked up once, by the name that its library
gives it; a function of the caller's own is never taken for one of a library.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kfcomm.common.spelling import hint
from kfcomm.errors import ConfigError
from kfcomm.types import Op

_LIBRARIES = frozenset({"numpy", "torch", "jax", "cupy", "mpi4py", "horovod", "operator", "_operator", "builtins"})
"""Whose functions mean what their names say."""

_WORDS = {
    Op.SUM: ("sum", "add"),
    Op.AVG: ("avg", "average", "mean"),
    Op.MIN: ("min", "minimum"),
    Op.MAX: ("max", "maximum"),
    Op.PROD: ("prod", "product", "multiply", "mul"),
    Op.AND: ("and", "and_", "band", "bitwise_and"),
    Op.OR: ("or", "or_", "bor", "bitwise_or"),
    Op.XOR: ("xor", "bxor", "bitwise_xor"),
}
_LOGICAL = {
    Op.AND: ("land", "logical_and"),
    Op.OR: ("lor", "logical_or"),
    Op.XOR: ("lxor", "logical_xor"),
}
"""The same as the bitwise ones for bool alone."""

_BY_WORD = {word: op for op, words in _WORDS.items() for word in words}
_BY_LOGICAL_WORD = {word: op for op, words in _LOGICAL.items() for word in words}


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
