"""Sufficient factors beside all_reduce for VGG-16's dense layers: bytes, and how long a step takes.

    python -m bench.netlab.hybrid

Eight hosts with links of 1 Gbit/s, one rank each, average the gradients of VGG-16's three dense layers over 32 samples
a rank, by turns in the same processes: by ``HybridGradients``, which sends factors and multiplies everybody's; and by
multiplying one's own and an all_reduce of the product. A step is from the factors that a backward pass leaves to the
mean gradient, from the first rank's start to the last rank's end. How long the factors alone are under way stands
beside. The first round, in which connections are made, is not counted.

All ranks share the processors of one machine, and the product of everybody's factors is 63 GFLOP for each of them: the
hybrid step is mostly that here, where an accelerator takes some milliseconds.

What must be reached: bytes as the formula of Poseidon says, and a step that is 1.5 times as quick.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.netlab.__main__ import reported
from bench.netlab.factoring import HYBRID, TOLD, WAYS, WHOLE, layers_of
from bench.netlab.hosts import even
from bench.netlab.lab import Netlab
from bench.netlab.measure import records_of
from bench.netlab.rates import parse_rate
from bench.records import Record
from kfcomm.train import all_reduce_numbers, factor_numbers, takes_factors

LEAST_RATIO = 1.5
MOST_BEYOND = 0.02
"""Of the formula's bytes: headers, and what announces a collective."""
_NUMBER_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Figure:
    """One way.

    Attributes:
        way: its name.
        median_s: of its steps.
        steps_s: each.
        cpu_s: processor time of all ranks together, the median.
        sent_nbytes: by the rank that has sent most in a step.
        formula_nbytes: what it should send.
    """

    way: str
    median_s: float
    steps_s: tuple[float, ...]
    cpu_s: float
    sent_nbytes: int
    formula_nbytes: float

    @property
    def beyond(self) -> float:
        """By which part more was sent than the formula says."""
        return self.sent_nbytes / self.formula_nbytes - 1


def formula_nbytes(way: str, size: int, samples: int, divisor: int) -> float:
    """Bytes that a rank sends, by Poseidon's formulas."""
    numbers = 0.0
    for shape in layers_of(divisor).values():
        by_factors = way == TOLD or (way == HYBRID and takes_factors(*shape, samples, size))
        numbers += factor_numbers(*shape, samples, size) if by_factors else all_reduce_numbers(*shape, size)
    return _NUMBER_NBYTES * numbers


def figure(way: str, turns: Sequence[Sequence[dict[str, Any]]], formula: float) -> Figure:
    """Of the figures of each turn, by rank."""
    steps_s = tuple(max(one["end_s"] for one in turn) - min(one["start_s"] for one in turn) for turn in turns)
    cpu_s = statistics.median(sum(one["cpu_s"] for one in turn) for turn in turns)
    sent_nbytes = max(one["sent_nbytes"] for turn in turns for one in turn)
    return Figure(way, statistics.median(steps_s), steps_s, cpu_s, sent_nbytes, formula)


def measured(lab: Netlab, num_rounds: int, samples: int, divisor: int) -> dict[str, Figure]:
    """Run it across a bed; one round more than is counted."""
    given = {"--rounds": num_rounds + 1, "--samples": samples, "--divisor": divisor}
    arguments = [str(one) for pair in given.items() for one in pair]
    records = records_of(
        lab, "bench.netlab.factoring", arguments, env={"OPENBLAS_NUM_THREADS": "1", "KFCOMM_STRATEGY": "clique"}
    )
    found = {}
    for way in WAYS:
        turns = [[record["times"][way][at] for record in records] for at in range(1, num_rounds + 1)]
        found[way] = figure(way, turns, formula_nbytes(way, len(records), samples, divisor))
    return found


def table(found: dict[str, Figure]) -> str:
    """The figures as text."""
    lines = [f"{'':16}{'a step, s':>10}{'CPU s':>8}{'MB sent by a rank':>20}{'formula':>10}"]
    for one in found.values():
        megabytes = f"{one.sent_nbytes / 1e6:20.2f}{one.formula_nbytes / 1e6:10.2f}"
        lines.append(f"{one.way:16}{one.median_s:10.2f}{one.cpu_s:8.1f}{megabytes}")
    return "\n".join(lines)


def verdict(found: dict[str, Figure]) -> dict[str, Any]:
    """Whether the hybrid way is as it must be."""
    ratio = found[WHOLE].median_s / found[HYBRID].median_s
    beyond = max(abs(found[way].beyond) for way in (HYBRID, WHOLE))
    return {
        "ratio": round(ratio, 3), "least_ratio": LEAST_RATIO,
        "network_ratio": round(found[WHOLE].median_s / found[TOLD].median_s, 2),
        "beyond": round(beyond, 5), "most_beyond": MOST_BEYOND,
        "reached": ratio >= LEAST_RATIO and beyond <= MOST_BEYOND,
    }  # fmt: skip


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--hosts", type=click.IntRange(min=2), default=8, show_default=True, metavar="N")
@click.option("--rate", default="1gbit", show_default=True, metavar="RATE", help="Of their links.")
@click.option("--samples", type=click.IntRange(min=1), default=32, show_default=True, help="Of a rank.")
@click.option("--divisor", type=click.IntRange(1, 64), default=1, show_default=True, help="Of both sides of a layer.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=3, show_default=True, help="That count.")
@click.option("--output", type=click.Path(path_type=Path), help="By default bench/results/hybrid-DATE.json.")
def main(hosts: int, rate: str, samples: int, divisor: int, num_rounds: int, output: Path | None) -> None:
    """Measure, print, record."""
    record = Record("hybrid", output)
    with reported(), Netlab(even(hosts, parse_rate(rate)), network="10.80.1.0/24") as lab:
        found = measured(lab, num_rounds, samples, divisor)
    aim = verdict(found)
    print(table(found))
    print(
        f"a step {aim['ratio']:.2f} times as quick, factors {aim['network_ratio']:.1f} times as quick as an all_reduce "
        f"of the gradients; bytes {aim['beyond']:.2%} off the formula"
    )
    figures = {
        "hosts": hosts,
        "rate": rate,
        "samples": samples,
        "layers": layers_of(divisor),
        "verdict": aim,
        "figures": [asdict(one) for one in found.values()],
    }
    record.write(figures)
    sys.exit(0 if aim["reached"] else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.hybrid")
