"""How long an urgent 4 KiB all_reduce takes while one of 64 MiB is in flight, with priorities and without.

    kfcomm run -n 2 --transport tcp python bench/priority.py

Rounds take turns, so that noise meets all alike: the small one alone; the large one alone; the small one begun while
the large one is under way, both of one priority; the same with the small one more urgent. The time of a round is that
of its slowest rank, the figures are medians. A chunk's service time is that of the large one alone, by its chunks.

Bounds: with priorities, the idle latency and four service times; and a tenth of what it is without.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np

import kfcomm
from kfcomm.bench.harness import run_on_loop
from kfcomm.collectives.plans import CHUNK_NBYTES

URGENT_NBYTES = 4 << 10
BEGIN_AT = 0.15
"""Share of the large one's time after which the small one begins."""


class Rounds:
    """The rounds of one rank, each a coroutine that returns seconds."""

    def __init__(self, comm: kfcomm.Communicator, nbytes: int) -> None:
        self.comm = comm
        self.large = np.ones(nbytes // 4, np.float32)
        self.small = np.ones(URGENT_NBYTES // 4, np.float32)
        self.result = np.empty_like(self.large)
        self.delay_s = 0.0

    async def idle(self) -> float:
        """The small one alone."""
        return await self._urgent(0)

    async def alone(self) -> float:
        """The large one alone."""
        begun = time.perf_counter()
        await self._begin(0)
        return time.perf_counter() - begun

    async def without(self) -> float:
        """The small one while the large one is under way, no more urgent than it."""
        return await self._during(0, 0)

    async def priority(self) -> float:
        """The small one while the large one is under way, and more urgent."""
        return await self._during(-1, 1)

    async def _during(self, low: int, high: int) -> float:
        large = self._begin(low)
        await asyncio.sleep(self.delay_s)
        took = await self._urgent(high)
        await large
        return took

    def _begin(self, priority: int) -> Awaitable[np.ndarray]:
        return self.comm.all_reduce(self.large, "large", out=self.result, priority=priority)

    async def _urgent(self, priority: int) -> float:
        begun = time.perf_counter()
        await self.comm.all_reduce(self.small, "small", priority=priority)
        return time.perf_counter() - begun


async def measure(comm: kfcomm.Communicator, nbytes: int, num_rounds: int) -> dict[str, float]:
    """Medians, in seconds, by kind of round."""
    rounds = Rounds(comm, nbytes)
    kinds: list[Callable[[], Awaitable[float]]] = [rounds.idle, rounds.alone, rounds.without, rounds.priority]
    times: dict[str, list[float]] = {}
    for number in range(num_rounds + 2):
        for kind in kinds:
            await comm.barrier("round")
            took = np.array([await kind()])
            slowest = float((await comm.all_reduce(took, "took", op="max"))[0])
            if number < 2:  # warm-up; it also tells how long the large one takes
                rounds.delay_s = BEGIN_AT * slowest if kind == rounds.alone else rounds.delay_s
            else:
                times.setdefault(kind.__name__, []).append(slowest)
    return {kind: statistics.median(seconds) for kind, seconds in times.items()}


def report(medians: dict[str, float], nbytes: int) -> bool:
    """Print the figures; whether the bounds hold."""
    service_s = medians["alone"] / (nbytes / CHUNK_NBYTES)
    waited = (medians["priority"] - medians["idle"]) / service_s
    ratio = medians["without"] / medians["priority"]
    print(f"large alone    {medians['alone'] * 1e3:8.2f} ms, {service_s * 1e3:.3f} ms per chunk")
    print(f"small alone    {medians['idle'] * 1e3:8.2f} ms")
    print(f"small, equal   {medians['without'] * 1e3:8.2f} ms while the large one is under way")
    print(f"small, urgent  {medians['priority'] * 1e3:8.2f} ms: idle and {waited:.1f} chunks (at most 4)")
    print(f"               a {ratio:.1f}th of what it is without (at most a tenth)")
    holds = waited <= 4 and ratio >= 10
    print("the bounds hold" if holds else "the bounds do NOT hold")
    return holds


async def main() -> None:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=64 << 20, help="of the large one")
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    async with kfcomm.init() as comm:
        medians = await measure(comm, arguments.nbytes, arguments.rounds)
        if comm.rank == 0 and not report(medians, arguments.nbytes):
            sys.exit(1)


if __name__ == "__main__":
    run_on_loop(main())
