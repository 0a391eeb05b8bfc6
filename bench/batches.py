"""A batch that follows the noise scale beside fixed ones: samples, steps, and seconds of a modelled machine.

::

    python -m bench.batches --seeds 3

Four ranks in this process learn handwritten digits with noise, by SGD with momentum: with ``NoiseScaleBatch`` as it is,
with the first batch, and with five fixed ones. `FIRST_BATCH` has the learning rate that is best for it of 0.02, 0.05,
0.1 and 0.2; in all runs AdaScale's gain makes the rates of other batches from it. A run ends when 97 % of the images
that were not learned from are recognized, with as much noise (the mean of five trials, one every ten steps).

Time is that of a model, so that other programs on this machine do not decide: a step takes 6 ms, and 0.2 ms for each
sample of a rank. The seconds that the runs took here are printed beside it.

To reach: as quick as the best of the five fixed batches, and 2.5 times as quick as the first batch.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.agreement.learning import Data, Model, accuracy, beginning, digits, gradient
from bench.netlab.batching import FixedBatch
from bench.records import Record
from kfcomm.adapt import Adaptation, Hyperparameters, Policy
from kfcomm.testing import run_ranks, world
from kfcomm.train import GradientMonitor, SynchronousSGD
from kfcomm.train.policies import AdaScaleRate, NoiseScaleBatch
from kfcomm.world.communicator import Communicator

RANKS, HIDDEN, NOISE, COPIES = 4, 256, 0.2, 6
FIRST_BATCH, RATE, MOMENTUM = 16, 0.05, 0.9
FIXED = (32, 64, 128, 256, 512)
MOST_BATCH, MOST_S = 2048, 30.0
STEP_S, SAMPLE_S = 0.006, 0.0002
WANTED, TRIED_EVERY, TRIALS = 0.97, 10, 5
ADAPTIVE = 0
"""In place of a batch."""
BATCHES = (ADAPTIVE, FIRST_BATCH, *FIXED)
AS_BEST, BESIDE_FIRST = 1.0, 2.5


@dataclass
class Run:
    """One training.

    Attributes:
        batch: fixed; `ADAPTIVE` where it followed the noise scale.
        seed: of the model and the noise.
        model_s: seconds by the model of the machine.
        here_s: seconds that it took here.
        num_steps: how many.
        num_samples: of all ranks.
        changes: step and batch, whenever that was another than before.
        accuracy: the mean of the last five trials.
    """

    batch: int
    seed: int
    model_s: float = 0.0
    here_s: float = 0.0
    num_steps: int = 0
    num_samples: int = 0
    changes: tuple[tuple[int, int], ...] = ()
    accuracy: float = 0.0

    def count(self, batch: int) -> None:
        """Add a step."""
        if not self.changes or self.changes[-1][1] != batch:
            self.changes = (*self.changes, (self.num_steps, batch))
        self.num_steps += 1
        self.num_samples += batch
        self.model_s += STEP_S + SAMPLE_S * batch / RANKS

    @property
    def is_over(self) -> bool:
        """Whether the accuracy is there, or the time is over."""
        return self.accuracy >= WANTED or self.model_s >= MOST_S


def policies_of(batch: int) -> list[Policy]:
    """Policies of a run: the rate of a fixed batch is made from the first batch's, too."""
    return [NoiseScaleBatch(MOST_BATCH)] if batch == ADAPTIVE else [FixedBatch(batch), AdaScaleRate()]


async def learn(comm: Communicator, data: Data, run: Run) -> Run:
    """One training on one rank."""
    model, random = beginning(run.seed, HIDDEN), np.random.default_rng(1000 * run.seed + comm.rank)
    velocity = {name: np.zeros_like(value) for name, value in model.items()}
    monitor = GradientMonitor(comm, 1)
    way = SynchronousSGD(comm, monitor=monitor)
    given = Hyperparameters(batch_size=FIRST_BATCH, learning_rate=RATE)
    trials: list[float] = []
    async with Adaptation(comm, policies_of(run.batch), hyperparameters=given) as adaptation:
        while not run.is_over:
            rate, monitor.batch = np.float32(adaptation.learning_rate or 0.0), adaptation.local_batch_size or 1
            run.count(adaptation.batch_size or 0)
            async with adaptation.step():
                means = await way.gradients(drawn(model, data, monitor.batch, random))
                adaptation.observe(**monitor.observed())
            velocity = {name: np.float32(MOMENTUM) * x - rate * means[name] for name, x in velocity.items()}
            model = {name: value + velocity[name] for name, value in model.items()}
            if run.num_steps % TRIED_EVERY == 0:
                trials.append(accuracy(model, data))
                run.accuracy = statistics.mean(trials[-TRIALS:])
    return run


