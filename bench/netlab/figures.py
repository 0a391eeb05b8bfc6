"""The table of `make netlab`: strategies and sizes on hosts with slow links, printed and recorded.

    python -m bench.netlab.figures --hosts 8 --rate 200mbit --rounds 7

Each round times every strategy once at every size, and the strategies take turns at beginning. The first round is not
counted: connections are made in it, and TCP learns its windows. A figure is the median of the spans, from the first
rank's call to the last rank's result; the record keeps all of them. The bound is 2(n−1)/n · S/B with the rate B that tc
was given, headers included; its share of payload leaves the headers out.

What must be reached: ring at 32 MiB on 8 hosts with 200 Mbit/s, at least 92 % of the bound.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bench.netlab.__main__ import bed_options, reported, specs_from
from bench.netlab.hosts import HostSpec
from bench.netlab.lab import Netlab
from bench.netlab.measure import Timing, alone, measure
from bench.netlab.rates import Bucket, efficiency, show_rate
from bench.netlab.steps import Step, bound_s, rounds
from bench.records import Record, say
from kfcomm.common.sizes import parse_sizes, show_size

STRATEGIES = "ring,star,clique,binary_tree,multi_binary_tree_star,auto"
SIZES = "256KiB,2MiB,8MiB,32MiB"
AIM = Step("ring", 32 << 20)
AIM_SHARE = 0.92


@dataclass(frozen=True, slots=True)
class Figure:
    """One strategy at one size.

    Attributes:
        strategy: its name.
        nbytes: of the array.
        median_s: of the spans that count.
        low_s: the shortest.
        high_s: the longest.
        cpu_s: median of the processor time of all ranks together.
        share: of the bound: bound / median; None where the links are not all alike.
        payload_share: the same, of the bound for what headers leave.
        spans_s: those that count, in order.
    """

    strategy: str
    nbytes: int
    median_s: float
    low_s: float
    high_s: float
    cpu_s: float
    share: float | None
    payload_share: float | None
    spans_s: tuple[float, ...]

    @classmethod
    def of(cls, step: Step, timings: Sequence[Timing], bed: Bed) -> Figure:
        """From the timings of its step that count."""
        spans = tuple(timing.span_s for timing in timings)
        median = statistics.median(spans)
        share = None if bed.rate is None else bound_s(bed.size, step.nbytes, bed.rate) / median
        return cls(
            step.strategy,
            step.nbytes,
            median_s=median,
            low_s=min(spans),
            high_s=max(spans),
            cpu_s=statistics.median(timing.cpu_s for timing in timings),
            share=share,
            payload_share=None if share is None else share / efficiency(bed.mtu),
            spans_s=spans,
        )


@dataclass(frozen=True, slots=True)
class Bed:
    """The bed.

    Attributes:
        specs: the hosts.
        mtu: of all links.
    """

    specs: tuple[HostSpec, ...]
    mtu: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(spec.ranks for spec in self.specs)

    @property
    def rate(self) -> float | None:
        """Bits per second of each rank's link, if every rank has one to itself and all are alike."""
        rates = {spec.rate for spec in self.specs}
        return rates.pop() if len(rates) == 1 and self.size == len(self.specs) else None

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        hosts = [asdict(spec) | {"burst_nbytes": self._burst(spec)} for spec in self.specs]
        return {"hosts": hosts, "mtu": self.mtu, "efficiency": efficiency(self.mtu)}

    def _burst(self, spec: HostSpec) -> int | None:
        return None if spec.rate is None else Bucket.holding(spec.rate, self.mtu).burst_nbytes


def figures(bed: Bed, strategies: Sequence[str], sizes: Sequence[int], num_rounds: int) -> list[Figure]:
    """Measure; by size, then by strategy."""
    steps = rounds(strategies, sizes, num_rounds + 1)
    per_round = len(steps) // (num_rounds + 1)
    with alone(lambda: say("netlab: waiting for another measurement to end")), Netlab(bed.specs, mtu=bed.mtu) as lab:
        timings = measure(lab, steps, before_step=lambda number, step: _progress(number, per_round, num_rounds))
    counted = timings[per_round:]
    return [
        Figure.of(step, [timing for timing in counted if timing.step == step], bed)
        for step in (Step(strategy, nbytes) for nbytes in sizes for strategy in strategies)
    ]


def table(found: Sequence[Figure]) -> str:
    """The figures as text."""
    lines = [f"{'':24}{'':>8}{'median':>12}{'low':>10}{'high':>10}{'of bound':>10}{'of payload':>12}{'CPU':>9}"]
    for one in found:
        shares = [f"{share:.1%}" if share is not None else "" for share in (one.share, one.payload_share)]
        times = "".join(f"{seconds * 1e3:10.1f}" for seconds in (one.median_s, one.low_s, one.high_s))
        cpu = f"{one.cpu_s / one.median_s:.2f}"
        lines.append(f"{one.strategy:24}{show_size(one.nbytes):>8}  {times}{shares[0]:>10}{shares[1]:>12}{cpu:>9}")
    lines.append("Times in ms; CPU is processors in use by all ranks together.")
    return "\n".join(lines)


def verdict(found: Sequence[Figure]) -> Mapping[str, Any] | None:
    """Whether the ring reaches its aim; None if it was not measured."""
    ring = next((one for one in found if Step(one.strategy, one.nbytes) == AIM and one.share is not None), None)
    if ring is None or ring.share is None:
        return None
    return {"case": str(AIM), "share": round(ring.share, 4), "minimum": AIM_SHARE, "reached": ring.share >= AIM_SHARE}


def _progress(number: int, per_round: int, num_rounds: int) -> None:
    if number % per_round == 0:
        say(f"netlab: round {number // per_round} of {num_rounds}")


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@bed_options
@click.option("--strategies", default=STRATEGIES, show_default=True, help="With commas between.")
@click.option("--sizes", default=SIZES, show_default=True, help="Of float32 arrays; 1MiB:32MiB doubles.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=7, show_default=True, help="That count.")
@click.option(
    "--output", type=click.Path(path_type=Path), help="Where the record goes; bench/results/netlab-DATE.json."
)
def main(strategies: str, sizes: str, num_rounds: int, output: Path | None, mtu: int, **given: Any) -> None:
    """Measure, print, record."""
    with reported():
        bed = Bed(specs_from(**given), mtu)
        record = Record("netlab", output)
        found = figures(bed, strategies.split(","), parse_sizes(sizes), num_rounds)
    print(f"{len(bed.specs)} hosts, {', '.join(dict.fromkeys(show_rate(spec.rate) for spec in bed.specs))}\n")
    print(table(found))
    figures_ = {
        "rounds": num_rounds,
        "network": bed.as_json(),
        "verdict": verdict(found),
        "figures": [asdict(one) for one in found],
    }
    record.write(figures_)
    aim = verdict(found)
    if aim is not None and not aim["reached"]:
        print(f"{aim['case']}: {aim['share']:.1%} of the bound, and {AIM_SHARE:.0%} are wanted")
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.figures")
