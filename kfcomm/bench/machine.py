"""What a benchmark ran on: the description of one host that goes into its report."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from kfcomm.common.version import __version__
from kfcomm.rendezvous.interfaces import hostname

_PACKAGES = ("numpy", "msgpack", "uvloop")


def describe() -> dict[str, Any]:
    """This host: processor, memory, system and the versions that matter."""
    return {
        "hostname": hostname(),
        "processor": _found("/proc/cpuinfo", ("model name", "Model", "cpu model")) or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {
            "kfcomm": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
    }


def available_nbytes() -> int | None:
    """Memory that can be had without swapping (proc(5): MemAvailable); None if the system does not say."""
    found = _found("/proc/meminfo", ("MemAvailable",))
    return None if found is None else int(found.split()[0]) * 1024


def _found(path: str, names: Iterable[str]) -> str | None:
    """The value of the first line ``name: value`` of a file of the kernel."""
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError:
        return None
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return next((fields[name] for name in names if fields.get(name)), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
