"""A soak: every verb, changes of strategy, groups that come and go; memory and descriptors stay level.

    python -m tests.search.soak --seconds 7200 --transport tcp

Memory is the proportional set size (``smaps_rollup`` in proc(5)) but for files. What is under way at a moment makes it
go up and down by tens of MB; what is kept is the least of each part of the time. What that grows by after the first
half is compared with 1 MB an hour, and with what an allocator may add by chance. Told is the slope, the median of those
between any two (Theil and Sen), to which a step near the end is little.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np

from tests.search.in_processes import in_processes

STRATEGIES = ("auto", "ring", "star", "clique", "binary_tree")
GROWTH_NBYTES_S = 1e6 / 3600
WARM_UP_S = 600.0
"""Until then pools, plans and histograms fill; a shorter run looks for what grows by leaps."""
LEAP_NBYTES = 30e6
BY_CHANCE_NBYTES = 500_000
NUM_PARTS, LOOKS_PER_PART = 24, 20
Sample = tuple[float, int, int]
"""The seconds, the memory and the descriptors."""


def pss_nbytes() -> int:
    """Memory of this process, without files: its part of shared files changes with other Python processes."""
    text = Path("/proc/self/smaps_rollup").read_text("ascii")
    return 1024 * sum(int(found) for found in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE))


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def work(comm: Any, seconds: float, seed: int) -> list[Sample]:
    """Rounds of everything, with looks in between."""
    random, began_s = Random(seed), time.monotonic()
    samples: list[Sample] = []
    number = 0
    while True:
        number += 1
        # all ranks go on, or none does: by the clock of rank 0
        passed_s = float(comm.broadcast(np.array([time.monotonic() - began_s]), 0, name="clock")[0])
        if passed_s > seconds * (len(samples) + 1) / (NUM_PARTS * LOOKS_PER_PART):
            samples.append((passed_s, pss_nbytes(), descriptors()))
        if passed_s > seconds:
            return samples
        _round(comm, random, number)


def _round(comm: Any, random: Random, number: int) -> None:
    x = np.full(random.choice([1, 100, 5000, 70_001]), comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    assert comm.all_reduce(x, name=f"sum {number % 50}")[0] == total
    handles = [comm.all_reduce_async(x, name=f"many {place}") for place in range(4)]
    assert all(handle.wait()[0] == total for handle in handles)
    assert len(comm.all_gather(x, name="gathered")) == comm.size
    assert comm.broadcast(x, number % comm.size, name="told")[0] == number % comm.size + 1
    comm.reduce_scatter(np.ones((comm.size, 10)), name="scattered")
    comm.all_to_all(np.ones((comm.size, 10)), name="all")
    assert comm.consensus({"round": number}, name="agreed")
    if number % 20 == 0:
        comm.set_strategy(random.choice(STRATEGIES))
    if number % 10 == 0 and comm.rank < 2:
        with comm.group([0, 1]) as two:
            assert two.all_reduce(x, name="of two")[0] == 3
    comm.barrier()


def parts(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Of equal numbers, but for the last one."""
    size = -(-len(samples) // NUM_PARTS)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def slope(samples: Sequence[Sample]) -> float:
    """Bytes a second by which memory grows: the median of the slopes between any two samples."""
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(samples, 2))


def main() -> int:
    """Soak for so many seconds; 1 if memory or descriptors grow."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.soak")
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("shm", "unix", "tcp"))
    given = parser.parse_args()
    transport = given.transport or Random(given.seed).choice(["shm", "unix", "tcp"])
    from tests.search.soak import work  # of the module as the ranks import it

    said = in_processes(work, given.seconds, given.seed, transport=transport)
    is_level = True
    for rank, samples in enumerate(said):
        floors = [min(part, key=lambda one: one[1]) for part in parts(samples)]
        later = floors[len(floors) // 2 :]
        (from_s, before, _), (to_s, after, _) = later[0], later[-1]
        opened, still = samples[len(samples) // 2][2], samples[-1][2]
        allowed = LEAP_NBYTES if from_s < WARM_UP_S else BY_CHANCE_NBYTES + GROWTH_NBYTES_S * (to_s - from_s)
        is_level &= after - before <= allowed and still <= opened + 1
        now, hourly = after / 1e6, slope(later) * 3600 / 1e6
        click.echo(f"{transport} rank {rank}: {now:.1f} MB, {hourly:+.2f} MB an hour, {still} descriptors")
        click.echo("    " + " ".join(f"{nbytes / 1e6:.1f}" for _, nbytes, _ in floors))
    return int(not is_level)


if __name__ == "__main__":
    sys.exit(main())
