"""Memory of a benchmark's arrays, with a fitting clock: host, symmetric memory or device; and the devices in words.

A benchmark makes, overwrites, reads and times arrays through a `BenchMemory`, and does not depend on where they are.

On a CUDA device everything is done by CuPy, which is imported when it is needed, on its current stream: the caller's
stream of every collective. Time is taken by events on that stream, from before the first call to where the last result
is ready. Only copies and fills are used: no kernel is compiled. No device is queried for the
report: each rank described its own to the others when it joined.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import numpy as np

from kfcomm.arrays.devices import Device, DeviceReport
from kfcomm.arrays.devices.cuda import INSTALL
from kfcomm.arrays.devices.routes import backend_in_words, choose, driver_version
from kfcomm.bench.suite import BenchPlace
from kfcomm.common.sizes import show_size
from kfcomm.errors import ConfigError
from kfcomm.types import Layout, override

_ALL_ONES = 0xFF
"""In every byte: not a number in all floating-point formats, -1 or the largest integer in the others."""


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def spoil(array: Array) -> None:
    """Overwrite with values that no result has, so that an old result is not taken for a new one."""
    if array.dtype.kind in "iu":
        array.fill(np.iinfo(array.dtype).max)
    else:
        array.fill(False if array.dtype.kind == "b" else np.nan)


class Stopwatch(Protocol):
    """Clock for one piece of work after the other."""

    def start(self) -> None:
        """Start the clock, after all earlier work of the memory."""

    async def elapsed_s(self) -> float:
        """Seconds from the start until what was called since is done: on a device, behind it on the caller's stream."""
        ...


class BenchMemory(Protocol):
    """One kind of memory."""

    def holding(self, values: Array) -> Any:
        """An array there with these values, shape and dtype; ``values`` is given away."""
        ...

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """A flat array there of any values."""
        ...

    def spoil(self, array: Any) -> None:
        """Overwrite with values that no result has, so that an old result is not taken for a new one."""

    def settle(self) -> None:
        """Wait until everything is overwritten that `spoil` was called with."""

    def read(self, array: Any) -> Array:
        """Return the values for NumPy; all work on the array is done."""
        ...

    def stopwatch(self) -> Stopwatch:
        """Make a clock for work on these arrays."""
        ...


class HostStopwatch(Stopwatch):
    """The clock of the host."""

    def __init__(self) -> None:
        self._began_s = 0.0

    @override
    def start(self) -> None:
        self._began_s = time.perf_counter()

    @override
    async def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s


class HostBenchMemory(BenchMemory):
    """Memory of the host: NumPy arrays, and the host's clock."""

    @override
    def holding(self, values: Array) -> Any:
        return values

    @override
    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        return np.empty(count, dtype)

    @override
    def spoil(self, array: Any) -> None:
        spoil(array)

    @override
    def settle(self) -> None:
        pass

    @override
    def read(self, array: Any) -> Array:
        return np.asarray(array)

    @override
    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()


class SymmetricMemory(HostBenchMemory):
    """Memory that the ranks of a host share, made by ``Communicator.empty``."""

    def __init__(self, empty: Callable[..., Array]) -> None:
        self._empty = empty

    @override
    def holding(self, values: Array) -> Any:
        made = self._empty(values.shape, values.dtype)
        made[...] = values
        return made

    @override
    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        return self._empty(count, dtype)


