"""A program whose policies watch it: one keeps the fastest strategy, one of our own finds the rank that is slow.

::

    kfcomm run -n 4 python examples/adaptive.py

Each step imitates one of a training: some computing, then an all_reduce of the gradients. What the policies decide is
logged as it happens, with the numbers behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

import numpy as np

import kfcomm
from kfcomm.adapt import Adaptation, AutoStrategy, Context, Policy, Stragglers

COMPUTING_S = 0.004
LAYERS = {"layer0": (64, 512), "layer1": (512, 512), "layer2": (512, 10)}


class ReportStragglers(Policy):
    """Says which ranks are slower than the others, whenever that changes."""

    def on_start(self, ctx: Context) -> None:
        """Make the detector for this number of ranks."""
        self.detector = Stragglers(ctx.size)
        self.known: tuple[int, ...] = ()

    def after_step(self, ctx: Context) -> None:
        """Look at what all ranks know of the step; so all of them come to the same result."""
        if ctx.metrics is None:
            return
        found = self.detector.update(ctx.metrics.speeds)
        if found != self.known:
            self.known = found
            own_ms = [round(1e3 / speed, 1) for speed in self.detector.smoothed]
            ctx.decide(f"slow ranks: {list(found) or 'none'}", own_ms=own_ms)


async def train(comm: kfcomm.Communicator, steps: int) -> None:
    """The whole life of one rank. In the second half of it the last rank has more to compute than the others."""
    gradients = {name: np.full(shape, comm.rank + 1, np.float32) for name, shape in LAYERS.items()}
    policies = [AutoStrategy(("star", "ring", "binary_tree")), ReportStragglers()]
    async with Adaptation(comm, policies) as adaptation:
        for step in range(steps):
            async with adaptation.step():
                is_late = comm.rank == comm.size - 1 and step >= steps // 2
                await asyncio.sleep(COMPUTING_S * (5 if is_late else 1))
                await comm.all_reduce_many(gradients, op="avg")
    if comm.rank == 0:
        changes = [one for one in adaptation.decisions if one.what.startswith("strategy ")]
        print(f"steps: {steps}; changes of the strategy: {len(changes)}; in the end it is {comm.strategy.name}")


async def main(steps: int) -> None:
    """Join the world that this process was started in."""
    async with kfcomm.init() as comm:
        await train(comm, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("kfcomm.adapt").setLevel(logging.INFO)
    asyncio.run(main(parser.parse_args().steps))
