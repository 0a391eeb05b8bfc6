"""Element types that kfcomm exchanges, and their names on the wire; shapes that hold the same elements in one order.

Invariants: a dtype that passed `checked` is in native byte order, and `dtype_of(dtype_name(d)) == d`.
bfloat16 is a NumPy dtype only with the package ``ml_dtypes``, which is imported when it is first needed and is
never required otherwise. Nothing here knows arrays.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, TypeAlias

import numpy as np

from kfcomm.common.arguments import hint
from kfcomm.common.imports import lacking
from kfcomm.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

NUMPY_NAMES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
SUPPORTED_NAMES = (*NUMPY_NAMES, "bfloat16")


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name of ``dtype`` on the wire, the same for either byte order: ``"float32"``, ``"bfloat16"``.

    Raises:
        ConfigError: kfcomm does not exchange this type; the message lists those it does.
    """
    if dtype.name in NUMPY_NAMES or (dtype.name == "bfloat16" and dtype.type.__module__ == "ml_dtypes"):
        return dtype.name
    raise unsupported(str(dtype))


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The native dtype called ``name`` on the wire.

    Raises:
        ConfigError: the name is unknown, or it is ``bfloat16`` and ``ml_dtypes`` is not installed.
    """
    if name == "bfloat16":
        return _bfloat16()
    if name in NUMPY_NAMES:
        return np.dtype(name)
    raise unsupported(name)


@cache
def checked(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """``dtype`` in native byte order, if it is supported.

    Raises:
        ConfigError: kfcomm does not exchange this type; the message lists those it does.
    """
    return dtype_of(dtype_name(dtype))


def dtype_called(given: Any) -> np.dtype[Any]:
    """The NumPy dtype of a name, or of a dtype of NumPy, torch, JAX or ml_dtypes, supported or not.

    Raises:
        ConfigError: the dtype is unknown, or it is ``bfloat16`` and ``ml_dtypes`` is not installed.
    """
    name = str(given).removeprefix("torch.") if type(given).__module__ == "torch" else given
    if name == "bfloat16":
        return _bfloat16()
    try:
        return np.dtype(name)
    except TypeError:
        near = hint(given, SUPPORTED_NAMES)
        raise ConfigError(f"dtype {given!r:.60} is unknown; supported are {', '.join(SUPPORTED_NAMES)}{near}") from None


def unsupported(name: str) -> ConfigError:
    """The error for a type called ``name`` that kfcomm does not exchange."""
    near = hint(name, SUPPORTED_NAMES) if name not in np.sctypeDict else ""
    return ConfigError(f"dtype {name} is not supported; supported are {', '.join(SUPPORTED_NAMES)}{near}")


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise ConfigError(lacking("bfloat16", "ml_dtypes")) from None
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


@lru_cache(1024)
def fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array of shape ``given`` can take a result of shape ``wanted``, row by row, without any doubt.

    So it is if one shape becomes the other by joining neighbouring axes: ``(4, 3)`` takes a result of ``(12,)`` or of
    ``(2, 2, 3)``, and ``(3,)`` one of ``(1, 3)``. Not ``(3, 4)``, whose rows are others: that is more likely a mistake.

    Cost: one look-up for a pair that was asked for before.
    """
    if 0 in given or 0 in wanted:
        return 0 in given and 0 in wanted
    left = [[n for n in shape if n != 1] for shape in (given, wanted)]
    while all(left):
        joined = [[axes.pop()] for axes in left]  # axes of each that hold the same elements
        sizes = [group[0] for group in joined]
        while sizes[0] != sizes[1]:
            short = int(sizes[1] < sizes[0])
            if not left[short]:
                return False
            joined[short].append(left[short].pop())
            sizes[short] *= joined[short][-1]
        if min(map(len, joined)) > 1:
            return False
    return not any(left)


def check_out_shape(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuse an ``out`` that does not take the result.

    Raises:
        ConfigError: it does not fit.
    """
    if given != wanted and not fits(given, wanted):
        raise ConfigError(
            f"out has shape {given}, the result has {wanted}; expected this shape, or one that joins or splits its axes"
        )
