"""Interpreters that C code holds for 20 s: no rank is declared lost, and sums are right.

    python -m tests.search.held --seconds 3600 --transport tcp

No thread of such a process says anything: not the one that answers heartbeats, either. ``lost_after`` is what it is
by default.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from random import Random
from typing import Any

import click
import numpy as np

from tests.search.in_processes import in_processes

HELD_S = 20.0


def hold(seconds: float) -> None:
    """Sleep as a computation in C would that keeps the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def work(comm: Any, seconds: float, seed: int, held_s: float) -> int:
    """Make sums while one or two ranks are held before each; returns their number."""
    random, began_s, number = Random(seed), time.monotonic(), 0
    while float(comm.broadcast(np.array([time.monotonic() - began_s]), 0, name="clock")[0]) < seconds:
        number += 1
        held = random.sample(range(comm.size), random.choice([1, 1, 2]))
        x = np.full(random.choice([1, 5000, 500_001]), comm.rank + 1.0)
        begun = comm.all_reduce_async(x, name="begun")
        if comm.rank in held:
            hold(held_s)
        for total in (begun.wait(), comm.all_reduce(x, name="after")):
            assert (total == comm.size * (comm.size + 1) / 2).all()
    return number


def main() -> int:
    """Search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.held")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("shm", "unix", "tcp"))
    given = parser.parse_args()
    transport = given.transport or Random(given.seed).choice(["shm", "unix", "tcp"])
    from tests.search.held import work  # of the module as the ranks import it

    said = in_processes(work, given.seconds, given.seed, HELD_S, transport=transport)
    click.echo(f"held: {said[0]} times for {HELD_S:g} s over {transport}, no rank was lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