def noisy(data: Data) -> Data:
    """The images to be tried, each several times with another noise."""
    noise = NOISE * np.random.default_rng(0).standard_normal((COPIES * len(data.test_y), 64), np.float32)
    return replace(data, test_x=np.tile(data.test_x, (COPIES, 1)) + noise, test_y=np.tile(data.test_y, COPIES))


def drawn(model: Model, data: Data, batch: int, random: np.random.Generator) -> Model:
    """The gradient of some images, with another noise each time."""
    mine = random.integers(0, len(data.y), batch)
    return gradient(model, data.x[mine] + NOISE * random.standard_normal((batch, 64), np.float32), data.y[mine])


async def ran(batch: int, seed: int) -> Run:
    """One training over all ranks."""
    data, began_s = noisy(digits(0, is_hard=False)), time.monotonic()
    async with world(RANKS) as comms:
        runs = await run_ranks(comms, lambda comm: learn(comm, data, Run(batch, seed)))
    run: Run = runs[0]
    run.here_s = time.monotonic() - began_s
    return run


@dataclass(frozen=True, slots=True)
class Verdict:
    """The batch that follows, beside others: how many times as quick it is, by the mean over the seeds.

    Attributes:
        best: the best fixed batch.
        beside_best: its time by that of the batch that follows.
        beside_first: the time of the first batch, likewise.
    """

    best: int
    beside_best: float
    beside_first: float

    @property
    def is_reached(self) -> bool:
        """Whether that is as wanted."""
        return self.beside_best >= AS_BEST and self.beside_first >= BESIDE_FIRST


def verdict(runs: Sequence[Run]) -> Verdict:
    """Compare the runs; one that did not come to the end counts as what it took."""
    means = {batch: statistics.mean(run.model_s for run in runs if run.batch == batch) for batch in BATCHES}
    best = min(FIXED, key=means.__getitem__)
    return Verdict(best, means[best] / means[ADAPTIVE], means[FIRST_BATCH] / means[ADAPTIVE])


def table(runs: Sequence[Run]) -> str:
    """The means over the seeds as text."""
    lines = [f"{'':16}{'s, modelled':>13}{'of each seed':>24}{'steps':>8}{'samples':>10}{'s, here':>9}"]
    for batch in BATCHES:
        mine = [run for run in runs if run.batch == batch]
        name = "by noise scale" if batch == ADAPTIVE else f"batch of {batch}"
        mean_s, steps, samples, here_s = (
            statistics.mean(getattr(run, one) for run in mine)
            for one in ("model_s", "num_steps", "num_samples", "here_s")
        )
        each = " ".join(f"{run.model_s:.1f}{'' if run.accuracy >= WANTED else '!'}" for run in mine)
        lines.append(f"{name:16}{mean_s:13.1f}{each:>24}{steps:8.0f}{samples:10.0f}{here_s:9.1f}")
    return "\n".join(lines)


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Number of them.")
@click.option("--first-seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="By default bench/results/noise-batches-DATE.json.")
def main(seeds: int, first_seed: int, output: Path | None) -> None:
    """Measure, print, record."""
    record = Record("noise-batches", output)
    each = [(batch, seed) for seed in range(first_seed, first_seed + seeds) for batch in BATCHES]
    runs = [asyncio.run(ran(batch, seed)) for batch, seed in each]
    found = verdict(runs)
    print(table(runs))
    print(
        f"by noise scale {found.beside_best:.2f} times as quick as a batch of {found.best}, the best of {len(FIXED)}, "
        f"and {found.beside_first:.2f} times as quick as the first batch of {FIRST_BATCH}"
    )
    figures: dict[str, Any] = {"verdict": asdict(found), "runs": [asdict(run) for run in runs]}
    record.write(figures)
    sys.exit(0 if found.is_reached else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.batches")
