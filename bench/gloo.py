"""kfcomm and torch's Gloo side by side: the same all_reduce, in the same processes, taking turns.

    kfcomm run -n 4 --transport tcp python bench/gloo.py --json results.json

Each round times one call of both, after a barrier; medians and their ratio are printed by rank 0. Both reduce in
place. Needs torch (2.13.0). Taking turns in one run makes the ratio robust against noise; the times are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import kfcomm

try:
    import uvloop
except ImportError:
    uvloop = None

SIZES = {"64MiB": (64 << 20, 15), "1MiB": (1 << 20, 60), "1KiB": (1 << 10, 200)}
"""Bytes, and rounds."""


async def compare(comm: kfcomm.Communicator, nbytes: int, rounds: int) -> dict[str, float]:
    """Medians, in seconds, of the slowest rank of each round."""
    ours = np.empty(nbytes // 4, np.float32)
    theirs = torch.empty(nbytes // 4, dtype=torch.float32)
    times: dict[str, list[float]] = {"kfcomm": [], "gloo": []}
    for number in range(rounds + 3):
        ours.fill(comm.rank + 1)
        theirs.fill_(comm.rank + 1)
        for library in ("kfcomm", "gloo") if number % 2 else ("gloo", "kfcomm"):
            await comm.barrier()
            start_s = time.perf_counter()
            if library == "kfcomm":
                await comm.all_reduce(ours, "bench", out=ours)
            else:
                dist.all_reduce(theirs)
            took_s = time.perf_counter() - start_s
            slowest = await comm.all_reduce(np.array([took_s]), op="max")
            if number >= 3:
                times[library].append(float(slowest[0]))
        expected = comm.size * (comm.size + 1) / 2
        if not (ours == expected).all() or not bool((theirs == expected).all()):
            raise SystemExit(f"wrong result on rank {comm.rank}")
    return {library: statistics.median(taken) for library, taken in times.items()}


async def main() -> None:
    """Compare at each size; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=list(SIZES), help="which messages")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    async with kfcomm.init() as comm:
        folder = tempfile.mkdtemp(prefix="gloo-") if comm.rank == 0 else None
        meeting = await comm.broadcast_object(folder)
        dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=comm.rank, world_size=comm.size)
        report: dict[str, Any] = {"machine": machine(), "ranks": comm.size, "strategy": comm.strategy.name}
        for size in options.sizes:
            medians = await compare(comm, *SIZES[size])
            report[size] = medians
            if comm.rank == 0:
                ratio = medians["gloo"] / medians["kfcomm"]
                print(
                    f"{size:>6}: kfcomm {medians['kfcomm'] * 1e3:8.3f} ms, Gloo {medians['gloo'] * 1e3:8.3f} ms, "
                    f"Gloo / kfcomm {ratio:.2f}",
                    flush=True,
                )
        dist.destroy_process_group()
        if comm.rank == 0 and options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "kfcomm": kfcomm.__version__,
    }


if __name__ == "__main__":
    if uvloop is not None:
        sys.exit(uvloop.run(main()))
    asyncio.run(main())
