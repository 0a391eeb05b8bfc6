"""Training that adapts to what it measures: the noise scale raises the batch, a worker joins, a slow link is avoided.

::

    kfcomm run -n 3 --elastic 2:4 --transport tcp --strategy star python examples/adaptive_training.py
    make demo-adaptive ARGS="--html adaptive.html"

First three workers train with three policies: the batch, and with it the learning rate, follows the gradient noise
scale, a fourth worker is asked for when each has much to do, and when a link becomes slow the graphs avoid it. Then the
same training runs with nothing but what it began with, and with a large batch, and the learning rate for it, from the
beginning; the link becomes slow in the same second.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

try:
    import threadpoolctl
except ModuleNotFoundError as error:
    raise SystemExit(f'this example needs {error.name}: pip install "kfcomm[demo]"') from None
from adaptive_page import Decided, Row, Run, draw, tell
from digits import Model, load_data
from elastic import gradients_of
from slow_link import PacedLinks

import kfcomm
from kfcomm.adapt import AvoidSlowLinks, Context, Hyperparameters, Policy
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.sampler import share
from kfcomm.train import GradientStatistics, NoiseScale, efficiency
from kfcomm.train.policies import NoiseScaleBatch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

LAYER_SIZES = (64, 512, 256, 10)
NOISE = 0.5  # of the images: digits alone are learned by heart
LEARNING_RATE, MOMENTUM = 0.02, 0.9
SMALL_BATCH, LARGE_BATCH = BATCHES = 24, 768  # over all ranks
COMPUTING_S = 0.0002  # of a sample: stands for a model that is worth several processes
WORKERS, MOST_WORKERS, SAMPLES_OF_EACH = 3, 4, 64
BYTES_PER_S = 80_000_000  # of each link: 640 Mbit/s
SLOW_LINK, SLOW_BYTES_PER_S = (0, 1), 8_000_000
STEPS_BEFORE_SLOW, STEPS_AFTER_SLOW, MOST_STEPS = 40, 120, 3000
REPEATS = 200
USUAL, SLOW, OVER = range(3)  # what the first rank tells all with each step


class AskForWorkers(Policy):
    """Asks for one more worker when each has many samples of a batch."""

    def on_start(self, ctx: Context) -> None:
        """Ask once for each number of ranks."""
        self.has_asked = False

    def after_step(self, ctx: Context) -> None:
        """Look at the batch that holds."""
        each = (ctx.hyperparameters.batch_size or 0) // ctx.size
        if each >= SAMPLES_OF_EACH and ctx.size < MOST_WORKERS and not self.has_asked:
            self.has_asked = True
            ctx.resize(ctx.size + 1, samples_of_each=each)


class Found(NamedTuple):
    """Result of a step: the mean loss, the norms of this rank's and of the mean gradient, samples, the times told."""

    loss: float
    local_norm: float
    gradient_norm: float
    small_batch: float
    big_batch: float
    told: int


class Learner:
    """A model, what it learns from, and the noise scale of its gradients."""

    def __init__(self) -> None:
        (self.images, self.labels), _ = load_data(seed=0)
        self.model = Model(seed=0, sizes=LAYER_SIZES)
        self.values = {one.name: one.value for one in self.model.parameters()}
        self.velocity = {name: np.zeros_like(value) for name, value in self.values.items()}
        self.noise_scale = NoiseScale()
        self.random = np.random.default_rng()

    def sampler(self, batch: int) -> ElasticSampler:
        """Of so many images that hardly a batch is smaller: each is another with each noise."""
        return ElasticSampler(REPEATS * len(self.labels), batch)

    def rate_of(self, batch: int) -> float:
        """Learning rate of a batch that stays: by AdaScale's gain, as the policy makes that of a batch that changes."""
        signal, noise = self.noise_scale.signal, self.noise_scale.noise
        if signal is None or noise is None or signal <= 0:
            return LEARNING_RATE
        gradients = GradientStatistics(signal, max(noise, 0.0) / SMALL_BATCH)
        return LEARNING_RATE * efficiency(gradients, SMALL_BATCH, batch) * batch / SMALL_BATCH

    def step(self, comm: Any, indices: Array, rate: float, told: int) -> Found:
        """One step of SGD over all ranks; ``told`` is the first rank's."""
        noise = NOISE * self.random.standard_normal((len(indices), 64))
        indices = indices % len(self.labels)
        images = (self.images[indices] + noise).astype(np.float32)
        loss, gradients = gradients_of(self.model, images, self.labels[indices])
        time.sleep(COMPUTING_S * len(indices))
        local_norm = norm(gradients) / max(1, len(indices))
        sums = np.array([len(indices), loss, local_norm**2, told if comm.rank == 0 else 0])
        total = comm.all_reduce_many({"sums": sums, **gradients}, name="step")
        count, loss, local_sq_norms, told = total.pop("sums").tolist()
        gradient_norm = norm(total) / count
        self.noise_scale.update(local_sq_norms / comm.size, gradient_norm**2, count / comm.size, count)
        for name, value in self.values.items():
            self.velocity[name] *= MOMENTUM
            self.velocity[name] -= np.float32(rate / count) * total[name]
            value += self.velocity[name]
        return Found(loss / count, local_norm, gradient_norm, count / comm.size, count, round(told))


