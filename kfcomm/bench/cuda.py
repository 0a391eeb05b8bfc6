"""The arrays of a benchmark in the memory of a CUDA device, through CuPy, which is imported here when it is needed.

Everything is done on the stream that is CuPy's current one: that is the caller's stream of every collective. Time is
taken by events on it, from the moment before the first call to where the last result is ready for what follows on the
stream. Needs nothing but copies and fills of CuPy: no kernel is compiled.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from kfcomm.arrays.devices.cuda_calls import INSTALL
from kfcomm.bench.memory import Stopwatch
from kfcomm.bench.pattern import Array
from kfcomm.common.sizes import show_size
from kfcomm.errors import ConfigError

_ALL_ONES = 0xFF
"""In every byte: not a number in all floating-point formats, -1 or the largest integer in the others."""


def num_devices() -> int:
    """How many CUDA devices this process can use; at least one.

    Raises:
        ConfigError: none, or CuPy is not installed; says what would help.
    """
    if find_spec("cupy") is None:
        raise ConfigError(f"arrays on a GPU need CuPy, which is not installed here: {INSTALL}")
    try:
        count = int(import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception as error:  # whatever hinders CuPy, and it has many kinds of errors
        text = " ".join(str(error).split())
        raise ConfigError(f"CuPy finds no GPU that it can use ({text}); is there an NVIDIA driver?") from error
    if not count:
        raise ConfigError("there is no CUDA device here (or CUDA_VISIBLE_DEVICES hides it)")
    return count


class CudaMemory:
    """That of one device; from its making on, the device is the current one of the thread that made it."""

    def __init__(self, ordinal: int) -> None:
        self._cupy = import_module("cupy")
        self._cupy.cuda.Device(ordinal).use()

    def holding(self, values: Array) -> Any:
        """See ``memory.Memory``."""
        array = self.empty(values.size, values.dtype).reshape(values.shape)
        array.set(values)
        return array

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """See ``memory.Memory``.

        Raises:
            ConfigError: the device has not so much memory, or CuPy has no such elements.
        """
        try:
            return self._cupy.empty(count, dtype)
        except MemoryError as error:
            asked = show_size(count * dtype.itemsize)
            raise ConfigError(f"the device has no {asked} left: take smaller messages or fewer ranks on it") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"CuPy has no arrays of {dtype}: {error}") from error

    def spoil(self, array: Any) -> None:
        """See ``memory.Memory``."""
        array.data.memset_async(0 if array.dtype.kind == "b" else _ALL_ONES, array.nbytes, self._stream)

    def settle(self) -> None:
        """See ``memory.Memory``. Waits for nothing but fills: no other rank has a part in them."""
        self._stream.synchronize()

    def read(self, array: Any) -> Array:
        """See ``memory.Memory``."""
        return np.asarray(array.get())

    def stopwatch(self) -> Stopwatch:
        """See ``memory.Memory``."""
        return _EventStopwatch(self._cupy)

    @property
    def _stream(self) -> Any:
        return self._cupy.cuda.get_current_stream()


class _EventStopwatch:
    """Two events on the current stream."""

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda
        # whoever waits for one sleeps, and leaves the core to the ranks
        self._first, self._last = self._cuda.Event(block=True), self._cuda.Event(block=True)

    def start(self) -> None:
        """See ``memory.Stopwatch``."""
        self._first.record(self._cuda.get_current_stream())

    async def elapsed_s(self) -> float:
        """See ``memory.Stopwatch``."""
        self._last.record(self._cuda.get_current_stream())
        # not on this thread: the other ranks may need this rank's loop before theirs, and so this one's, can end
        await asyncio.to_thread(self._last.synchronize)
        return float(self._cuda.get_elapsed_time(self._first, self._last)) / 1e3
