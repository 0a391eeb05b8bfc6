"""Processes that make Adasum calls at random, while one is stopped or killed: no sum of freed memory, no endless wait.

    python -m tests.search.read_in_place --seconds 60 --seed 1

Names are used once, or again and again, several at a time in any order, of changing sizes, in the world and
in a group that is closed at once. Each rank knows the inputs of all, and so the result of each call. Buffers that are
free again are soon written to: by later calls, and by arrays that fill the heap.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from random import Random
from typing import Any

import numpy as np

from kfcomm.collectives.adasum_arithmetic import FusedLayout, adasum_weights
from kfcomm.errors import CollectiveError, EpochChanged, PeerLost, SessionClosed
from kfcomm.testing.faults import FaultPlan, Killed
from kfcomm.testing.processes import process_world
from tests.search import driver
from tests.search.pulls import strike

LOST_AFTER_S = 30.0  # a rank that is stopped for a moment on a busy machine is not lost


def given(seed: int, rank: int, size: int) -> Any:
    """Input of a rank in a call."""
    return np.random.default_rng((seed, rank)).standard_normal(size)


def expected(seed: int, ranks: list[int], size: int) -> Any:
    """Result of a call."""
    xs = np.stack([given(seed, rank, size) for rank in ranks])
    return adasum_weights(xs @ xs.T) @ xs


def call(comm: Any, name: str, seed: int, size: int, ranks: list[int]) -> None:
    """Make a call, and compare."""
    check(comm.all_reduce(given(seed, ranks[comm.rank], size), name, op="adasum"), seed, size, ranks)


def check(result: Any, seed: int, size: int, ranks: list[int]) -> None:
    """Compare a result."""
    np.testing.assert_allclose(result, expected(seed, ranks, size), rtol=1e-9, atol=1e-9)


def read_late(random: Random) -> None:
    """Let this process read results late, now and then, when the other ranks may be in later calls."""
    read = FusedLayout.results

    def results(layout: FusedLayout, parts: Any) -> Any:
        if random.random() < 0.2:
            time.sleep(random.random() * 0.01)
        return read(layout, parts)

    FusedLayout.results = results  # type: ignore[method-assign]


def work(comm: Any, number: int, seed: int) -> Counter[str]:
    """Make a number of steps, alike on all ranks but for their order; what came of them, by kind."""
    common, own = Random(seed), Random(f"{seed} {comm.rank}")
    read_late(Random(f"late {seed} {comm.rank}"))
    found: Counter[str] = Counter()
    ranks = list(range(comm.size))
    try:
        for step in range(number):
            kind = common.choice(["again", "again", "again", "once", "several", "group"])
            size, name, one = common.choice([3, 1000, 70_000]), common.choice("ab"), common.randrange(1 << 30)
            if kind == "several":
                begun = {
                    use: comm.all_reduce_async(given(one + use, comm.rank, size), f"{name}{use}", op="adasum")
                    for use in sorted(range(3), key=lambda _: own.random())
                }
                for use, handle in begun.items():
                    check(handle.wait(), one + use, size, ranks)
            elif kind == "group":
                with comm.group(ranks[::-1], f"group {step}") as group:
                    call(group, "x", one, size, ranks[::-1])
            else:
                call(comm, name if kind == "again" else f"once {step}", one, size, ranks)
            found[kind] += 1
            if own.random() < 0.3:  # memory that is free is not left as it was
                comm.empty(own.choice([24, 8000, 560_000]) * comm.size + 4096, np.uint8)[:] = own.randrange(256)
            if own.random() < 0.05:
                time.sleep(own.random() * 0.01)
    except (PeerLost, EpochChanged, SessionClosed, CollectiveError) as error:
        found[type(error).__name__] += 1
    return found


def once(random: Random, seconds: float = 4.0) -> Counter[str]:
    """One world; what the ranks that live have found, added up."""
    from tests.search.read_in_place import work  # of the module as the ranks import it

    size, seed = random.choice([2, 3, 4]), random.randrange(1 << 30)
    found: Counter[str] = Counter()
    with process_world(size, FaultPlan(), is_blocking=True, transport="shm", lost_after=LOST_AFTER_S) as world:
        for rank in range(size):
            world.outcome(rank)
        world.begin(work, (int(seconds * 150), seed))
        dead = strike(world, random, seconds)
        for rank in range(size):
            said = world.outcome(rank)
            if isinstance(said, BaseException) and not (rank in dead and isinstance(said, Killed)):
                raise AssertionError(f"{size} ranks, rank {rank}: {said!r}")
            if not isinstance(said, BaseException):
                found += said
                if not dead and sum(said.values()) != int(seconds * 150):
                    raise AssertionError(f"{size} ranks, rank {rank} has ended with {said}, and no rank was killed")
        with contextlib.suppress(ProcessLookupError):
            for rank in dead:
                world.kill(rank)
    return found


if __name__ == "__main__":
    sys.exit(driver.run("read_in_place", lambda seed: once(Random(seed))))
