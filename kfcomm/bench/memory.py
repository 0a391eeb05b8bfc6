"""Where the arrays of a benchmark are, and the clock that fits them.

Whoever measures makes arrays, overwrites, reads and times them by a `Memory`, so that it need not know whether they
are of the host or of a device. That of the host is here and adds nothing: arrays are NumPy's, and time is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kfcomm.bench.pattern import Array, spoil


class Stopwatch(Protocol):
    """Times one thing after the other."""

    def start(self) -> None:
        """From here on. Everything that the memory was told before is done."""

    async def elapsed_s(self) -> float:
        """Seconds from the start until what was called since is done: on a device, behind it on the caller's stream."""
        ...


class Memory(Protocol):
    """One kind of memory."""

    def holding(self, values: Array) -> Any:
        """An array there with these values, shape and dtype; ``values`` is given away."""
        ...

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """A flat array there of any values."""
        ...

    def spoil(self, array: Any) -> None:
        """Overwrite with what no result is, so that a result left from before is not taken for a new one."""

    def settle(self) -> None:
        """Returns when everything that was spoiled is."""

    def read(self, array: Any) -> Array:
        """The values, for NumPy. Nothing else works on the array any more."""
        ...

    def stopwatch(self) -> Stopwatch:
        """A clock for what works on these arrays."""
        ...


class HostStopwatch:
    """The clock of the host."""

    def __init__(self) -> None:
        self._began_s = 0.0

    def start(self) -> None:
        """See `Stopwatch`."""
        self._began_s = time.perf_counter()

    async def elapsed_s(self) -> float:
        """See `Stopwatch`: what returns is done."""
        return time.perf_counter() - self._began_s


class HostMemory:
    """That of the host."""

    def holding(self, values: Array) -> Any:
        """See `Memory`."""
        return values

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """See `Memory`."""
        return np.empty(count, dtype)

    def spoil(self, array: Any) -> None:
        """See `Memory`."""
        spoil(array)

    def settle(self) -> None:
        """See `Memory`: there is nothing to wait for."""

    def read(self, array: Any) -> Array:
        """See `Memory`."""
        return np.asarray(array)

    def stopwatch(self) -> Stopwatch:
        """See `Memory`."""
        return HostStopwatch()


class SymmetricMemory(HostMemory):
    """That of the host which its ranks share, made by ``Communicator.empty``."""

    def __init__(self, empty: Callable[..., Array]) -> None:
        self._empty = empty

    def holding(self, values: Array) -> Any:
        """See `Memory`."""
        made = self._empty(values.shape, values.dtype)
        made[...] = values
        return made

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """See `Memory`."""
        return self._empty(count, dtype)
