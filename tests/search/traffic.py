"""Traffic counters of the ranks of a host: both ends agree to the byte, and no sum ever falls.

    python -m tests.search.traffic --seconds 60 --seed 1

Each world has two to five ranks that share memory. They call verbs at random, of some sizes and under repeated names,
in the world and in groups that are made and closed: over links, in slots, and in both.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from kfcomm.testing import world
from tests.conformance.worlds import until
from tests.search import driver

STEPS = 30
ELEMENTS = (1, 10, 1000, 30_001, 400_000)
"""For slots that are read whole, in parts, and in windows."""
HANG_S = 120.0


def calls(count: int, root: int, name: str) -> tuple[Callable[[Any], Any], ...]:
    """A call of each verb, of ``count`` elements."""
    x = np.ones(count, np.float32)
    return (
        lambda comm: comm.all_reduce(x, f"all_reduce {name}"),
        lambda comm: comm.all_reduce(x),
        lambda comm: comm.broadcast(x, root, f"broadcast {name}"),
        lambda comm: comm.reduce(x, root, name=f"reduce {name}"),
        lambda comm: comm.gather(x, root, f"gather {name}"),
        lambda comm: comm.all_gather(x, f"all_gather {name}"),
        lambda comm: comm.reduce_scatter(np.tile(x, comm.size), f"reduce_scatter {name}"),
        lambda comm: comm.all_to_all([x[: 10 + to] for to in range(comm.size)], f"all_to_all {name}"),
        lambda comm: comm.barrier(f"barrier {name}"),
    )


async def search(seed: int) -> None:
    """One world.

    Raises:
        AssertionError: a sum has fallen, or two ranks do not agree in the end.
    """
    random = Random(seed)
    size = random.randint(2, 5)
    strategy = random.choice(["auto", "ring", "star", "clique"])
    async with world(size, transport="shm", strategy=strategy) as comms:
        groups: list[list[Any]] = [list(comms)]
        low = [0] * size
        for step in range(STEPS):
            await _step(random, step, list(comms), groups)
            now = [_moved(comm) for comm in comms]
            assert all(one >= before for one, before in zip(now, low, strict=True)), (step, low, now)
            low = now
        await until(lambda: not disagreements(comms))  # what was under way arrives, or this hangs


async def _step(random: Random, step: int, comms: list[Any], groups: list[list[Any]]) -> None:
    group = random.choice(groups)
    what = random.random()
    if what < 0.1 and len(groups) < 4:
        members = sorted(random.sample(range(len(comms)), random.randint(2, len(comms))))
        made = await asyncio.gather(*(comms[rank].group(members, f"of step {step}") for rank in members))
        groups.append(list(made))
    elif what < 0.2 and group is not groups[0]:
        groups.remove(group)
        await asyncio.gather(*(comm.close() for comm in group))
    elif what < 0.3:
        source, target = random.sample(group, 2)
        x = np.ones(random.choice(ELEMENTS))
        await asyncio.gather(source.send(x, target.rank), target.recv(source.rank))
    else:
        count, root = random.choice(ELEMENTS), random.randrange(len(group))
        call = random.choice(calls(count, root, f"{random.choice('abc')} {count} {root}"))
        for _ in range(random.randint(1, 6)):
            await asyncio.gather(*map(call, group))


def _moved(comm: Any) -> int:
    return sum(one.sent_nbytes + one.received_nbytes + one.sent_messages for one in comm.statistics().peers)


def disagreements(comms: Any) -> list[tuple[Any, Any]]:
    """Pairs whose sent and received counters differ."""
    said = [comm.statistics() for comm in comms]
    sent = {
        (mine.rank, one.rank, one.link): (one.sent_nbytes, one.sent_messages) for mine in said for one in mine.peers
    }
    received = {
        (one.rank, mine.rank, one.link): (one.received_nbytes, one.received_messages)
        for mine in said
        for one in mine.peers
    }
    return sorted(set(sent.items()) ^ set(received.items()))


def case(seed: int) -> dict[str, int]:
    """Run the world of a seed."""
    asyncio.run(asyncio.wait_for(search(seed), HANG_S))
    return {"steps": STEPS}


if __name__ == "__main__":
    sys.exit(driver.run("traffic", case))
