"""Processes that are killed or halted at any moment: the others get `PeerLost` within its bound, and no wrong sum.

python -m tests.search.kills --seconds 60 --seed 1
"""

from __future__ import annotations

import sys
import time
from random import Random
from typing import Any

import numpy as np

from kfcomm.errors import PeerLost
from kfcomm.testing.faults import FaultPlan
from kfcomm.testing.processes import process_world
from tests.search import driver

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


def case(seed: int) -> dict[str, int]:
    """Run the world of a seed."""
    what, seconds = once(Random(seed))
    if seconds > BOUNDS_S[what]:
        raise AssertionError(f"{what}: only after {seconds:.1f} s")
    return {what: 1}


if __name__ == "__main__":
    sys.exit(driver.run("kills", case))
