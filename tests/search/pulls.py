"""Processes that save and request blobs at random, while one is stopped or killed: no torn copy, no endless wait.

    python -m tests.search.pulls --seconds 60 --seed 1

Sizes and dtypes change from save to save. Each blob holds the number of its save and a checksum of the rest; the latest
version of a name never becomes an older one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import zlib
from collections import Counter
from random import Random
from typing import Any

import numpy as np

from kfcomm.errors import CollectiveError, CollectiveTimeout, PeerLost
from kfcomm.testing.faults import FaultPlan, Killed
from kfcomm.testing.processes import ProcessWorld, process_world
from tests.search import driver

NAMES = ("a", "b")
LOST_AFTER_S = 3.0
TIMEOUT_S = 1.0
WORDS = 2
"""Words before the numbers of a blob: of its save, and the checksum."""


def made(random: Random, number: int) -> Any:
    """A blob of any size."""
    size = random.choice([0, 1, 100, 2048, 30_000, random.randrange(1_500_000)])
    body = np.arange(size, dtype=np.uint64) * np.uint64(2 * number + 1)
    return np.concatenate([np.array([number, zlib.crc32(body)], np.uint64), body])


def check(blob: Any) -> int:
    """Number of the save that it is of; fails if it is torn."""
    number, checksum = (int(word) for word in blob[:WORDS])
    if zlib.crc32(blob[WORDS:]) != checksum:
        raise AssertionError(f"a torn copy of save {number} with {blob.size - WORDS} numbers")
    return number


def work(comm: Any, seconds: float, seed: int) -> Counter[str]:
    """Save and request until the time is over; what came of it, by kind."""
    random, until_s = Random(f"{seed} {comm.rank}"), time.monotonic() + seconds
    found: Counter[str] = Counter()
    seen: Counter[tuple[int, str]] = Counter()
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    number = 0
    while time.monotonic() < until_s:
        name, peer = random.choice(NAMES), random.choice(peers)
        if random.random() < 0.5:
            number += 1
            comm.save(name, made(random, number))
            found["saved"] += 1
            continue
        try:
            got = check(comm.request(name, peer, timeout=TIMEOUT_S))
        except (CollectiveTimeout, PeerLost) as error:
            if f"rank {peer}" not in str(error):
                raise AssertionError(f"it is not said that rank {peer} is missing: {error}") from error
            found[type(error).__name__] += 1
        except CollectiveError as error:
            if "saved nothing" not in str(error):
                raise
            found["not there"] += 1
        else:
            if got < seen[peer, name]:
                raise AssertionError(f"save {got} of rank {peer} after save {seen[peer, name]}")
            seen[peer, name] = got
            found["whole"] += 1
    return found


def strike(world: ProcessWorld, random: Random, seconds: float) -> set[int]:
    """Stop ranks and let them continue, or kill one, at random; return those that are killed."""
    until_s = time.monotonic() + seconds
    victim = random.randrange(len(world))
    pid = world.pid(victim)
    while time.monotonic() < until_s - 0.5:
        time.sleep(random.random() * 0.1)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(random.choice([0.001, 0.02, 0.3]))
        if random.random() < 0.05:
            world.kill(victim)
            return {victim}
        os.kill(pid, signal.SIGCONT)
    return set()


def once(random: Random, seconds: float = 4.0) -> Counter[str]:
    """One world; what the ranks that live have found, added up."""
    from tests.search.pulls import work  # of the module as the ranks import it

    size, seed = random.choice([2, 3, 4]), random.randrange(1 << 30)
    transport = random.choice(["shm", "shm", "shm", "unix"])
    found: Counter[str] = Counter()
    with process_world(size, FaultPlan(), is_blocking=True, transport=transport, lost_after=LOST_AFTER_S) as world:
        for rank in range(size):
            world.outcome(rank)
        world.begin(work, (seconds, seed))
        dead = strike(world, random, seconds)
        for rank in range(size):
            said = world.outcome(rank)
            if isinstance(said, BaseException) and not (rank in dead and isinstance(said, Killed)):
                raise AssertionError(f"{size} ranks over {transport}, rank {rank}: {said!r}")
            if not isinstance(said, BaseException):
                found += said
        with contextlib.suppress(ProcessLookupError):
            for rank in dead:
                world.kill(rank)
    return found


if __name__ == "__main__":
    sys.exit(driver.run("pulls", lambda seed: once(Random(seed))))
