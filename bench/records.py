"""Records of measurements as JSON: date, duration, machine and figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import ROOT
from kfcomm.bench.harness import fields_of

FORMAT = 1


class Record:
    """Record of one run; describes the machine, and starts its clock, when it is made.

    Args:
        name: of its file, ``bench/results/NAME-DATE.json``.
        path: in place of that file.
    """

    def __init__(self, name: str, path: Path | None = None) -> None:
        self.machine = describe()
        self._path = path or ROOT / f"bench/results/{name}-{datetime.now(UTC):%Y-%m-%d}.json"
        self._began_s = time.monotonic()

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write the figures, with what they were measured on."""
        about = {
            "format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "took_s": round(time.monotonic() - self._began_s), "machine": self.machine,
        }  # fmt: skip
        write({**about, **figures}, self._path)
        say(f"written: {self._path}")


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def say(text: str) -> None:
    """Write a line of progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


def describe(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Describe this machine, now: processor, memory, kernel, Python, load. Nothing that names the machine."""
    memory = fields_of(proc / "meminfo").get("MemTotal", "0").split()[0]
    try:
        load = (proc / "loadavg").read_text().split()[:3]
    except OSError:
        load = []
    return {
        "cpu": fields_of(proc / "cpuinfo").get("model name") or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(int(memory) / (1 << 20), 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_before": [float(part) for part in load],
        "commit": commit(ROOT),
    }


def commit(root: Path) -> str:
    """Return the commit of a checkout, with a mark if files differ from it; empty outside of one."""
    # A record of a changed checkout says so: its figures cannot be reproduced from the commit.
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True, text=True
        )
    except OSError:
        return ""
    return done.stdout.strip()
