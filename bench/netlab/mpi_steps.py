"""All_reduce of MPI in an environment with mpi4py, without kfcomm: ``mpiexec ... python mpi_steps.py NBYTES COUNT``.

Rank 0 prints the seconds of each, from the first rank's call to the last one's result, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    """All steps of this rank, checked."""
    nbytes, count = map(int, sys.argv[1:])
    world = MPI.COMM_WORLD
    # Whole numbers, so that the sum is exact in any order.
    given = (np.arange(nbytes // 4) % 1000).astype(np.float32)
    result, wanted = np.empty_like(given), given * np.float32(world.size)
    spans = []
    for _ in range(count):
        world.Barrier()
        start_s = time.monotonic()
        world.Allreduce(given, result)
        times = world.gather((start_s, time.monotonic()))
        if not np.array_equal(result, wanted):
            raise RuntimeError(f"rank {world.rank} has a wrong result")
        if times is not None:
            spans.append(max(end for _, end in times) - min(start for start, _ in times))
    if world.rank == 0:
        print(json.dumps(spans))


if __name__ == "__main__":
    main()
