"""What the figures were measured on: processor, memory, kernel, Python, load. Nothing that names the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from bench.compare.world import ROOT


def describe(proc: Path = Path("/proc")) -> dict[str, Any]:
    """A record of this machine, now."""
    return {
        "cpu": cpu_model(_read(proc / "cpuinfo")) or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": memory_gib(_read(proc / "meminfo")),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_before": [float(part) for part in _read(proc / "loadavg").split()[:3]],
        "commit": commit(ROOT),
    }


def cpu_model(cpuinfo: str) -> str:
    """The first processor's name in the text of ``/proc/cpuinfo``; empty where there is none (as on Arm)."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def memory_gib(meminfo: str) -> float:
    """Total memory in the text of ``/proc/meminfo``, in GiB; 0 where it is not said."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) / (1 << 20), 1)
    return 0.0


def commit(root: Path) -> str:
    """The commit of this checkout, with a mark if files differ from it; empty outside of one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
