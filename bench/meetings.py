"""Cost of an adaptation step without decisions: the meeting at its end, beside a small all_reduce.

::

    python -m bench.meetings -n 4

Ranks of one machine do blocks of steps, in turns: bare (one all_reduce of 8 float32 each) and watched (the same within
``adaptation.step()``, without policies, or with two that have nothing to do). The cost is the difference of the blocks'
medians. It is printed as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import numpy as np

import kfcomm
from kfcomm.adapt import Adaptation, AutoStrategy, AvoidSlowLinks, Policy
from kfcomm.bench.harness import run_job

BLOCKS, STEPS = 20, 50


async def rank() -> None:
    """One rank of the measurement."""
    async with kfcomm.init(strategy="star") as comm:
        x = np.ones(8, np.float32)
        settings: dict[str, list[Policy] | None] = {
            "bare": None, "no policies": [], "two policies": [AutoStrategy(("star",)), AvoidSlowLinks()],
        }  # fmt: skip
        adaptations = {name: Adaptation(comm, given) for name, given in settings.items() if given is not None}
        blocks: dict[str, list[float]] = {name: [] for name in settings}
        for number in range(BLOCKS + 1):
            for name in settings:
                took_s = await block(comm, adaptations.get(name), lambda: comm.all_reduce(x, "x"))
                if number:
                    blocks[name].append(took_s / STEPS * 1e6)
        for adaptation in adaptations.values():
            await adaptation.close()
        if comm.rank == 0:
            medians = {name: statistics.median(each) for name, each in blocks.items()}
            costs = {name: round(each - medians["bare"], 1) for name, each in medians.items() if name != "bare"}
            print(json.dumps({"ranks": comm.size, "all_reduce_us": round(medians["bare"], 1), "step_costs_us": costs}))


async def block(
    comm: kfcomm.Communicator, adaptation: Adaptation | None, work: Callable[[], Awaitable[object]]
) -> float:
    """Seconds for a block of steps."""
    await comm.barrier()
    begun_s = time.monotonic()
    for _ in range(STEPS):
        async with nullcontext() if adaptation is None else adaptation.step():
            await work()
    return time.monotonic() - begun_s


if __name__ == "__main__":
    if "KFCOMM_RANK" in os.environ:
        asyncio.run(rank())
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("-n", type=int, default=4, help="number of ranks")
        print(run_job(parser.parse_args().n, ["-m", "bench.meetings"]), end="")
