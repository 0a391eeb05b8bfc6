"""Cost of monitoring: a model's gradients with it on and off, and each of its hooks by itself.

    python bench/monitoring.py                  # ResNet-50, 4 ranks; writes bench/results/monitoring-DATE.json
    python bench/monitoring.py --pairs 10 --rounds 1 --no-write

*On against off*: every rank reduces the same gradients all at once; between barriers, all ranks turn their meters on or
off. A pair is one step with and one without, in turn (off, on, on, off, ...), so that what else the machine does falls
on both. Its figure is the ratio of the CPU times of all processes together; reported is the median of the pairs,
and the upper 95 % bound of that median by order statistics (it assumes nothing about how the ratios are distributed).

*Hooks*: how often each hook runs in one round is counted, what it costs once is timed in a loop around it (a meter of
its own, real operations and rings), and the product is set against the CPU time of a round with monitoring off. Links
count whether or not monitoring is on: that counts as a hook here, but not in the pairs.

The monitor of gradients in ``kfcomm.torch.attach`` is measured by `torch_monitoring`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import kfcomm
from kfcomm.bench.harness import run_job, run_on_loop, said_json
from kfcomm.bench.workloads import WORKLOADS
from kfcomm.core.collective import Collective, GroupView, ItemSizes, Key, Series
from kfcomm.core.program import elsewhere
from kfcomm.engine.memory import Work
from kfcomm.engine.meter import Meter
from kfcomm.engine.operation import Operation
from kfcomm.transports.shm.ring import RingReader
from kfcomm.types import override

RESULTS = Path(__file__).parent / "results"
LIMIT_PAIRS, LIMIT_HOOKS = 1.03, 0.01
Figures = dict[str, float]


class CountingMeter(Meter):
    """Counts the calls of its hooks."""

    __slots__ = ("calls",)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.calls = dict.fromkeys(("arrived", "completed", "burst_end"), 0)

    @override
    def arrived(self, peer: int, operation: Any) -> None:
        self.calls["arrived"] += 1
        super().arrived(peer, operation)

    @override
    def completed(self, key: Key, taken_s: float, nbytes: int) -> None:
        self.calls["completed"] += 1
        super().completed(key, taken_s, nbytes)


async def exchange(comm: kfcomm.Communicator, gradients: Sequence[Any], outs: Sequence[Any]) -> None:
    """One step: all gradients are in flight before the first is waited for."""
    handles = [
        comm.all_reduce(x, f"gradient/{number}", out=out)
        for number, (x, out) in enumerate(zip(gradients, outs, strict=True))
    ]
    for handle in handles:
        await handle


async def cpu_s(comm: kfcomm.Communicator, gradients: Sequence[Any], outs: Sequence[Any]) -> float:
    """CPU seconds of this process for a step, begun together."""
    await comm.barrier()
    start_s = time.process_time()
    await exchange(comm, gradients, outs)
    return time.process_time() - start_s


async def member(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints the report."""
    async with kfcomm.init() as comm:
        gradients = [np.ones(shape, np.float32) for shape in WORKLOADS[options.workload]()]
        outs = [np.empty_like(x) for x in gradients]
        engine = comm._session.engine
        meter = engine.meter
        for _ in range(3):
            await cpu_s(comm, gradients, outs)
        gc.collect()
        pairs = []
        for number in range(options.pairs):
            taken = [0.0, 0.0]
            for step in range(2 * options.rounds):
                on = ((step + 1) // 2 + number) % 2
                engine.meter = meter if on else None
                taken[on] += await cpu_s(comm, gradients, outs)
            off_s, on_s = await comm.all_reduce(np.array(taken))
            pairs.append((off_s / options.rounds, on_s / options.rounds))
        counting = engine.meter = CountingMeter(comm.size)
        before = _frames(engine)
        await cpu_s(comm, gradients, outs)
        counts = {**counting.calls, "frames": _frames(engine) - before}
        told = await comm.all_gather_object(counts)
        if comm.rank == 0:
            print(json.dumps({"pairs": pairs, "counts": told}), flush=True)


def _frames(engine: Any) -> int:
    return sum(one.sent_messages + one.received_messages for one in engine.links.traffic.totals().values())


def hook_costs() -> Figures:
    """Seconds of each hook, once: the least of several loops, since the machine only ever adds to it."""
    loop = asyncio.new_event_loop()
    meter = Meter(4)
    group = GroupView(b"world", (0, 1, 2, 3), 0)
    operations = []
    for number in range(214):
        x = np.ones(1 << (number % 16), np.float32)
        operation = Operation(loop.create_future(), x, x, Work(None, x.dtype, 4, in_result=False))
        key = Key(number, group.id, f"gradient/{number}")
        series = Series(group, key, (0, ()), elsewhere(0, 4), ItemSizes(4, 4))
        operation.collective = Collective(series, 0, 0, operation)
        operations.append(operation)

    def arrived() -> None:
        """As when chunks come in bursts of three."""
        for number, operation in enumerate(operations):
            if number % 3 == 0:
                meter.now_s = 0.0
            meter.arrived(1, operation.collective)

    def completed() -> None:
        for operation in operations:
            meter.completed(operation.collective.key, time.monotonic() - operation.posted_s, operation.nbytes)

    ring = RingReader(memoryview(bytearray(1 << 10)), memoryview(bytearray(16)).cast("Q"), tail=0, head=1)

    def counted() -> None:
        for nbytes in range(214):
            ring.num_records += 1
            ring.payload_nbytes += nbytes

    def nothing() -> None:
        for _ in operations:
            pass

    loop.close()
    empty_s = _once(nothing, 214)
    return {
        "arrived": _once(arrived, 214) - empty_s,
        "completed": _once(completed, 214) - empty_s,
        "frames": _once(counted, 214) - empty_s,
    }


def _once(call: Callable[[], None], number: int) -> float:
    return min(timeit.repeat(call, number=200, repeat=7)) / 200 / number


def upper_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """Upper bound of the median by order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    above = 0.0
    for place in range(count, 0, -1):  # P(at least `place` of them are below the median)
        above += math.comb(count, place) / 2**count
        if above > 1 - confidence:
            return ordered[min(place, count - 1)]
    return ordered[0]


def report(said: dict[str, Any], costs: Figures, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, and what follows from it."""
    ratios = [round(on_s / off_s, 4) for off_s, on_s in said["pairs"]]
    off_s = statistics.median(off_s for off_s, _ in said["pairs"])
    num_ranks = len(said["counts"])
    counts = {name: sum(one[name] for one in said["counts"]) / num_ranks for name in costs}
    hooks_s = sum(costs[name] * counts[name] for name in costs)
    return {
        "date": date.today().isoformat(),
        "workload": options.workload,
        "ranks": num_ranks,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()},
        "pairs": {
            "count": len(ratios),
            "rounds": options.rounds,
            "cpu_s_off_all_ranks": off_s,
            "ratio_median": statistics.median(ratios),
            "ratio_median_upper_95": upper_bound(ratios),
            "limit": LIMIT_PAIRS,
            "ratios": ratios,
        },
        "hooks": {
            "cost_s": costs,
            "count_per_round_and_rank": counts,
            "total_s_per_round_and_rank": hooks_s,
            "share": hooks_s * num_ranks / off_s,
            "limit": LIMIT_HOOKS,
        },
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, and time the hooks when they are done."""
    program = [__file__, "member", "--pairs", str(options.pairs), "--rounds", str(options.rounds)]
    output = run_job(options.ranks, [*program, "--workload", options.workload], timeout_s=None)
    return report(said_json(output), hook_costs(), options)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", default="all", choices=("all", "member"), help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=800, help="of steps with and without")
    parser.add_argument("--rounds", type=int, default=1, help="steps with, and as many without, in a pair")
    parser.add_argument("--workload", default="resnet50", choices=sorted(WORKLOADS))
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    if options.role == "member":
        run_on_loop(member(options))
        return
    result = measure(options)
    pairs, hooks = result["pairs"], result["hooks"]
    print(
        f"on / off, CPU time: median {pairs['ratio_median']:.4f}, at most {pairs['ratio_median_upper_95']:.4f} (95 %)"
    )
    print(f"hooks x their count: {hooks['share']:.2%} of {pairs['cpu_s_off_all_ranks'] / result['ranks'] * 1e3:.1f} ms")
    for name, cost_s in hooks["cost_s"].items():
        print(f"  {name:<10} {cost_s * 1e9:6.0f} ns x {hooks['count_per_round_and_rank'][name]:.0f}")
    if not options.no_write:
        path = RESULTS / f"monitoring-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
