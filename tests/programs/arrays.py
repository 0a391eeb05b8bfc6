"""Arrays whose sums are exact, what NumPy folds them to, and how two results are compared.

Values are chosen so that no order of additions changes a bit: small whole numbers, powers of two for products,
multiples of the number of ranks for averages. So the oracle needs to know nothing of graphs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
OPS = {
    "bool": ("min", "max", "and", "or", "xor"),
    **dict.fromkeys(INTEGERS, ("sum", "min", "max", "prod", "and", "or", "xor")),
    **dict.fromkeys(FLOATS, ("sum", "avg", "min", "max", "prod")),
    **dict.fromkeys(COMPLEX, ("sum", "avg", "prod")),
}
"""The ops that have a meaning, by dtype."""

EXACT_UP_TO = {"float16": 2048, "bfloat16": 256}
"""These dtypes represent whole numbers up to this size exactly; other dtypes, all numbers used here."""
LARGEST = 4096
STRIDE = 7
RANK_STRIDE = 7919
REAL_FACTORS = (1, 2, -1, 0.5)
COMPLEX_FACTORS = (1, 1j, -1, 1 + 1j)
SHOWN = 6


def dtype_called(name: str) -> np.dtype[Any]:
    """The NumPy dtype; bfloat16 comes from ``ml_dtypes``."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def filled(name: str, shape: Shape, start: int, *, op: str = "sum", size: int = 1, wire: str | None = None) -> Array:
    """Values of a dtype, told apart by ``start``, that ``size`` ranks can fold exactly, also if sent as ``wire``."""
    numbers = np.arange(math.prod(shape), dtype=np.int64) * STRIDE + start
    if op == "prod" and name not in INTEGERS:
        factors = COMPLEX_FACTORS if name in COMPLEX else REAL_FACTORS
        return np.array(factors)[numbers % len(factors)].astype(dtype_called(name)).reshape(shape)
    step = size if op == "avg" else 1
    bound = min(LARGEST, *(EXACT_UP_TO.get(one or "", LARGEST) for one in (name, wire))) // (size * step)
    values = (numbers % (2 * bound + 1) - bound) * step
    if name == "bool":
        values %= 2
    if name in COMPLEX:
        return (values + 1j * values[::-1]).astype(name).reshape(shape)
    return values.astype(dtype_called(name)).reshape(shape)


FOLDS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def folded(op: str, inputs: Sequence[Array]) -> Array:
    """The inputs of all ranks, element by element; integers wrap around."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    flats = [one.reshape(-1) for one in inputs]
    if dtype.name in FLOATS:
        flats = [one.astype(np.float64) for one in flats]
    total = functools.reduce(FOLDS[op], flats)
    if op == "avg":
        total = total / len(inputs)
    return total.astype(dtype).reshape(shape)


def shares(rows: int, size: int) -> list[slice]:
    """Rows shared out as evenly as possible: the first parts may be one row longer."""
    counts = [rows // size + (rank < rows % size) for rank in range(size)]
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


def strided(array: Array) -> Array:
    """The same values, every second element of memory; where there is an axis."""
    if not array.ndim:
        return array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = wide[..., ::2]
    view[...] = array
    return view


class OneOf(dict[int, Any]):
    """The result is ``(self[source], source)`` for one of these sources."""


def difference(got: Any, expected: Any) -> str:
    """In which way a result is not what was expected; empty if it is."""
    if isinstance(expected, OneOf):
        if not (isinstance(got, tuple) and len(got) == 2 and got[1] in expected):
            return f"{shown(got)} is not a message of one of {sorted(expected)}"
        return difference(got[0], expected[got[1]])
    if type(got) is not type(expected):
        return f"a {type(got).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, np.ndarray):
        return _between_arrays(got, expected)
    if isinstance(expected, (list, tuple)):
        if len(got) != len(expected):
            return f"{len(got)} parts, not {len(expected)}"
        parts = (difference(one, other) for one, other in zip(got, expected, strict=True))
        return next((f"part {number}: {part}" for number, part in enumerate(parts) if part), "")
    if isinstance(expected, dict):
        if list(got) != list(expected):
            return f"the keys {list(got)}, not {list(expected)}"
        return next((f"{key!r}: {part}" for key in got if (part := difference(got[key], expected[key]))), "")
    return "" if got == expected else "unequal"


def _between_arrays(got: Array, expected: Array) -> str:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return f"{got.dtype} {got.shape}, not {expected.dtype} {expected.shape}"
    wrong = np.flatnonzero(got.reshape(-1) != expected.reshape(-1))
    if not wrong.size:
        return ""
    first = int(wrong[0])
    values = f"{got.reshape(-1)[first]}, not {expected.reshape(-1)[first]}"
    return f"{wrong.size} of {got.size} elements are wrong, the first is number {first}: {values}"


def shown(value: Any) -> str:
    """A value in a line."""
    if isinstance(value, np.ndarray):
        more = ", ..." if value.size > SHOWN else ""
        return f"{value.dtype}{list(value.shape)} {value.reshape(-1)[:SHOWN].tolist()}{more}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(one)}" for key, one in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
