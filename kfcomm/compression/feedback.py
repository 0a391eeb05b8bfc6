"""Error feedback (Seide et al., 2014; Karimireddy et al., ICML 2019): errors are added to the next gradients.

For any compressor C: c_t = C(g_t + e_t), e_{t+1} = g_t + e_t − c_t. So at every step Σg = Σc + e: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfcomm.errors import ConfigError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Averaging(Protocol):
    """Part of ``kfcomm.sync.Communicator`` that compression needs."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce_many(self, arrays: Mapping[str, Any], *, op: Any) -> dict[str, Any]:
        """Reduce arrays by name."""

    def all_gather(self, x: Any, name: str) -> Any:
        """Stack the arrays of all ranks."""


class Errors:
    """Errors of compressed gradients, which were not sent yet, by name."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def corrected(self, name: str, gradient: Any) -> Array:
        """Return a C-contiguous copy of a gradient, plus its error.

        Raises:
            ConfigError: its dtype is not one of NumPy's floating-point types, or its shape has changed.
        """
        given = np.asarray(gradient)
        if given.dtype.kind != "f":
            raise ConfigError(f"gradient {name!r} is of {given.dtype}: float16, float32 and float64 can be compressed")
        error = self._kept.get(name)
        if error is None:
            return given.copy(order="C")
        if (error.shape, error.dtype) != (given.shape, given.dtype):
            raise ConfigError(f"gradient {name!r} was {error.dtype} {error.shape}, and is {given.dtype} {given.shape}")
        return np.asarray(np.add(given, error, order="C"))  # else a scalar for an array without axes

    def keep(self, name: str, error: Array) -> None:
        """Set the error of a gradient."""
        self._kept[name] = error

    def of(self, name: str) -> Array | None:
        """Return the error of a gradient; None if it was never compressed."""
        return self._kept.get(name)
