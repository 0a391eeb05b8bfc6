"""Choice of a rank's device, and its description for the other ranks.

Invariants: CuPy, and modules that use it, are imported only where there may be a device.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Final

from kfcomm.arrays.devices.base import Device, DeviceReport
from kfcomm.arrays.devices.cuda_calls import INSTALL, load_cupy
from kfcomm.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from kfcomm.arrays.devices.cuda import CudaDevice

DRIVER_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""With a driver, one of these exists; the last is that of WSL."""


def find(choice: str, local_rank: int) -> tuple[Device | None, DeviceReport]:
    """The device of a rank, and the report for the other ranks.

    Args:
        choice: ``auto`` for a device if there is one, ``none``, ``cuda`` for a required one, ``cuda:N`` for that one.
        local_rank: among the ranks of its host, which are distributed over the devices that the process sees.

    Raises:
        ConfigError: ``choice`` is not one of these, or the device is missing; says what would help. For ``auto`` the
            report says it instead.

    Cost: without a driver about 15 µs, and no imports.
    """
    if choice == "none":
        return None, DeviceReport(lack="switched off: device is none")
    kind, colon, number = choice.partition(":")
    if choice != "auto" and (kind != "cuda" or bool(colon) != number.isdecimal()):
        raise ConfigError(f"device is {choice!r}: expected auto, none, cuda, or cuda:N, with N as CUDA counts devices")
    try:
        # Files first: a host without a driver need not import CuPy, which is slow.
        if choice == "auto" and not any(map(os.path.exists, DRIVER_NODES)):
            raise ConfigError("this host has no NVIDIA GPU, or no driver for it")
        device = _open(int(number) if colon else None, local_rank)
    except (ConfigError, TransportError) as error:
        if choice == "auto":
            return None, DeviceReport(lack=str(error))
        raise ConfigError(f"device is {choice}, but {error}") from error
    return device, device.report


def _open(ordinal: int | None, local_rank: int) -> CudaDevice:
    if importlib.util.find_spec("cupy") is None:
        raise ConfigError(f"CuPy is not installed: {INSTALL}")
    from kfcomm.arrays.devices.cuda import CudaDevice

    runtime = load_cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise ConfigError(f"CUDA finds no device: {error}") from error
    if ordinal is None:
        # More ranks than devices share them, which `routes` takes into account.
        ordinal = local_rank % count
    elif ordinal >= count:
        names = ", ".join(f"cuda:{n} ({runtime.getDeviceProperties(n)['name'].decode()})" for n in range(count))
        raise ConfigError(f"this process sees only {names}; CUDA_VISIBLE_DEVICES may hide others")
    return CudaDevice(ordinal)
