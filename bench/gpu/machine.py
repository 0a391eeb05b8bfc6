"""The GPU that was measured: model, driver and libraries. Nothing that names the machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kfcomm.arrays.devices.routes import backend_in_words, driver_version

_DRIVER = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")


def describe(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Describe the GPU; needs CuPy."""
    import cupy
    from cupy.cuda import nccl

    runtime = cupy.cuda.runtime
    found = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "model": found["name"].decode(),
        "memory_GiB": round(found["totalGlobalMem"] / (1 << 30), 1),
        "devices": runtime.getDeviceCount(),
        "driver": driver(proc),
        "cuda_of_driver": driver_version(runtime.driverGetVersion()),
        "cuda": driver_version(runtime.runtimeGetVersion()),
        "nccl": backend_in_words("nccl", nccl.get_version()).removeprefix("NCCL "),
        "cupy": cupy.__version__,
    }


def driver(proc: Path = Path("/proc")) -> str:
    """The driver's version, as its module tells the kernel; empty if it does not."""
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = _DRIVER.search(text)
    return found.group(1) if found else ""
