"""Agreement algorithms with a too large batch: 16 ranks in one process, printed, recorded and drawn.

::

    python -m bench.agreement --seeds 3 --record agreement.json --plot agreement.svg

One process learns with a small batch. Sixteen ranks learn from as many images, each with that batch: by S-SGD with the
learning rate scaled linearly, without and with a warm-up; by SMA and PairAveraging with the unscaled rate. Where
the models of the ranks differ, their mean is tested. KungFu's paper has 59 % for S-SGD against 75 % at 16 workers.

To reach: SMA and PairAveraging within 1 % of the small batch, where S-SGD loses 5 % or more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.agreement.learning import Data, Model, accuracy, beginning, digits, gradient
from kfcomm.testing import run_ranks, world
from kfcomm.train import SMA, Agreement, LinearScaling, PairAveraging, SynchronousSGD
from kfcomm.world.communicator import Communicator

RANKS, BATCH = 16, 4
WARM_UP_EPOCHS = 5
MAY_LOSE, MUST_LOSE = 0.01, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A set to learn.

    Attributes:
        name: of it.
        is_hard: see ``learning``.
        rate: the learning rate of the small batch.
        epochs: passes over the set.
    """

    name: str
    is_hard: bool
    rate: float
    epochs: int


CASES = (Case("digits", False, 0.4, 40), Case("harder digits", True, 0.2, 10))


@dataclass(frozen=True, slots=True)
class Way:
    """A way to learn.

    Attributes:
        ranks: how many.
        make: the way they agree.
        is_scaled: whether the learning rate is that of all ranks' batch.
        warm_up: epochs until it is.
    """

    ranks: int
    make: Callable[[Communicator, Model, int], Agreement]
    is_scaled: bool = False
    warm_up: int = 0


def synchronous(comm: Communicator, model: Model, seed: int) -> Agreement:
    """S-SGD."""
    return SynchronousSGD(comm)


def averaging(comm: Communicator, model: Model, seed: int) -> Agreement:
    """SMA with KungFu's α."""
    return SMA(comm, alpha=0.1)


def pairs(comm: Communicator, model: Model, seed: int) -> Agreement:
    """PairAveraging."""
    return PairAveraging(comm, model, seed=seed)


SMALL, SCALED = "small batch", "S-SGD, scaled"
WAYS = {
    SMALL: Way(1, synchronous),
    SCALED: Way(RANKS, synchronous, is_scaled=True),
    "S-SGD, scaled, warm-up": Way(RANKS, synchronous, is_scaled=True, warm_up=WARM_UP_EPOCHS),
    "SMA": Way(RANKS, averaging),
    "PairAveraging": Way(RANKS, pairs),
}


async def learn(case: Case, way: Way, seed: int) -> list[float]:
    """The accuracy after each tenth of the epochs."""
    data = digits(seed, is_hard=case.is_hard)
    async with world(way.ranks) as comms:
        found = await run_ranks(comms, lambda comm: train(comm, case, way, data, seed))
    return found[0]


async def train(comm: Communicator, case: Case, way: Way, data: Data, seed: int) -> list[float]:
    """One rank."""
    model, tried = beginning(seed), []
    agreement = way.make(comm, model, seed)
    steps = len(data.y) // (comm.size * BATCH)
    scaling = LinearScaling(case.rate, BATCH, warm_up=way.warm_up * steps)
    for epoch in range(case.epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(data.y))
        for step in range(steps):
            begin = (step * comm.size + comm.rank) * BATCH
            chosen = order[begin : begin + BATCH]
            batch = BATCH * comm.size if way.is_scaled else BATCH
            rate = scaling.rate(epoch * steps + step, batch)
            model = await one_step(agreement, model, rate, data.x[chosen], data.y[chosen])
        if (epoch + 1) % max(1, case.epochs // 10) == 0:
            mean = await comm.all_reduce_many(model, "mean", op="avg")
            tried.append(accuracy(mean, data))
    return tried


async def one_step(agreement: Agreement, model: Model, rate: float, x: Any, y: Any) -> Model:
    """The model after a step."""
    pending = agreement.parameters(model)
    found = await agreement.gradients(gradient(model, x, y))
    model = await pending
    return {name: value - np.float32(rate) * found[name] for name, value in model.items()}


def draw(record: list[dict[str, Any]], path: Path) -> None:
    """The accuracy of each way along training, of all seeds."""
    from matplotlib.figure import Figure

    names = [case.name for case in CASES]
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for number, way in enumerate(WAYS):
            curves = [one["accuracy"] for one in record if one["set"] == name and one["way"] == way]
            parts = [100 * (at + 1) / len(curves[0]) for at in range(len(curves[0]))]
            for curve in curves:
                axes.plot(parts, [100 * value for value in curve], color=f"C{number}", alpha=0.3)
            means = [100 * statistics.mean(each) for each in zip(*curves, strict=True)]
            axes.plot(parts, means, color=f"C{number}", label=way)
        axes.set(title=f"{name}, {RANKS} ranks", xlabel="% of the epochs", ylabel="accuracy, %", ylim=(0, 100))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS))
    figure.savefig(path)


def show(case: Case, finals: dict[str, list[float]]) -> bool:
    """Print the line of a set; whether what is to be reached is reached."""
    means = {way: statistics.mean(each) for way, each in finals.items()}
    click.echo(f"{case.name}:")
    for way, each in finals.items():
        lost = means[SMALL] - means[way]
        shown = ", ".join(f"{100 * one:.1f}" for one in each)
        click.echo(f"  {way:24} {100 * means[way]:5.1f} %  loses {100 * lost:5.1f}  ({shown})")
    kept = all(means[SMALL] - means[way] <= MAY_LOSE for way in ("SMA", "PairAveraging"))
    return kept and means[SMALL] - means[SCALED] >= MUST_LOSE


def main() -> int:
    """Learn as the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.agreement")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of each set, in place of its own number")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    record: list[dict[str, Any]] = []
    is_reached = True
    for case in CASES:
        ran = case if given.epochs is None else Case(case.name, case.is_hard, case.rate, given.epochs)
        finals: dict[str, list[float]] = {}
        for name, way in WAYS.items():
            for seed in range(given.seeds):
                with np.errstate(all="ignore"):  # what diverges overflows
                    found = asyncio.run(learn(ran, way, seed))
                record.append({"set": case.name, "way": name, "seed": seed, "accuracy": found})
                finals.setdefault(name, []).append(found[-1])
        is_reached = show(ran, finals) and is_reached
    click.echo("reached" if is_reached else "not reached")
    if given.record is not None:
        about = {"python": platform.python_version(), "ranks": RANKS, "batch": BATCH, "runs": record}
        given.record.write_text(json.dumps(about, indent=1) + "\n")
    if given.plot is not None:
        draw(record, given.plot)
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
