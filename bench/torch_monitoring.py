"""Cost of the monitor and of guarded steps in ``kfcomm.torch.attach``, beside an attachment without them.

    kfcomm run -n 2 python bench/torch_monitoring.py
    kfcomm run -n 2 python bench/torch_monitoring.py --of guard --blocks 10

The perceptron of `torch_step`, 12.6 million parameters in float32, one thread a rank. Two copies of it train in turns
in the same processes, in blocks of steps that hold several measured ones. The figure of a block is the sum of the CPU
times of all ranks, and its time on the slowest rank. Reported are the quotients of the sums over all blocks, and the
median over pairs of blocks. ``--of off`` compares two copies without anything: the noise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

import kfcomm.sync
import kfcomm.torch
from bench.torch_step import WIDTHS, perceptron
from kfcomm.adapt import GuardSteps

BATCH = 32
"""Samples of a rank."""


class Training:
    """One attached copy of the model."""

    def __init__(self, comm: kfcomm.sync.Communicator, name: str, **options: Any) -> None:
        self._model = perceptron()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self.attached = kfcomm.torch.attach(self._model, self._optimizer, comm, name=name, **options)
        self._x = torch.randn(BATCH, WIDTHS[0], generator=torch.Generator().manual_seed(comm.rank))
        self._comm = comm

    def steps(self, count: int) -> tuple[float, float]:
        """CPU seconds and seconds of so many steps on this rank."""
        self._comm.barrier()
        begun, begun_s = time.process_time(), time.perf_counter()
        for _ in range(count):
            self._optimizer.zero_grad()
            (self._model(self._x) - self._x).square().mean().backward()
            self._optimizer.step()
        self._comm.barrier()
        return time.process_time() - begun, time.perf_counter() - begun_s


OPTIONS: dict[str, dict[str, Any]] = {
    "monitor": {"monitor": True, "batch_size": 2 * BATCH},
    "every": {"monitor": {"every": 1}, "batch_size": 2 * BATCH},
    "guard": {"policies": [GuardSteps()]},
    "off": {},
}


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--of", choices=OPTIONS, default="monitor")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=24, help="of a block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with kfcomm.sync.init() as comm:
        off, on = Training(comm, "off"), Training(comm, "on", **OPTIONS[options.of])
        for one in (off, on):
            one.steps(12)
        taken = []
        for number in range(options.blocks):
            order = (off, on) if number % 2 else (on, off)
            found = {one: one.steps(options.steps) for one in order}
            cpu = comm.all_reduce(np.array([found[off][0], found[on][0]]))
            wall = comm.all_reduce(np.array([found[off][1], found[on][1]]), op="max")
            taken.append([*cpu, *wall])
        if comm.rank:
            return
        sums = np.sum(taken, axis=0)
        median = statistics.median(one[1] / one[0] for one in taken)
        print(f"{options.of}: CPU {sums[1] / sums[0] - 1:+.2%}, median of {options.blocks} pairs {median - 1:+.2%}")
        step_s = sums[2] / options.blocks / options.steps
        print(f"time {sums[3] / sums[2] - 1:+.2%} of a step of {step_s * 1e3:.1f} ms")
        if on.attached.monitor is not None:
            print(f"every {on.attached.monitor.period}th step is measured")


if __name__ == "__main__":
    main()
