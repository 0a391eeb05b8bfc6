"""The table of six beds: `auto` beside all strategies, Gloo and Open MPI, and beside what the simulator says.

    python -m bench.netlab.beds --output beds.json
    python -m bench.netlab.beds --output beds.json --show

Beds have drop-tail queues, as switches have. On each, at 64 KiB, 1, 16 and 64 MiB, there are three parts:

- ``strategies``: every strategy after ``kfcomm probe --keep``, since chunks and windows follow from the rates, as the
  simulator has them; then ``auto`` in turns with the best of them.
- ``settled``: ``auto`` without a probe, after 50 steps in which it may improve itself.
- ``rivals``: Gloo in turns with ``auto`` after a probe, then Open MPI.

A cell is the median of its rounds; the first round is not counted. The record is written after each part, and what is
in it is not measured again: so the command can be ended and begun anew at any time. It prints how long it will take, by
the simulator.

What must be reached: ``auto`` after a probe within 1.08 of the best strategy's time in the median and 1.15 at worst,
without one 1.12 in the median; 1.5 times as fast as Gloo and Open MPI where hosts are unlike, as fast elsewhere; errors
of the simulator from 1 MiB on of 4 % in the median and 10 % at worst, and the winner right where first and second
differ by more than 5 %.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import click

from bench.netlab.__main__ import reported
from bench.netlab.hosts import HostSpec
from bench.netlab.lab import Netlab, Wires
from bench.netlab.measure import alone, measure
from bench.netlab.rates import efficiency
from bench.netlab.rivals import GLOO, OPEN_MPI, open_mpi_spans
from bench.netlab.steps import Step, rounds
from bench.records import say
from kfcomm.common.sizes import parse_sizes, show_size
from kfcomm.simulate import Host, Link, Local, SimulatedNetwork, Switch, simulate
from kfcomm.strategies import build
from kfcomm.strategies.tree_packing import packed_by

MBIT: Final = 1e6
PACKED: Final = "bench.netlab.measured:packed_trees"
AUTO, PROBED = "auto", "auto after a probe"
ALL, SETTLED, RIVALS = PARTS = ("strategies", "settled", "rivals")
BESIDE: Final = "beside"
"""What ``auto`` after a probe is compared with, and what rivals are, in turns: the best strategy, and it."""
SETTLED_STEPS: Final = 50
Row: TypeAlias = dict[str, Any]
Spans: TypeAlias = dict[str, list[float]]
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
    if strategy == PACKED:
        rates = layout.costs.rates
        graphs = build("multi_star", layout) if rates is None else packed_by(layout, rates)
        return simulate(graphs, layout, nbytes, network, key="step").seconds
    return simulate(AUTO if strategy == PROBED else strategy, layout, nbytes, network, key="step").seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """Part of the table, on one bed at one size."""

    bed: str
    nbytes: int
    part: str

    def __str__(self) -> str:
        return f"{self.bed}, {show_size(self.nbytes)}, {self.part}"

    def rows(self, num_rounds: int, within: float, mpi: Path | None) -> list[Row]:
        """Measure it; ``mpi``: an interpreter with Open MPI's mpi4py; ``within``: see `hopeful`."""
        bed = BEDS[self.bed]
        strategies = hopeful(self, within) if self.part == ALL else []
        with tempfile.TemporaryDirectory() as cache, Netlab(bed.specs, wires=bed.wires) as lab:
            env = {"XDG_CACHE_HOME": cache}
            if self.part != SETTLED:
                probe = [sys.executable, "-m", "kfcomm", "probe", "--keep", "--force"]
                lab.run(probe, env=env, timeout_s=600).check()
            if self.part == ALL:
                spans = _strategies(lab, strategies, self.nbytes, num_rounds, env)
            else:
                spans = (_settled if self.part == SETTLED else _rivals)(lab, self.nbytes, num_rounds, env)
            if mpi is not None and self.part == RIVALS:
                spans[OPEN_MPI] = open_mpi_spans(lab, mpi, self.nbytes, num_rounds + 1)[1:]
        beside = spans.pop(BESIDE, [])
        rows = [
            {
                "bed": self.bed,
                "nbytes": self.nbytes,
                "part": self.part,
                "strategy": strategy,
                "median_s": statistics.median(found),
                "spans_s": found,
                "simulated_s": forecast_s(bed, strategy, self.nbytes) if self.part == ALL else None,
            }
            for strategy, found in spans.items()
        ]
        for row in rows:
            if row["strategy"] in (PROBED, GLOO, OPEN_MPI):
                row["beside_s"] = statistics.median(beside)
        return rows


