"""A program that learns harder digits several times: with a batch that follows the noise scale, and with fixed ones.

It is started by ``bench.netlab.batches`` with a folder, where each rank writes ``rank-R.json``: of each run the batch
and the seconds of each step, and the accuracy on images that were not learned from. Trying it is outside of the
seconds.

In all runs ``AdaScaleRate`` makes the learning rate from that of the smallest batch; nothing else follows the batch.
Computing a sample is a sleep, in place of a larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kfcomm
from bench.agreement.learning import Data, Model, accuracy, beginning, digits, gradient
from kfcomm.adapt import Adaptation, Context, Hyperparameters, Policy
from kfcomm.elastic.sampler import share
from kfcomm.train.policies import AdaScaleRate, NoiseScaleBatch

HIDDEN = 1024
"""Of the perceptron: its gradients are 303 KB."""
FIRST_BATCH, MOST_BATCH, RATE = 16, 2048, 0.2
COMPUTING_S = 0.0004
"""Of a sample: about what a small convolutional network takes on a small accelerator."""
TRIED_EVERY = 10
ADAPTIVE = 0
"""In place of a batch."""


class FixedBatch(Policy):
    """Sets one batch after the first step, so that the learning rate is made from the first batch's in all runs."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def after_step(self, ctx: Context) -> None:
        """Ask once."""
        if ctx.hyperparameters.batch_size != self._batch:
            ctx.set_batch_size(self._batch)


@dataclass
class Learned:
    """One run.

    Attributes:
        batch: of all steps; `ADAPTIVE` where it follows the noise scale.
        batches: of each step.
        steps_s: from the beginning to the end of each.
        tried: number of steps, accuracy.
    """

    batch: int
    batches: list[int] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    tried: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a run.

    Attributes:
        wanted: the accuracy at which a run ends: the mean of the last two trials.
        most_s: seconds after which it ends without it.
        computing_s: of a sample.
        hidden: see `HIDDEN`.
    """

    wanted: float
    most_s: float
    computing_s: float = COMPUTING_S
    hidden: int = HIDDEN


async def learn(comm: kfcomm.Communicator, data: Data, task: Task, batch: int) -> Learned:
    """One run on one rank."""
    run, model = Learned(batch), beginning(0, task.hidden)
    chooses = NoiseScaleBatch(MOST_BATCH) if batch == ADAPTIVE else FixedBatch(batch)
    given = Hyperparameters(batch_size=FIRST_BATCH, learning_rate=RATE)
    random = np.random.default_rng(1)
    async with Adaptation(comm, [chooses, AdaScaleRate()], hyperparameters=given) as adaptation:
        while True:
            whole, rate = adaptation.batch_size or 0, adaptation.learning_rate or 0.0
            mine = share(random.integers(0, len(data.y), whole), comm.rank, comm.size)
            began_s = time.monotonic()
            async with adaptation.step():
                found = gradient(model, data.x[mine], data.y[mine])
                await asyncio.sleep(task.computing_s * len(mine))
                means = await comm.all_reduce_many(found, "gradients", op="avg")
                adaptation.observe(local_norm=_norm(found), gradient_norm=_norm(means))
            model = {name: value - np.float32(rate) * means[name] for name, value in model.items()}
            run.batches.append(whole)
            run.steps_s.append(time.monotonic() - began_s)
            if len(run.steps_s) % TRIED_EVERY == 0 and await _is_over(comm, run, model, data, task):
                return run


async def _is_over(comm: kfcomm.Communicator, run: Learned, model: Model, data: Data, task: Task) -> bool:
    """Try the model; the first rank says whether that was the last step."""
    run.tried.append((len(run.steps_s), accuracy(model, data)))
    last = [one for _, one in run.tried[-2:]]
    is_over = sum(last) / 2 >= task.wanted or sum(run.steps_s) >= task.most_s
    return bool(await comm.broadcast_object(is_over, 0, "over"))


def _norm(gradients: Model) -> float:
    return math.sqrt(sum(float(np.vdot(one, one)) for one in gradients.values()))


async def learn_all(comm: kfcomm.Communicator, task: Task, batches: list[int]) -> list[dict[str, Any]]:
    """All runs of one rank, one after the other."""
    data = digits(0, is_hard=True)
    return [asdict(await learn(comm, data, task, batch)) for batch in batches]


async def main() -> None:
    """All runs of this rank, written where they are wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--wanted", type=float, required=True)
    parser.add_argument("--most-s", type=float, required=True)
    options = parser.parse_args()
    async with kfcomm.init() as comm:
        runs = await learn_all(comm, Task(options.wanted, options.most_s), options.batches)
        (options.output / f"rank-{comm.rank}.json").write_text(json.dumps({"rank": comm.rank, "runs": runs}))


if __name__ == "__main__":
    asyncio.run(main())
