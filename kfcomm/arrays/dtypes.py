"""Element types that kfcomm exchanges, and their names on the wire.

Invariants: a dtype that passed `checked` is in native byte order, and `dtype_of(dtype_name(d)) == d`.
bfloat16 is a NumPy dtype only with the package ``ml_dtypes``, which is imported when it is first needed and is
never required otherwise. Nothing here knows arrays.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from kfcomm.common.arguments import hint
from kfcomm.common.extras import lacking
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