def missing(record: Mapping[str, Any], beds: Sequence[str], sizes: Sequence[int], parts: Sequence[str]) -> list[Cell]:
    """Cells that are not in the record."""
    done = {Cell(row["bed"], row["nbytes"], row["part"]) for row in record["rows"]}
    cells = (Cell(bed, nbytes, part) for bed in beds for nbytes in sizes for part in parts)
    return [cell for cell in cells if cell not in done]


def hopeful(cell: Cell, within: float) -> list[str]:
    """Strategies that the simulator lets take at most ``within`` times the best one's time."""
    found = {strategy: forecast_s(BEDS[cell.bed], strategy, cell.nbytes) for strategy in STRATEGIES}
    return [strategy for strategy in STRATEGIES if found[strategy] <= within * min(found.values())]


def _strategies(lab: Netlab, strategies: Sequence[str], nbytes: int, num_rounds: int, env: Mapping[str, str]) -> Spans:
    spans = _spans(lab, strategies, nbytes, num_rounds, env)
    best = min(strategies, key=lambda strategy: statistics.median(spans[strategy]))
    beside = _spans(lab, [AUTO, best], nbytes, num_rounds, env)
    return spans | {PROBED: beside[AUTO], BESIDE: beside[best]}


def _settled(lab: Netlab, nbytes: int, num_rounds: int, env: Mapping[str, str]) -> Spans:
    timings = measure(lab, [Step(AUTO, nbytes)] * (SETTLED_STEPS + num_rounds), env=env)
    return {AUTO: [timing.span_s for timing in timings[SETTLED_STEPS:]]}


def _rivals(lab: Netlab, nbytes: int, num_rounds: int, env: Mapping[str, str]) -> Spans:
    spans = _spans(lab, [AUTO, GLOO], nbytes, num_rounds, env)
    return {GLOO: spans[GLOO], BESIDE: spans[AUTO]}


