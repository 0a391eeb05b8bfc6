"""The table of hosts that are unlike: topologies from measurement beside ring and star.

    python -m bench.netlab.unlike --rounds 5

Eight hosts, one with a slower link. The ranks probe the network as they find it, and use what is made of that;
they are not told what tc was told. Each round times every strategy once; the first round is not counted. The bound is
that of the ports (``kfcomm.strategies.bound_seconds``) with the rates that tc was given, headers included; what the
cost model says stands beside what was measured.

What must be reached by packed trees: 1.5 times as quick as the better of ring and star, and 80 % of the bound.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from bench.netlab.__main__ import reported
from bench.netlab.hosts import HostSpec, even, with_rate
from bench.netlab.lab import MTU, Netlab
from bench.netlab.measure import Timing, measure
from bench.netlab.rates import efficiency, parse_rate, show_rate
from bench.netlab.steps import rounds
from bench.records import Record, say
from kfcomm.common.sizes import parse_sizes
from kfcomm.strategies import AnyStrategy, bound_seconds, build, packed_trees
from kfcomm.strategies.cost import network_of, predict_seconds
from kfcomm.types import Layout

FORMAT: Final = 1
PACKED: Final = "bench.netlab.measured:packed_trees"
RIVALS: Final = ("ring", "star")
STRATEGIES: Final = (*RIVALS, "clique", "multi_binary_tree_star", PACKED)
LEAST_RATIO: Final = 1.5
LEAST_SHARE: Final = 0.8
_ALPHA_S: Final = 1e-4
"""Of the bed's links, about: it makes no difference to the predictions of long messages."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One strategy.

    Attributes:
        strategy: its name.
        median_s: of the spans that count.
        low_s: the shortest.
        high_s: the longest.
        predicted_s: by the cost model, from the rates of the links.
        share: of the bound: bound / median.
        payload_share: the same, of the bound for what headers leave.
        spans_s: those that count, in order.
    """

    strategy: str
    median_s: float
    low_s: float
    high_s: float
    predicted_s: float
    share: float
    payload_share: float
    spans_s: tuple[float, ...]


def figures(specs: Sequence[HostSpec], nbytes: int, num_rounds: int) -> list[Figure]:
    """Measure, in the order of `STRATEGIES`."""
    steps = rounds(STRATEGIES, (nbytes,), num_rounds + 1)
    with Netlab(specs) as lab:
        timings = measure(lab, steps, before_step=lambda number, _: _progress(number, num_rounds))
    counted = timings[len(STRATEGIES) :]
    return [_figure(name, nbytes, [one for one in counted if one.step.strategy == name], specs) for name in STRATEGIES]


def bandwidth_of(specs: Sequence[HostSpec]) -> list[list[float]]:
    """Bytes per second between hosts of one rank each, as tc lets them through.

    Raises:
        ValueError: a host has several ranks, or no limit.
    """
    rates = [spec.rate for spec in specs]
    if any(spec.ranks != 1 for spec in specs) or None in rates:
        raise ValueError("every host has one rank and a rate")
    ports = [rate / 8 for rate in rates if rate is not None]
    return [[min(there, back) for back in ports] for there in ports]


def _figure(name: str, nbytes: int, timings: Sequence[Timing], specs: Sequence[HostSpec]) -> Figure:
    layout, bandwidth = Layout.even(len(specs), len(specs)), bandwidth_of(specs)
    spans = tuple(timing.span_s for timing in timings)
    median = statistics.median(spans)
    strategy: AnyStrategy = packed_trees(layout, bandwidth) if name == PACKED else build(name, layout)
    network = network_of(layout, [[_ALPHA_S] * layout.size] * layout.size, bandwidth)
    share = bound_seconds(layout, bandwidth, nbytes) / median
    return Figure(
        name,
        median_s=median,
        low_s=min(spans),
        high_s=max(spans),
        predicted_s=predict_seconds(strategy, layout, nbytes, network),
        share=share,
        payload_share=share / efficiency(MTU),
        spans_s=spans,
    )


def table(found: Sequence[Figure]) -> str:
    """The figures as text."""
    lines = [f"{'':40}{'median':>10}{'low':>10}{'high':>10}{'predicted':>11}{'of bound':>10}{'of payload':>12}"]
    for one in found:
        times = "".join(f"{seconds:10.3f}" for seconds in (one.median_s, one.low_s, one.high_s))
        lines.append(f"{one.strategy:40}{times}{one.predicted_s:11.3f}{one.share:10.1%}{one.payload_share:12.1%}")
    return "\n".join([*lines, "Times in seconds."])


def verdict(found: Sequence[Figure]) -> Mapping[str, Any]:
    """Whether packed trees reach their aims."""
    medians = {one.strategy: one for one in found}
    packed = medians[PACKED]
    ratio = min(medians[name].median_s for name in RIVALS) / packed.median_s
    return {
        "ratio": round(ratio, 3),
        "least_ratio": LEAST_RATIO,
        "share": round(packed.share, 4),
        "least_share": LEAST_SHARE,
        "reached": ratio >= LEAST_RATIO and packed.share >= LEAST_SHARE,
    }


def _progress(number: int, num_rounds: int) -> None:
    if number % len(STRATEGIES) == 0:
        say(f"netlab: round {number // len(STRATEGIES)} of {num_rounds}")


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--hosts", type=click.IntRange(min=3), default=8, show_default=True, metavar="N", help="Number of hosts.")
@click.option("--rate", default="200mbit", show_default=True, metavar="RATE", help="Of their links.")
@click.option("--slow", default="50mbit", show_default=True, metavar="RATE", help="Of the last one's link.")
@click.option("--size", default="32MiB", show_default=True, metavar="SIZE", help="Of the float32 array.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=3, show_default=True, help="That count.")
@click.option("--output", type=click.Path(path_type=Path), help="By default bench/results/netlab-unlike-DATE.json.")
def main(hosts: int, rate: str, slow: str, size: str, num_rounds: int, output: Path | None) -> None:
    """Measure, print, record."""
    with reported():
        specs = with_rate(even(hosts, parse_rate(rate)), f"h{hosts - 1}", parse_rate(slow))
        (nbytes,) = parse_sizes(size)
        record = Record("netlab-unlike", output)
        found = figures(specs, nbytes, num_rounds)
    print(f"{hosts} hosts, {', '.join(dict.fromkeys(show_rate(spec.rate) for spec in specs))}, {size}\n")
    print(table(found))
    aim = verdict(found)
    figures_ = {
        "rounds": num_rounds,
        "nbytes": nbytes,
        "hosts": [asdict(spec) for spec in specs],
        "bound_s": bound_seconds(Layout.even(hosts, hosts), bandwidth_of(specs), nbytes),
        "verdict": aim,
        "figures": [asdict(one) for one in found],
    }
    record.write(figures_)
    print(f"packed trees: {aim['ratio']:.2f} times as quick as ring or star, {aim['share']:.1%} of the bound")
    sys.exit(0 if aim["reached"] else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.unlike")
