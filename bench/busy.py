"""Cost of a busy neighbour: 1,000 blocking all_reduces of 1 KiB, alone and beside a process that only computes.

    kfcomm run -n 4 python bench/busy.py

Rounds take turns; the figure of a round is the mean of its calls, on the slowest rank, since a few calls that wait for
a whole time slice are what it is about. With as many ranks as processors, or more, a neighbour takes from one of them.

Bound: with one busy process, three times what the calls take alone.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import kfcomm.sync
from kfcomm.bench.harness import slowest_s

CALLS = 1000
BOUND = 3.0
COMPUTE = """
import time
end = time.monotonic() + 60
while time.process_time() < 0.2: pass
print("computes", flush=True)
while time.monotonic() < end: pass
"""
"""Says so once it has had a processor for a while."""


def mean_s(comm: kfcomm.sync.Communicator) -> float:
    """Of the slowest rank."""
    x = np.ones(256, np.float32)
    comm.barrier("begin")
    begun = time.perf_counter()
    for _ in range(CALLS):
        comm.all_reduce(x, "x")
    return slowest_s(comm, (time.perf_counter() - begun) / CALLS)


def measure(comm: kfcomm.sync.Communicator, num_rounds: int, num_busy: int) -> tuple[list[float], list[float]]:
    """Seconds of each round alone, and of each beside busy processes."""
    alone, beside = [], []
    for _ in range(num_rounds):
        alone.append(mean_s(comm))
        with computing(0 if comm.rank else num_busy):
            beside.append(mean_s(comm))
        comm.barrier("ended")
    return alone, beside


@contextmanager
def computing(number: int) -> Iterator[None]:
    """So many processes that do nothing else, from when all of them do."""
    neighbours = [subprocess.Popen([sys.executable, "-c", COMPUTE], stdout=subprocess.PIPE) for _ in range(number)]
    try:
        for neighbour in neighbours:
            if neighbour.stdout is not None:
                neighbour.stdout.readline()
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()


def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--busy", type=int, default=1, help="processes that compute")
    arguments = parser.parse_args()
    with kfcomm.sync.init() as comm:
        mean_s(comm)
        alone, beside = measure(comm, arguments.rounds, arguments.busy)
        if comm.rank:
            return
        ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        for name, seconds in (("alone", alone), ("beside", beside)):
            low, middle, high = (1e6 * one for one in (min(seconds), statistics.median(seconds), max(seconds)))
            print(f"{name:6} {middle:8.1f} µs ({low:.1f} to {high:.1f})")
        print(f"{ratio:.1f} times what it is alone (at most {BOUND:.0f}, with one)")
        if arguments.busy == 1 and ratio > BOUND:
            sys.exit("the bound does NOT hold")


if __name__ == "__main__":
    main()
