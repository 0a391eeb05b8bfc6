"""Processes that are killed or halted at any moment: the others get `PeerLost` within its bound, and no wrong sum.

python -m tests.search.kills --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
from random import Random
from typing import Any

import click
import numpy as np

from kfcomm.errors import PeerLost
from kfcomm.testing.faults import FaultPlan
from kfcomm.testing.processes import process_world

LOST_AFTER_S = 2.0
BOUNDS_S = {"kill": 10.0, "stop": LOST_AFTER_S + 10.0}
"""Upper limit of the bound, however busy the machine is."""


def work(comm: Any, num_elements: int) -> str:
    """Reduce until somebody is lost; what was found."""
    number = 0
    right = sum(range(1, comm.size + 1))
    while True:
        number += 1
        try:
            total = comm.all_reduce(np.full(num_elements, comm.rank + 1), name=f"n{number % 7}")
        except PeerLost as error:
            return str(error)
        if not (total == right).all():
            raise AssertionError(f"a wrong sum: {total}")


def once(random: Random) -> tuple[str, float]:
    """One world with one killed rank: how it ended, and how long the last of the others took to know."""
    from tests.search.kills import work  # of the module as the ranks import it

    size, what = random.choice([2, 3, 4]), random.choice(list(BOUNDS_S))
    transport, num_elements = random.choice(["shm", "unix", "tcp"]), random.choice([1, 3000, 1_000_000])
    settings = {"transport": transport, "lost_after": LOST_AFTER_S, "timeout": 60}
    if transport == "tcp" and random.random() < 0.5:
        settings["checksum"] = True
    with process_world(size, FaultPlan(), is_blocking=True, **settings) as world:
        for rank in range(size):
            world.outcome(rank)  # it has joined: who ends before is the launcher's to tell
        world.begin(work, (num_elements,))
        time.sleep(random.random() * 0.2)
        victim = random.randrange(size)
        (world.kill if what == "kill" else world.stop)(victim)
        began_s = time.monotonic()
        for rank in set(range(size)) - {victim}:
            said = world.outcome(rank)
            if not isinstance(said, str):
                raise AssertionError(f"{settings}, {size} ranks, {what} {victim}: rank {rank} says {said!r}")
        return what, time.monotonic() - began_s


def main() -> int:
    """Search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.kills")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    random, until_s = Random(given.seed), time.monotonic() + given.seconds
    took: dict[str, list[float]] = {what: [] for what in BOUNDS_S}
    while time.monotonic() < until_s:
        what, seconds = once(random)
        took[what].append(seconds)
        if seconds > BOUNDS_S[what]:
            raise AssertionError(f"{what}: only after {seconds:.1f} s")
    click.echo(
        ", ".join(f"{what}: {len(all_s)}, {max(all_s, default=0):.2f} s at most" for what, all_s in took.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