def num_devices() -> int:
    """Return how many CUDA devices this process can use, at least one.

    Raises:
        ConfigError: none, or CuPy is not installed; says what would help.
    """
    if find_spec("cupy") is None:
        raise ConfigError(f"arrays on a GPU need CuPy, which is not installed here: {INSTALL}")
    try:
        count = int(import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy and its drivers raise many kinds of errors
        text = " ".join(str(error).split())
        raise ConfigError(f"CuPy finds no GPU that it can use ({text}); is there an NVIDIA driver?") from error
    if not count:
        raise ConfigError("no CUDA device found (or CUDA_VISIBLE_DEVICES hides it)")
    return count


class CudaBenchMemory(BenchMemory):
    """Memory of one CUDA device, which becomes the current one of the thread that makes this."""

    def __init__(self, ordinal: int) -> None:
        self._cupy = import_module("cupy")
        self._cupy.cuda.Device(ordinal).use()

    @override
    def holding(self, values: Array) -> Any:
        array = self.empty(values.size, values.dtype).reshape(values.shape)
        array.set(values)
        return array

    @override
    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        try:
            return self._cupy.empty(count, dtype)
        except MemoryError as error:
            asked = show_size(count * dtype.itemsize)
            raise ConfigError(f"the device has no {asked} left: take smaller messages or fewer ranks on it") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"CuPy has no arrays of {dtype}: {error}") from error

    @override
    def spoil(self, array: Any) -> None:
        array.data.memset_async(0 if array.dtype.kind == "b" else _ALL_ONES, array.nbytes, self._stream)

    @override
    def settle(self) -> None:
        self._stream.synchronize()

    @override
    def read(self, array: Any) -> Array:
        return np.asarray(array.get())

    @override
    def stopwatch(self) -> Stopwatch:
        return _EventStopwatch(self._cupy)

    @property
    def _stream(self) -> Any:
        return self._cupy.cuda.get_current_stream()


class _EventStopwatch(Stopwatch):
    """Two events on the current stream."""

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda
        # Blocking events: waiting for one sleeps, and leaves the core to the ranks.
        self._first, self._last = self._cuda.Event(block=True), self._cuda.Event(block=True)

    @override
    def start(self) -> None:
        self._first.record(self._cuda.get_current_stream())

    @override
    async def elapsed_s(self) -> float:
        self._last.record(self._cuda.get_current_stream())
        # Not on this thread: other ranks may need this rank's loop before their calls, and so this one, can end.
        await asyncio.to_thread(self._last.synchronize)
        return float(self._cuda.get_elapsed_time(self._first, self._last)) / 1e3


def memory_of(place: BenchPlace, device: Device | None, empty: Callable[..., Array]) -> BenchMemory:
    """Return the memory for the arrays of this rank, which has this device; ``empty``: of its ``Communicator``.

    Raises:
        ConfigError: CuPy cannot use the device.
    """
    if place is BenchPlace.SYMMETRIC:
        return SymmetricMemory(empty)
    return HostBenchMemory() if place is BenchPlace.CPU or device is None else CudaBenchMemory(device.ordinal)


def described(reports: Sequence[DeviceReport], layout: Layout, transports: Iterable[str]) -> dict[str, Any]:
    """Describe the devices of all ranks, alike ones together, and the routes of their memory by transport."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        backend = backend_in_words(report.backend, report.backend_version) if report.backend else ""
        alike.setdefault((report.model, driver_version(report.driver), backend), []).append(rank)
    routes = {transport: choose(reports, layout, transport) for transport in transports}
    return {
        "devices": [
            {
                "ranks": ranks,
                "model": model,
                "physical": len({reports[rank].uuid for rank in ranks}),  # ranks may share one
                "driver": driver,
                "backend": backend,
            }
            for (model, driver, backend), ranks in alike.items()
        ],
        "routes": {name: {"route": str(one.route), "because": one.because} for name, one in routes.items()},
    }


def in_words(devices: dict[str, Any]) -> str:
    """One line for the result of `described`."""
    kinds = [f"{one['physical']} {one['model']}, {one['backend'] or 'no NCCL'}" for one in devices["devices"]]
    routes = {name: route_in_words(one) for name, one in devices["routes"].items()}
    if len(set(routes.values())) == 1:
        return f"{'; '.join(kinds)}; route {next(iter(routes.values()))}"
    return f"{'; '.join(kinds)}; routes: {', '.join(f'{name} {route}' for name, route in routes.items())}"


def route_in_words(route: dict[str, Any]) -> str:
    """One route of `described` in words."""
    return f"{route['route']} ({route['because']})"
