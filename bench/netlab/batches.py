"""A batch that follows the noise scale beside fixed ones: seconds to an accuracy, over links of 200 Mbit/s.

    python -m bench.netlab.batches

Four hosts learn harder digits with a perceptron of 76,000 weights, several times in the same processes: with
``NoiseScaleBatch`` as it is, and with batches of 16, 64, 256 and 1,024. In all of them ``AdaScaleRate`` makes the
learning rate from that of a batch of 16. A sample takes 0.4 ms of computing, which is a sleep: what a step takes
follows from its batch and from the links. A run ends with an accuracy of 82 % on images that were not learned from (the
mean of two trials), or without it after 90 s. Every step is counted, also the first ones of the batch that grows.

What must be reached: 1.3 times as quick as the slowest fixed batch, and at most 10 % slower than the quickest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.netlab.__main__ import reported
from bench.netlab.batching import ADAPTIVE, COMPUTING_S, FIRST_BATCH, HIDDEN, RATE
from bench.netlab.hosts import even
from bench.netlab.lab import Netlab
from bench.netlab.measure import records_of
from bench.netlab.rates import parse_rate
from bench.records import Record

FIXED = (16, 64, 256, 1024)
ORDER = (64, 256, ADAPTIVE, 1024, 16)
WANTED, MOST_S = 0.82, 90.0
LEAST_RATIO, MOST_BEYOND = 1.3, 0.1


@dataclass(frozen=True, slots=True)
class Figure:
    """One run.

    Attributes:
        batch: fixed; `ADAPTIVE` where it followed the noise scale.
        time_s: of all steps.
        steady_s: the same, had each step taken the median of those with its batch: without what disturbed some.
        num_steps: how many.
        changes: step and batch, whenever that was another than before.
        accuracy: the mean of the last two trials.
        is_reached: whether that is the one wanted.
    """

    batch: int
    time_s: float
    steady_s: float
    num_steps: int
    changes: tuple[tuple[int, int], ...]
    accuracy: float
    is_reached: bool

    @property
    def name(self) -> str:
        """In words."""
        return "by noise scale" if self.batch == ADAPTIVE else f"batch of {self.batch}"


def figure(run: Mapping[str, Any], wanted: float) -> Figure:
    """Of what a rank has written."""
    batches: list[int] = run["batches"]
    by_batch: dict[int, list[float]] = {}
    for batch, step_s in zip(batches, run["steps_s"], strict=True):
        by_batch.setdefault(batch, []).append(step_s)
    accuracy = statistics.mean(one for _, one in run["tried"][-2:])
    changes = tuple((at, one) for at, one in enumerate(batches) if at == 0 or one != batches[at - 1])
    return Figure(
        batch=run["batch"],
        time_s=sum(run["steps_s"]),
        steady_s=sum(len(times) * statistics.median(times) for times in by_batch.values()),
        num_steps=len(batches),
        changes=changes,
        accuracy=accuracy,
        is_reached=accuracy >= wanted,
    )


def measured(lab: Netlab, order: Sequence[int], wanted: float, most_s: float) -> list[Figure]:
    """Run it across a bed, in this order."""
    arguments = ["--wanted", str(wanted), "--most-s", str(most_s), "--batches", *map(str, order)]
    records = records_of(lab, "bench.netlab.batching", arguments, env={"OPENBLAS_NUM_THREADS": "1"})
    return [figure(run, wanted) for run in records[0]["runs"]]


def verdict(found: Sequence[Figure]) -> dict[str, Any]:
    """Whether the batch that follows is as it must be; one that did not come to the end counts as what it took."""
    adaptive = next(one for one in found if one.batch == ADAPTIVE)
    fixed = [one for one in found if one.batch != ADAPTIVE]
    came = [one for one in fixed if one.is_reached]
    worst = max(fixed, key=lambda one: (not one.is_reached, one.time_s))
    best = min(came, key=lambda one: one.time_s, default=None)
    ratio = worst.time_s / adaptive.time_s
    beyond = None if best is None else adaptive.time_s / best.time_s - 1
    return {
        "best": best and best.batch, "worst": worst.batch, "worst_is_reached": worst.is_reached,
        "ratio": round(ratio, 3), "least_ratio": LEAST_RATIO,
        "beyond": beyond and round(beyond, 3), "most_beyond": MOST_BEYOND,
        "reached": adaptive.is_reached and ratio >= LEAST_RATIO and (beyond is None or beyond <= MOST_BEYOND),
    }  # fmt: skip


def table(found: Sequence[Figure]) -> str:
    """The figures as text."""
    lines = [f"{'':16}{'s':>8}{'undisturbed':>13}{'steps':>8}{'accuracy':>10}"]
    for one in sorted(found, key=lambda one: (not one.is_reached, one.time_s)):
        end = f"{one.accuracy:10.1%}" + ("" if one.is_reached else "  not reached")
        lines.append(f"{one.name:16}{one.time_s:8.1f}{one.steady_s:13.1f}{one.num_steps:8}{end}")
    return "\n".join(lines)


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--hosts", type=click.IntRange(min=2), default=4, show_default=True, metavar="N")
@click.option("--rate", default="200mbit", show_default=True, metavar="RATE", help="Of their links.")
@click.option("--wanted", type=click.FloatRange(0, 1), default=WANTED, show_default=True, help="Accuracy.")
@click.option("--most-s", type=float, default=MOST_S, show_default=True, help="Of a run.")
@click.option("--output", type=click.Path(path_type=Path), help="By default bench/results/batches-DATE.json.")
def main(hosts: int, rate: str, wanted: float, most_s: float, output: Path | None) -> None:
    """Measure, print, record."""
    record = Record("batches", output)
    with reported(), Netlab(even(hosts, parse_rate(rate)), network="10.80.3.0/24") as lab:
        found = measured(lab, ORDER, wanted, most_s)
    aim = verdict(found)
    print(table(found))
    beyond = "none was in time" if aim["beyond"] is None else f"{aim['beyond']:+.1%} beside a batch of {aim['best']}"
    print(
        f"by noise scale {aim['ratio']:.2f} times as quick as a batch of {aim['worst']}, the worst; the best: {beyond}"
    )
    figures = {
        "hosts": hosts,
        "rate": rate,
        "wanted": wanted,
        "most_s": most_s,
        "task": {"hidden": HIDDEN, "first_batch": FIRST_BATCH, "learning_rate": RATE, "computing_s": COMPUTING_S},
        "verdict": aim,
        "figures": [asdict(one) for one in found],
    }
    record.write(figures)
    sys.exit(0 if aim["reached"] else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.batches")
