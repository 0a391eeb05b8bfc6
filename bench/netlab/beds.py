"""The table of six beds: `auto` beside all strategies and Gloo, and beside what the simulator says.

    python -m bench.netlab.beds --output beds.json
    python -m bench.netlab.beds --output beds.json --show

Beds have drop-tail queues, as switches have. On each, at 64 KiB, 1, 16 and 64 MiB, ``auto`` is timed as it is, and
after ``kfcomm probe --keep`` beside every strategy, whose chunks and windows then follow from the rates, as the
simulator has them; then in turns with the best of them. A cell is the median of its rounds; the first round is not
counted. The record is written after each bed and size, and what is in it is not measured again: so the command can be
ended and begun anew at any time. It prints how long it will take, by the simulator.

What must be reached: ``auto`` after a probe within 1.08 of the best strategy's time in the median and 1.15 at worst;
errors of the simulator from 1 MiB on of 4 % in the median and 10 % at worst, and the winner right where first and
second differ by more than 5 %.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from bench.netlab.__main__ import reported
from bench.netlab.hosts import HostSpec
from bench.netlab.lab import Netlab, Wires
from bench.netlab.measure import alone, measure
from bench.netlab.rates import efficiency
from bench.netlab.rivals import GLOO
from bench.netlab.steps import rounds
from bench.records import say
from kfcomm.common.sizes import parse_sizes, show_size
from kfcomm.simulate import Host, Link, Local, SimulatedNetwork, Switch, simulate
from kfcomm.strategies import build
from kfcomm.strategies.tree_packing import packed_by

MBIT: Final = 1e6
PACKED: Final = "bench.netlab.measured:packed_trees"
AUTO, PROBED = "auto", "auto after a probe"
STRATEGIES: Final = (
    "star", "ring", "clique", "tree", "binary_tree", "double_tree", "multi_star", "multi_binary_tree_star", "binomial",
    "halving_doubling", PACKED,
)  # fmt: skip
SIZES: Final = "64KiB,1MiB,16MiB,64MiB"
_LATENCY_S: Final = 1e-4
_CPUS: Final = 2


@dataclass(frozen=True, slots=True)
class Bed:
    """Hosts and wires, as a bed has them and as the simulator does."""

    rates: tuple[float, ...]  # Mbit/s
    ranks: int = 1  # on each host
    slow: tuple[tuple[str, str, float], ...] = ()  # links of so many Mbit/s
    racks: tuple[tuple[str, ...], ...] = ()
    uplink: float = 0.0  # Mbit/s

    @property
    def specs(self) -> tuple[HostSpec, ...]:
        """The hosts to make."""
        return tuple(HostSpec(f"h{number}", rate * MBIT, self.ranks) for number, rate in enumerate(self.rates))

    @property
    def wires(self) -> Wires:
        """Their cables and switches."""
        return Wires({(a, b): rate * MBIT for a, b, rate in self.slow}, self.racks, self.uplink * MBIT)

    @property
    def network(self) -> SimulatedNetwork:
        """The same for the simulator."""
        byte = MBIT / 8
        return SimulatedNetwork(
            hosts=tuple(Host(each.name, (each.rate or 0) / 8, _LATENCY_S, each.ranks) for each in self.specs),
            local=Local(overhead_s=2e-5),
            links=tuple(Link((a, b), rate * byte) for a, b, rate in self.slow),
            switches=tuple(Switch(rack, self.uplink * byte) for rack in self.racks),
            efficiency=efficiency(1500),
            cpus=_CPUS,
        )


def _named(*numbers: int) -> tuple[str, ...]:
    return tuple(f"h{number}" for number in numbers)


BEDS: Final[Mapping[str, Bed]] = {
    "equal": Bed((200.0,) * 5),
    "unlike": Bed((400.0, 400.0, 400.0, 100.0, 50.0)),
    "slow first": Bed((50.0, 100.0, 400.0, 400.0, 400.0)),
    "slow link": Bed((200.0,) * 5, slow=(("h0", "h3", 20.0),)),
    "racks": Bed((200.0,) * 8, racks=(_named(0, 1, 2, 3), _named(4, 5, 6, 7)), uplink=200.0),
    "two ranks": Bed((100.0,) * 8, ranks=2),
}


def forecast_s(bed: Bed, strategy: str, nbytes: int) -> float:
    """Seconds by the simulator."""
    network = bed.network
    layout = network.layout
    if strategy == AUTO:
        layout = type(layout)(layout.hosts, layout.num_cpus)  # nothing is measured
    if strategy == PACKED:
        rates = layout.costs.rates
        graphs = build("multi_star", layout) if rates is None else packed_by(layout, rates)
        return simulate(graphs, layout, nbytes, network, key="step").seconds
    return simulate(AUTO if strategy == PROBED else strategy, layout, nbytes, network, key="step").seconds


def missing(record: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Beds and sizes that are not in the record."""
    done = {(row["bed"], row["nbytes"]) for row in record["rows"]}
    return ((name, nbytes) for name in BEDS for nbytes in sizes if (name, nbytes) not in done)


