"""Error feedback (Seide et al., 2014; Karimireddy et al., ICML 2019): what was left out is added to what comes next.

For any compressor C: c_t = C(g_t + e_t), e_{t+1} = g_t + e_t − c_t. So at every step Σg = Σc + e: nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfcomm.errors import ConfigError

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Averaging(Protocol):
    """What is needed of a communicator: ``kfcomm.sync.Communicator`` has it."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce_many(self, arrays: Mapping[str, Any], *, op: Any) -> dict[str, Any]:
        """See ``Communicator``."""

    def all_gather(self, x: Any, name: str) -> Any:
        """See ``Communicator``."""


class Errors:
    """What of each gradient has not been sent yet, by name."""

    def __init__(self) -> None:
        self._kept: dict[str, Array] = {}

    def corrected(self, name: str, gradient: Any) -> Array:
        """The gradient with what was left out before: a C-contiguous array of its own.

        Raises:
            ConfigError: it holds no floating-point numbers that NumPy calculates with, or has changed its shape.
        """
        given = np.asarray(gradient)
        if given.dtype.kind != "f":
            raise ConfigError(f"gradient {name!r} is of {given.dtype}: float16, float32 and float64 can be compressed")
        error = self._kept.get(name)
        if error is None:
            return given.copy(order="C")
        if (error.shape, error.dtype) != (given.shape, given.dtype):
            raise ConfigError(f"gradient {name!r} was {error.dtype} {error.shape}, and is {given.dtype} {given.shape}")
        return np.asarray(np.add(given, error, order="C"))  # what has no axis is no array else

    def keep(self, name: str, error: Array) -> None:
        """What is left out this time."""
        self._kept[name] = error

    def of(self, name: str) -> Array | None:
        """What has been left out of a gradient so far; None if it was never compressed."""
        return self._kept.get(name)