def _spans(lab: Netlab, strategies: Sequence[str], nbytes: int, num_rounds: int, env: Mapping[str, str]) -> Spans:
    steps = rounds(strategies, (nbytes,), num_rounds + 1)
    spans: Spans = {name: [] for name in strategies}
    for timing in measure(lab, steps, env=env)[len(strategies) :]:
        spans[timing.step.strategy].append(timing.span_s)
    return spans


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All cells, and what ``auto`` and the simulator reach."""
    lines: list[str] = []
    for name, nbytes in dict.fromkeys((row["bed"], row["nbytes"]) for row in rows):
        here = [row for row in rows if (row["bed"], row["nbytes"]) == (name, nbytes)]
        best = min((row["median_s"] for row in here if row["strategy"] in STRATEGIES), default=float("nan"))
        lines.append(f"\n{name}, {show_size(nbytes)}{'':12}{'median':>10}{'of best':>9}{'simulated':>11}{'error':>8}")
        for row in sorted(here, key=lambda row: row["median_s"]):
            seconds, simulated = row["median_s"], row["simulated_s"]
            said = "" if simulated is None else f"{simulated:11.3f}{simulated / seconds - 1:+8.1%}"
            lines.append(f"  {row['strategy'][-28:]:28}{seconds:10.3f}{seconds / row.get('beside_s', best):9.2f}{said}")
    return "\n".join([*lines, "", *(f"{key}: {value}" for key, value in verdict(rows).items())])


def verdict(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the aims."""
    ratios: dict[str, list[float]] = {AUTO: [], PROBED: [], GLOO: [], OPEN_MPI: []}
    right = clear = 0
    for name, nbytes in dict.fromkeys((row["bed"], row["nbytes"]) for row in rows):
        here = {row["strategy"]: row for row in rows if (row["bed"], row["nbytes"]) == (name, nbytes)}
        ranked = sorted((here[each] for each in STRATEGIES if each in here), key=lambda row: row["median_s"])
        for each, found in ratios.items():
            if each in here and (ranked or "beside_s" in here[each]):
                found.append(here[each]["median_s"] / here[each].get("beside_s", ranked and ranked[0]["median_s"]))
        if nbytes >= 1 << 20 and len(ranked) > 1 and ranked[1]["median_s"] > 1.05 * ranked[0]["median_s"]:
            clear += 1
            right += min(ranked, key=lambda row: row["simulated_s"]) is ranked[0]
    errors = [
        abs(row["simulated_s"] / row["median_s"] - 1)
        for row in rows
        if row["simulated_s"] is not None and row["nbytes"] >= 1 << 20
    ]
    figures = {
        f"{each}, of {'the best' if each in (AUTO, PROBED) else PROBED}: least, median, most": (
            f"{min(them):.3f}, {statistics.median(them):.3f}, {max(them):.3f}"
        )
        for each, them in ratios.items()
        if them
    }
    if errors:
        figures["simulator from 1 MiB on: median, worst error"] = f"{statistics.median(errors):.1%}, {max(errors):.1%}"
    return figures | {"winners right, where clear": f"{right} of {clear}"}


def _cell_s(cell: Cell, num_rounds: int, within: float) -> float:
    """How long a cell takes, by the simulator; a rival as long as ``auto``, which is too little."""
    strategies, count = {
        ALL: ((*hopeful(cell, within), PROBED, PROBED), num_rounds + 1),
        SETTLED: ((PROBED,), SETTLED_STEPS + num_rounds),
        RIVALS: ((PROBED,) * 3, num_rounds + 1),
    }[cell.part]
    found = {strategy: forecast_s(BEDS[cell.bed], strategy, cell.nbytes) for strategy in set(strategies)}
    return 1.15 * count * sum(found[strategy] for strategy in strategies) + 20


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The record, which is continued.")
@click.option("--sizes", default=SIZES, show_default=True, help="Of float32 arrays.")
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=3, show_default=True, help="That count.")
@click.option("--only", "beds", multiple=True, type=click.Choice(list(BEDS)), help="Beds; all by default.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Of the table; all by default.")
@click.option("--within", type=float, default=float("inf"), help="Leave out what the simulator says is so much slower.")
@click.option("--openmpi-python", "mpi", type=click.Path(path_type=Path, exists=True), help="With mpi4py and mpiexec.")
@click.option("--show", is_flag=True, help="Print what is in the record, and measure nothing.")
def main(
    output: Path, sizes: str, num_rounds: int, beds: tuple[str, ...], parts: tuple[str, ...], within: float,
    mpi: Path | None, show: bool,
) -> None:  # fmt: skip
    """Measure what is missing, and print."""
    record: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"format": 2, "rows": []}
    with reported():
        cells = missing(record, beds or list(BEDS), parse_sizes(sizes), parts or PARTS)
        if cells and not show:
            minutes = sum(_cell_s(cell, num_rounds, within) for cell in cells) / 60
            say(f"netlab: {len(cells)} cells, about {minutes:.0f} minutes")
            with alone(lambda: say("netlab: waiting for another measurement to end")):
                for cell in cells:
                    say(f"netlab: {cell}")
                    record["rows"] += cell.rows(num_rounds, within, mpi)
                    output.write_text(json.dumps(record, indent=1) + "\n")
        print(table(record["rows"]))


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab.beds")
