"""Devices of a benchmark's ranks: the memory of the arrays, and their description in the report.

No device is queried here: each rank described its own to the others when it joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kfcomm.arrays.devices import Device, DeviceReport
from kfcomm.arrays.devices.routes import backend_in_words, choose, driver_version
from kfcomm.bench.memory import CudaMemory, HostMemory, Memory, SymmetricMemory
from kfcomm.bench.pattern import Array
from kfcomm.bench.suite import Place
from kfcomm.types import Layout


def memory_of(place: Place, device: Device | None, empty: Callable[..., Array]) -> Memory:
    """Return the memory for the arrays of this rank, which has this device; ``empty``: of its ``Communicator``.

    Raises:
        ConfigError: CuPy cannot use the device.
    """
    if place is Place.SYMMETRIC:
        return SymmetricMemory(empty)
    return HostMemory() if place is Place.CPU or device is None else CudaMemory(device.ordinal)


def described(reports: Sequence[DeviceReport], layout: Layout, transports: Iterable[str]) -> dict[str, Any]:
    """Describe the devices of all ranks, and the routes of their memory, for the report.

    Returns:
        ``devices``, alike ones together, each with its ranks; ``routes`` by transport, each with its reason.
    """
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
