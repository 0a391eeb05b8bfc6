"""Description of a host, for reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from kfcomm.common.version import __version__
from kfcomm.rendezvous.host import hostname

_PACKAGES = ("numpy", "msgpack", "uvloop")


def describe() -> dict[str, Any]:
    """Describe this host: processor, memory, system and versions."""
    return {
        "hostname": hostname(),
        "processor": _processor(),
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
    """Return the memory that is available without swapping (proc(5): MemAvailable); None where it is not known."""
    found = fields_of(Path("/proc/meminfo")).get("MemAvailable")
    return None if found is None else int(found.split()[0]) * 1024


def fields_of(path: Path) -> dict[str, str]:
    """Return the lines ``name: value`` of a file of the kernel, the first of each name; empty if it cannot be read."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        fields.setdefault(name.strip(), value.strip())
    return fields


def _processor() -> str:
    fields = fields_of(Path("/proc/cpuinfo"))
    names = ("model name", "Model", "cpu model")
    return next((fields[name] for name in names if fields.get(name)), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
