"""Cost of changing the strategy under load: 10,000 collectives, and 200 changes among 5 strategies.

    kfcomm run -n 4 python bench/swaps.py

Two kinds of round take turns. Both run the same collectives, of mixed sizes, with as many in flight, and spend as
long in each strategy: the quiet one changes it once for each strategy, the other one all the time. Every result is
compared with what it must be. Times of a change are from the call to its result; those of a small all_reduce are taken
in the same state: with nothing else in flight (idle), and among the collectives (loaded).

Bounds: a change takes at most twice a small all_reduce, in both states; the throughput is at least 95 % of that of
the quiet rounds (the median of the pairs' ratios).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kfcomm
from kfcomm.bench.harness import run_on_loop

STRATEGIES = ("star", "ring", "clique", "binary_tree", "multi_binary_tree_star")
COUNTS = (8, 256, 4096, 16384)
"""Elements, of float32: 32 B to 64 KiB; a part of each strategy's chunks is whole, a part is shared out."""
SMALL_EVERY = 50
"""Of the collectives, one is followed by a small one whose time is taken."""
NUM_KEYS = 100


@dataclass
class Times:
    """Seconds of changes of the strategy, and of small all_reduces."""

    swap_s: list[float] = field(default_factory=list)
    small_s: list[float] = field(default_factory=list)


class Load:
    """The collectives of one rank, whose results are known beforehand."""

    def __init__(self, comm: kfcomm.Communicator, in_flight: int) -> None:
        self.comm = comm
        self.in_flight = in_flight
        pattern = [np.arange(count, dtype=np.float32) % 61 for count in COUNTS]
        self.inputs = [one + comm.rank for one in pattern]
        self.results = [one * comm.size + sum(range(comm.size)) for one in pattern]

    async def run(self, num_collectives: int, num_swaps: int, times: Times) -> tuple[float, float]:
        """Collectives per second of time and of CPU time, with the changes spread evenly among them."""
        every = num_collectives // num_swaps
        flying: deque[tuple[int, Any]] = deque()
        swaps = []
        begun, used = time.perf_counter(), time.process_time()
        for number in range(num_collectives):
            if number % every == 0:
                swaps.append(self.comm.set_strategy(STRATEGIES[number // every % len(STRATEGIES)]))
                _note(times.swap_s, swaps[-1])
            if number % SMALL_EVERY == SMALL_EVERY // 2:
                key = f"small/{number // SMALL_EVERY % NUM_KEYS}"
                _note(times.small_s, self.comm.all_reduce(self.inputs[0], key))
            kind = number % len(COUNTS)
            flying.append((kind, self.comm.all_reduce(self.inputs[kind], f"key/{number % NUM_KEYS}")))
            if len(flying) >= self.in_flight:
                await self._check(*flying.popleft())
        while flying:
            await self._check(*flying.popleft())
        await asyncio.gather(*swaps)
        took, used = time.perf_counter() - begun, time.process_time() - used
        return num_collectives / took, num_collectives / used

    async def _check(self, kind: int, handle: Any) -> None:
        if not np.array_equal(await handle, self.results[kind]):
            raise SystemExit(f"rank {self.comm.rank}: a wrong result of {COUNTS[kind]} elements")

    async def idle(self, num_rounds: int, times: Times) -> None:
        """Changes and small all_reduces, in turns, with nothing else in flight."""
        small = self.inputs[0]
        for number in range(num_rounds):
            await self.comm.barrier("idle")
            await _note(times.swap_s, self.comm.set_strategy(STRATEGIES[number % len(STRATEGIES)]))
            await self.comm.all_reduce(small, "small")  # makes the plan, so that the next one finds it
            await self.comm.barrier("idle")
            await _note(times.small_s, self.comm.all_reduce(small, "small"))


def _note(times: list[float], future: asyncio.Future[Any]) -> asyncio.Future[Any]:
    """Add the seconds from now until the future is done."""
    begun = time.perf_counter()
    future.add_done_callback(lambda _: times.append(time.perf_counter() - begun))
    return future


async def measure(comm: kfcomm.Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of this rank."""
    load, loaded, idle = Load(comm, options.in_flight), Times(), Times()
    quiet, busy = len(STRATEGIES), options.swaps
    pairs: list[dict[int, tuple[float, float]]] = []
    for number in range(options.rounds + 1):  # the first is warm-up
        rates = {}
        for swaps in (quiet, busy) if number % 2 else (busy, quiet):
            await comm.barrier("round")
            rates[swaps] = await load.run(options.collectives, swaps, loaded if swaps == busy and number else Times())
        pairs.append(rates)
    del pairs[0]
    await load.idle(options.swaps, idle)
    medians = {
        "idle_swap_s": idle.swap_s, "idle_small_s": idle.small_s,
        "loaded_swap_s": loaded.swap_s, "loaded_small_s": loaded.small_s,
        "quiet_per_s": [pair[quiet][0] for pair in pairs],
        "throughput": [pair[busy][0] / pair[quiet][0] for pair in pairs],
        "throughput_of_cpu": [pair[busy][1] / pair[quiet][1] for pair in pairs],
    }  # fmt: skip
    return {name: statistics.median(values) for name, values in medians.items()}


def report(figures: dict[str, Any]) -> bool:
    """Print the figures of the world; whether the bounds hold."""
    idle = figures["idle_swap_s"] / figures["idle_small_s"]
    loaded = figures["loaded_swap_s"] / figures["loaded_small_s"]
    for state, ratio in (("idle", idle), ("loaded", loaded)):
        swap_us, small_us = (figures[f"{state}_{what}_s"] * 1e6 for what in ("swap", "small"))
        print(f"{state:<11}change {swap_us:8.0f} us, small all_reduce {small_us:8.0f} us: {ratio:.2f} (at most 2)")
    kept = float(figures["throughput"])
    print(f"throughput {kept:.3f} of {figures['quiet_per_s']:.0f} collectives a second (at least 0.95)")
    print(f"           {figures['throughput_of_cpu']:.3f} for each second of CPU time")
    holds = max(idle, loaded) <= 2 and kept >= 0.95
    print("the bounds hold" if holds else "the bounds do NOT hold")
    return holds


async def main() -> None:
    """Measure on every rank; rank 0 prints the medians over the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", type=int, default=10_000)
    parser.add_argument("--swaps", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=32, help="collectives of a rank under way at once")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    async with kfcomm.init() as comm:
        every = await comm.all_gather_object(await measure(comm, options))
        figures = {name: statistics.median(one[name] for one in every) for name in every[0]}
        if comm.rank == 0:
            holds = report(figures)
            if options.output:
                options.output.write_text(json.dumps({"ranks": comm.size, **vars(options), **figures}, default=str))
            if not holds:
                sys.exit(1)


if __name__ == "__main__":
    run_on_loop(main())