def norm(gradients: dict[str, Array]) -> float:
    """Of all of them together."""
    return math.sqrt(sum(float(np.vdot(one, one)) for one in gradients.values()))


@dataclass
class Plot:
    """Times at which the link becomes slow and the run ends; the first rank tells the others."""

    run: Run
    slow_step: float = MOST_STEPS
    slow_s: float = math.inf
    over_s: float = math.inf

    def now(self) -> int:
        """At the beginning of a step."""
        rows = self.run.rows
        at_s = rows[-1].at_s if rows else 0.0
        if rows and rows[-1].workers == MOST_WORKERS:
            self.slow_step = min(self.slow_step, len(rows) + STEPS_BEFORE_SLOW)
        if len(rows) >= self.slow_step + STEPS_AFTER_SLOW or at_s >= self.over_s:
            return OVER
        if len(rows) >= self.slow_step or at_s >= self.slow_s:
            self.run.slow_s = min(self.run.slow_s, at_s)
            return SLOW
        return USUAL


class Trainer:
    """The steps of one run on one rank; those of the first are noted."""

    def __init__(self, comm: Any, plot: Plot) -> None:
        self.comm, self.plot, self.learner = comm, plot, Learner()
        self.links = PacedLinks(BYTES_PER_S)
        self.told = USUAL
        self.began_s = self.before_s = time.monotonic()

    def step(self, indices: Array, batch: int, rate: float) -> Found:
        """One step; the link becomes slow after the step that announces it."""
        self.links.hold()
        found = self.learner.step(self.comm, indices, rate, self.plot.now())
        now_s = time.monotonic()
        row = Row(now_s - self.began_s, found.loss, self.learner.noise_scale.value or math.nan, batch,
                  batch / (now_s - self.before_s), self.comm.size)  # fmt: skip
        self.plot.run.rows.append(row)
        self.before_s = now_s
        if found.told == SLOW != self.told:
            self.links.slow_down(self.comm, SLOW_LINK, SLOW_BYTES_PER_S)
        self.told = found.told
        return found


def adapt(comm: Any, run: Run) -> bool:
    """The training that adapts, wherever this rank comes in; whether it is still there at the end."""
    trainer = Trainer(comm, Plot(run))
    learner = trainer.learner
    policies = [NoiseScaleBatch(most=LARGE_BATCH), AskForWorkers(), AvoidSlowLinks(rest=75)]
    given = Hyperparameters(batch_size=SMALL_BATCH, learning_rate=LEARNING_RATE)
    sampler = learner.sampler(SMALL_BATCH)
    with (
        Elastic(comm, State(values=learner.values, velocity=learner.velocity, noise=learner.noise_scale)) as elastic,
        kfcomm.sync.Adaptation(comm, policies, hyperparameters=given) as adaptation,
    ):
        trainer.before_s, told = time.monotonic(), USUAL
        for step in elastic.steps(sampler, passes=1 << 30):
            with adaptation.step():
                found = trainer.step(step.indices, len(step.batch), adaptation.learning_rate or 0.0)
                adaptation.observe(
                    local_norm=found.local_norm, gradient_norm=found.gradient_norm, small_batch=found.small_batch,
                    big_batch=found.big_batch,
                )  # fmt: skip
                told = found.told
            sampler.batch = adaptation.batch_size or SMALL_BATCH
            for one in adaptation.decisions[len(run.decisions) :]:
                run.decisions.append(Decided(run.rows[-1].at_s, one.policy, one.what, one.why))
            if told == OVER:
                break
        trainer.links.recover()
        return not elastic.is_released


def stay(comm: Any, run: Run, batch: int, like: Run) -> None:
    """The same training with one batch, as many workers as at first, and one strategy."""
    trainer = Trainer(comm, Plot(run, math.inf, like.slow_s, like.rows[-1].at_s))
    sampler = trainer.learner.sampler(batch)
    while trainer.told != OVER:
        indices = sampler.take_until(1 << 30)
        trainer.step(share(indices, comm.rank, comm.size), len(indices), trainer.learner.rate_of(batch))
    trainer.links.recover()


def main(options: argparse.Namespace) -> bool:
    """Join the world of this process, or a running one; whether the training has adapted."""
    runs = [Run("adaptive"), *([] if options.alone else [Run(f"batch of {batch}") for batch in BATCHES])]
    with kfcomm.sync.init(elastic=True) as comm:
        if not adapt(comm, runs[0]) or comm.rank >= WORKERS:
            return True
        few = comm.group(range(WORKERS), "few")
        for run, batch in zip(runs[1:], BATCHES, strict=False):
            stay(few, run, batch, runs[0])
        is_first = comm.rank == 0
    if not is_first:
        return True
    if options.html is not None:
        draw(runs, options.html)
    return tell(runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--alone", action="store_true", help="without the trainings that do not adapt")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw what happened")
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("kfcomm.adapt").setLevel(logging.INFO)
    with threadpoolctl.threadpool_limits(1):
        sys.exit(0 if main(parser.parse_args()) else 1)
