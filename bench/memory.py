"""Whether memory grows: 20,000 iterations of mixed sizes, strategies and verbs.

    kfcomm run -n 4 python bench/memory.py

After every tenth of them each rank notes its resident memory and the memory that it shares with its peers. The first
four tenths are warm-up, in which plans, histograms of latencies and the allocator's pools fill. Bounds: after it no
rank's resident memory grows by more than 1 %, and no arena is larger than 64 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np

import kfcomm

COUNTS = (1, 8, 500, 2048, 5000, 16384, 70_001, 262_144)
STRATEGIES = ("auto", "ring", "clique", "binary_tree")
MIB = 1 << 20


def resident_nbytes() -> int:
    """Of this process, with what it shares."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4096


def arena_nbytes() -> int:
    """Of the largest arena that this process has mapped: its own, or a peer's of the same size.

    Slots and heaps are mapped as well, and larger, but have memory only where something was written: that is resident.
    """
    sizes = [0]
    for line in Path("/proc/self/maps").read_text("ascii").splitlines():
        place, *_, name = line.split(maxsplit=5)
        if "memfd:kfcomm-arena" in name:
            low, high = (int(edge, 16) for edge in place.split("-"))
            sizes.append(high - low)
    return max(sizes)


async def iterate(comm: kfcomm.Communicator, number: int) -> None:
    """One iteration: several sizes at once, and a verb besides."""
    if number % 50 == 0:
        await comm.set_strategy(STRATEGIES[number // 50 % len(STRATEGIES)])
    inputs = [np.full(COUNTS[(number + step) % len(COUNTS)], comm.rank, np.float32) for step in (0, 3, 5)]
    handles = [comm.all_reduce(one, f"tensor/{step}") for step, one in enumerate(inputs)]
    for result in await asyncio.gather(*handles):
        if result[-1] != sum(range(comm.size)):
            raise SystemExit(f"rank {comm.rank}: iteration {number} is wrong")
    match number % 4:
        case 0:
            await comm.all_gather(inputs[0], "gathered")
        case 1:
            await comm.broadcast(inputs[1], number % comm.size, "broadcast")
        case 2:
            await comm.all_gather_object({"iteration": number}, "objects")
        case _:
            await comm.barrier("barrier")


async def main() -> None:
    """Run and judge on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20_000)
    options = parser.parse_args()
    tenth = options.iterations // 10
    resident = []
    async with kfcomm.init() as comm:
        for number in range(options.iterations):
            await iterate(comm, number)
            if (number + 1) % tenth == 0:
                resident.append(resident_nbytes())
        growth = max(resident[4:]) / resident[3] - 1
        said = await comm.all_gather_object([growth, arena_nbytes(), [value / MIB for value in resident]])
        holds = all(growth <= 0.01 and arena <= 64 * MIB for growth, arena, _ in said)
        if comm.rank == 0:
            for rank, (growth, arena, sizes) in enumerate(said):
                shown = " ".join(f"{size:.1f}" for size in sizes)
                print(f"rank {rank}: grew by {growth:.1%} after warm-up; arena {arena / MIB:.0f} MiB; MiB: {shown}")
            print("the bounds hold" if holds else "the bounds do NOT hold")
        if not holds:
            sys.exit(1)


if __name__ == "__main__":
    asyncio.run(main())