def rows_of(name: str, nbytes: int, num_rounds: int, *, with_gloo: bool) -> list[dict[str, Any]]:
    """Measure all strategies on a bed at one size."""
    bed = BEDS[name]
    plain = [AUTO, *((GLOO,) if with_gloo else ())]
    with tempfile.TemporaryDirectory() as cache, Netlab(bed.specs, wires=bed.wires) as lab:
        env = {"XDG_CACHE_HOME": cache}
        spans = _spans(lab, plain, nbytes, num_rounds, env)
        lab.run([sys.executable, "-m", "kfcomm", "probe", "--keep", "--force"], env=env, timeout_s=600).check()
        spans |= _spans(lab, STRATEGIES, nbytes, num_rounds, env)
        best = min(STRATEGIES, key=lambda strategy: statistics.median(spans[strategy]))
        beside = _spans(lab, [AUTO, best], nbytes, num_rounds, env)
    spans[PROBED] = beside[AUTO]
    rows = [
        {
            "bed": name,
            "nbytes": nbytes,
            "strategy": strategy,
            "median_s": statistics.median(found),
            "spans_s": found,
            "simulated_s": None if strategy == GLOO else forecast_s(bed, strategy, nbytes),
        }
        for strategy, found in spans.items()
    ]
    rows[-1]["best_s"] = statistics.median(beside[best])
    return rows


def _spans(
    lab: Netlab, strategies: Sequence[str], nbytes: int, num_rounds: int, env: Mapping[str, str]
) -> dict[str, list[float]]:
    steps = rounds(strategies, (nbytes,), num_rounds + 1)
    spans: dict[str, list[float]] = {name: [] for name in strategies}
    for timing in measure(lab, steps, env=env)[len(strategies) :]:
        spans[timing.step.strategy].append(timing.span_s)
    return spans


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All cells, and what ``auto`` and the simulator reach."""
    lines: list[str] = []
    for name, nbytes in dict.fromkeys((row["bed"], row["nbytes"]) for row in rows):
        here = [row for row in rows if (row["bed"], row["nbytes"]) == (name, nbytes)]
        best = best_of(here)
        lines.append(f"\n{name}, {show_size(nbytes)}{'':12}{'median':>10}{'of best':>9}{'simulated':>11}{'error':>8}")
        for row in sorted(here, key=lambda row: row["median_s"]):
            seconds, simulated = row["median_s"], row["simulated_s"]
            said = "" if simulated is None else f"{simulated:11.3f}{simulated / seconds - 1:+8.1%}"
            lines.append(f"  {row['strategy'][-28:]:28}{seconds:10.3f}{seconds / row.get('best_s', best):9.2f}{said}")
    return "\n".join([*lines, "", *(f"{key}: {value}" for key, value in verdict(rows).items())])


def best_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the best strategy on one bed at one size, without ``auto``."""
    return min(float(row["median_s"]) for row in rows if row["strategy"] in STRATEGIES)


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the aims."""
    ratios: dict[str, list[float]] = {AUTO: [], PROBED: [], GLOO: []}
    right = clear = 0
    for name, nbytes in dict.fromkeys((row["bed"], row["nbytes"]) for row in rows):
        here = {row["strategy"]: row for row in rows if (row["bed"], row["nbytes"]) == (name, nbytes)}
        best = best_of(list(here.values()))
        for each, found in ratios.items():
            if each in here:
                found.append(here[each]["median_s"] / here[each].get("best_s", best))
        ranked = sorted((here[each] for each in STRATEGIES if each in here), key=lambda row: row["median_s"])
        if nbytes >= 1 << 20 and ranked[1]["median_s"] > 1.05 * ranked[0]["median_s"]:
            clear += 1
            right += min(ranked, key=lambda row: row["simulated_s"]) is ranked[0]
    errors = [
        abs(row["simulated_s"] / row["median_s"] - 1)
        for row in rows
        if row["simulated_s"] is not None and row["nbytes"] >= 1 << 20
    ]
    figures = {
        f"{each}, of the best: median, worst": f"{statistics.median(them):.3f}, {max(them):.3f}"
        for each, them in ratios.items()
        if them
    }
    if errors:
        figures["simulator from 1 MiB on: median, worst error"] = f"{statistics.median(errors):.1%}, {max(errors):.1%}"
    return figures | {"winners right, where clear": f"{right} of {clear}"}


def _total_s(cells: Sequence[tuple[str, int]], num_rounds: int) -> float:
    """How long the cells take, by the simulator."""
    per_round = sum(
        forecast_s(BEDS[name], strategy, nbytes) for name, nbytes in cells for strategy in (*STRATEGIES, AUTO, PROBED)
    )
    return per_round * 1.15 * (num_rounds + 1) + 60 * len(cells)


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The record, which is continued.")
@click.option("--sizes", default=SIZES, show_default=True, help="Of float32 arrays.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=3, show_default=True, help="That count.")
@click.option("--only", multiple=True, type=click.Choice(list(BEDS)), help="Beds; all by default.")
@click.option("--gloo/--no-gloo", default=True, show_default=True, help="Time torch's Gloo too.")
@click.option("--show", is_flag=True, help="Print what is in the record, and measure nothing.")
def main(output: Path, sizes: str, num_rounds: int, only: tuple[str, ...], gloo: bool, show: bool) -> None:
    """Measure what is missing, and print."""
    record: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"format": 1, "rows": []}
    with reported():
        cells = [(name, nbytes) for name, nbytes in missing(record, parse_sizes(sizes)) if not only or name in only]
        if cells and not show:
            say(f"netlab: {len(cells)} beds and sizes, about {_total_s(cells, num_rounds) / 60:.0f} minutes")
            with alone(lambda: say("netlab: waiting for another measurement to end")):
                for name, nbytes in cells:
                    say(f"netlab: {name}, {show_size(nbytes)}")
                    record["rows"] += rows_of(name, nbytes, num_rounds, with_gloo=gloo)
                    output.write_text(json.dumps(record, indent=1) + "\n")
        print(table(record["rows"]))


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.beds")
