"""Harness of measurements: jobs of `kfcomm run`, rounds of turns, times of the slowest rank, the host in a report."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kfcomm.common.version import __version__
from kfcomm.rendezvous.host import hostname

T = TypeVar("T")


class JobFailed(RuntimeError):
    """A job did not end well or in time; the text has the end of its output."""


def run_job(
    size: int, program: Sequence[str] | str, *arguments: object, options: Sequence[str] = (),
    env: Mapping[str, str] | None = None, timeout_s: float | None = 300,
) -> str:  # fmt: skip
    """Run a program with `kfcomm run` on this host; returns what its ranks wrote to standard output.

    ``program`` is a command line after the interpreter, or the text of a program; ``options`` are those of `kfcomm
    run`; ``env`` has variables beside those of this process.

    Raises:
        JobFailed: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="kfcomm-bench-") as folder:
        if isinstance(program, str):
            path = Path(folder) / "program.py"
            path.write_text(program)
            program = [str(path)]
        command = [sys.executable, "-m", "kfcomm", "run", "-n", str(size), *options, sys.executable, *program]
        command += map(str, arguments)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, env=os.environ | (env or {})
            )
        except subprocess.TimeoutExpired as error:
            raise JobFailed(f"{size} ranks did not end within {timeout_s:g} s: {' '.join(command[4:])}") from error
    # The end of the output has the error.
    if done.returncode:
        raise JobFailed(f"{size} ranks failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"[-4000:])
    return done.stdout


def said(output: str) -> list[str]:
    """Return the lines that ranks wrote, without the rank before each."""
    return [line.partition("] ")[2] for line in output.splitlines() if line.startswith("[")]


def said_json(output: str) -> Any:
    """Return the JSON object that one rank wrote, wherever in its line it begins."""
    # The launcher may put the rank before the line.
    return json.loads(output[output.index("{") :])


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Return the items in order, beginning with another one."""
    first = by % len(items) if items else 0
    return [*items[first:], *items[:first]]


def slowest_s(comm: Any, seconds: float) -> float:
    """Return the greatest of what the ranks give, on each rank; ``comm`` is a ``kfcomm.sync.Communicator``."""
    return float(comm.all_reduce(np.array([seconds]), "slowest", op="max")[0])


def take_turns(
    comm: Any, works: Mapping[str, Callable[[], float]], rounds: int, *, warmup: int = 1
) -> dict[str, list[float]]:
    """Let works take turns, so that noise meets all alike; returns the seconds of each round, on the slowest rank.

    Each work returns how long it took on this rank; ``comm`` is a ``kfcomm.sync.Communicator``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(warmup + rounds):
        for name, work in works.items():
            comm.barrier("turn")  # a rank that is still busy with the last turn would count in this one
            took_s = slowest_s(comm, work())
            if number >= warmup:
                seconds[name].append(took_s)
    return seconds


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the maker of uvloop's loops where it is installed; else None, which means asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    made: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return made


def run_on_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


_PACKAGES = ("numpy", "msgpack", "uvloop")


def describe_host() -> dict[str, Any]:
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
