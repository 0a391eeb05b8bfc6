"""Cost of one small collective: CPU time of each rank, from call to result.

    python bench/overhead.py                    # a world of one, worlds in memory, and processes over Unix sockets
    python bench/overhead.py alone memory       # only those
    python bench/overhead.py --count 2000 --json

The work is an all_reduce of 8 float32 under a name of its own: 10,000 of them all at once, then a fifth as many one at
a time. Every round uses the same names, as in training. The figure is the CPU time of the process, its garbage
collector and threads included, by collective and rank; the median of the rounds. It depends less than the time on the
clock on what else the machine does. A world in memory runs all its ranks in one process, and has no sockets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

import kfcomm
from kfcomm.bench.harness import run_job, run_on_loop, said_json
from kfcomm.testing import world

WHERE = ("alone", "memory", "processes")

Figures = dict[str, float]
Work = Callable[[Sequence[Any], Sequence[Any]], Awaitable[int]]


async def at_once(comms: Sequence[Any], inputs: Sequence[Any]) -> int:
    """All are in flight before the first is waited for."""
    handles = [comm.all_reduce(x, f"gradient/{number}") for comm in comms for number, x in enumerate(inputs)]
    for handle in handles:
        await handle
    return len(inputs)


async def one_by_one(comms: Sequence[Any], inputs: Sequence[Any]) -> int:
    """Each is waited for before the next is called."""
    few = inputs[: len(inputs) // 5]
    for number, x in enumerate(few):
        for handle in [comm.all_reduce(x, f"gradient/{number}") for comm in comms]:
            await handle
    return len(few)


WORKS: dict[str, Work] = {"at once": at_once, "one by one": one_by_one}


async def measure(comms: Sequence[Any], options: argparse.Namespace) -> Figures:
    """Microseconds of CPU time of this process, by rank in it and collective."""
    inputs = [np.ones(8, np.float32) for _ in range(options.count)]
    figures = {}
    for title, work in WORKS.items():
        await work(comms, inputs)  # names are met, links opened and plans made
        taken = []
        for _ in range(options.rounds):
            start_s = time.process_time()
            count = await work(comms, inputs)
            taken.append((time.process_time() - start_s) / count / len(comms) * 1e6)
        figures[title] = statistics.median(taken)
    return figures


async def alone(options: argparse.Namespace) -> Figures:
    """A world of one."""
    async with kfcomm.init() as comm:
        return await measure([comm], options)


async def memory(size: int, options: argparse.Namespace) -> Figures:
    """A world in this process."""
    async with world(size) as comms:
        return await measure(list(comms), options)


async def member(options: argparse.Namespace) -> None:
    """One of several processes; rank 0 prints the mean of all ranks."""
    async with kfcomm.init() as comm:
        mine = await measure([comm], options)
        mean = await comm.all_reduce(np.array(list(mine.values())), op="avg")
        if comm.rank == 0:
            print(json.dumps(dict(zip(mine, mean, strict=True))), flush=True)


def processes(size: int, transport: str, options: argparse.Namespace) -> Figures:
    """As many processes, over one kind of link."""
    program = [__file__, "member", "--rounds", str(options.rounds), "--count", str(options.count)]
    figures: Figures = said_json(run_job(size, program, options=["--transport", transport], timeout_s=None))
    return figures


def main() -> None:
    """Measure where asked to, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", nargs="*", default=list(WHERE), help=f"which worlds: {', '.join(WHERE)}")
    parser.add_argument("--count", type=int, default=10_000, help="collectives in flight at once")
    parser.add_argument("--rounds", type=int, default=5, help="rounds whose median counts")
    parser.add_argument("--transport", default="unix", help="between processes")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    if options.where == ["member"]:
        run_on_loop(member(options))
        return
    report: dict[str, Figures] = {}
    if "alone" in options.where:
        report["alone"] = run_on_loop(alone(options))
    if "memory" in options.where:
        report |= {f"{size} ranks in memory": run_on_loop(memory(size, options)) for size in (2, 4)}
    if "processes" in options.where:
        report |= {f"{size} processes": processes(size, options.transport, options) for size in (2, 4)}
    if options.json:
        print(json.dumps(report))
        return
    print(f"{'µs of CPU time':>20} {'all at once':>12} {'one by one':>12}")
    for where, figures in report.items():
        print(f"{where:>20} {figures['at once']:12.1f} {figures['one by one']:12.1f}")


if __name__ == "__main__":
    main()
