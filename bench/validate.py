"""The simulator against a test bed: what `make netlab` has recorded, once more in virtual time.

    python -m bench.validate bench/results/netlab-DATE.json

Nothing is fitted to the times that are compared. Of the bed come the rates, the burst of its token buckets, the share
of payload, and the processors, which all its hosts share. What a message and a byte cost a processor are found by least
squares from the processor time that the record has for each cell. The latency is half the round trip of a byte
between two hosts, measured on a bed that is made for it, or given by ``--latency``.

A cell is a strategy at a size; its error is simulated / measured − 1. At each size a winner is predicted. It is right
if it was the fastest, or took at most `NOISE` longer than the fastest: medians of other rounds differ by more.

What must be reached: a median error of at most 15 %, and nine of ten winners.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench import ROOT
from bench.latency import one_way_s
from bench.records import write
from kfcomm.common.sizes import show_size
from kfcomm.simulate import Host, Local, PortQueue, Result, SimulatedNetwork, simulate
from kfcomm.simulate.fields import parse_time_s
from kfcomm.types import Costs

MAX_ERROR = 0.15
MIN_WINNERS = 0.9
NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """A strategy at a size.

    Attributes:
        strategy: its name.
        nbytes: of the message.
        measured_s: median of the record.
        simulated_s: in virtual time.
    """

    strategy: str
    nbytes: int
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """How far the simulation is off; positive if it takes longer than the bed."""
        return self.simulated_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest strategy at a size.

    Attributes:
        nbytes: of the message.
        measured, predicted: names of strategies.
        behind: how many times as long as the fastest the predicted one took on the bed.
    """

    nbytes: int
    measured: str
    predicted: str
    behind: float

    @property
    def is_right(self) -> bool:
        """Whether it is as fast as the fastest."""
        return self.behind <= 1 + NOISE


def bed_of(record: Mapping[str, Any], latency_s: float) -> SimulatedNetwork:
    """The network of a record, on which processors are free."""
    about = record["network"]
    hosts = tuple(Host(host["name"], host["rate"] / 8, latency_s, host["ranks"]) for host in about["hosts"])
    return SimulatedNetwork(
        hosts=hosts,
        local=Local(overhead_s=0.0),
        efficiency=about["efficiency"],
        cpus=record["machine"]["cores"],
        burst_nbytes=min(host["burst_nbytes"] for host in about["hosts"]),
        queue=PortQueue.FAIR,
    )


def processor_costs(record: Mapping[str, Any], results: Sequence[Result]) -> tuple[float, float]:
    """Seconds of each message, sent or received, and of each byte of it: least squares of relative errors."""
    spent = np.array([figure["cpu_s"] for figure in record["figures"]])
    ends = np.array([(2 * result.messages, 2 * result.nbytes_sent) for result in results], dtype=float)
    (per_message, per_byte), *_ = np.linalg.lstsq(ends / spent[:, None], np.ones(len(spent)), rcond=None)
    return max(0.0, float(per_message)), max(0.0, float(per_byte))


def simulated(record: Mapping[str, Any], network: SimulatedNetwork) -> list[Result]:
    """Every cell of the record, in its order."""
    # The ranks of a bed know no costs: they cut messages as on any network.
    layout = replace(network.layout, costs=Costs())
    return [simulate(figure["strategy"], layout, figure["nbytes"], network, key="step") for figure in record["figures"]]


def cells_of(record: Mapping[str, Any], results: Sequence[Result]) -> list[Cell]:
    """Measured and simulated times side by side."""
    return [
        Cell(figure["strategy"], figure["nbytes"], figure["median_s"], result.seconds)
        for figure, result in zip(record["figures"], results, strict=True)
    ]


def winners_of(cells: Sequence[Cell]) -> list[Winner]:
    """One for each size."""
    winners = []
    for nbytes in sorted({cell.nbytes for cell in cells}):
        here = [cell for cell in cells if cell.nbytes == nbytes]
        fastest = min(here, key=lambda cell: cell.measured_s)
        predicted = min(here, key=lambda cell: cell.simulated_s)
        behind = predicted.measured_s / fastest.measured_s
        winners.append(Winner(nbytes, fastest.strategy, predicted.strategy, behind))
    return winners


def table(cells: Sequence[Cell], winners: Sequence[Winner]) -> str:
    """Cells, then winners."""
    lines = [f"{'':24}{'':>9}{'measured':>12}{'simulated':>12}{'error':>9}"]
    for cell in cells:
        times = f"{cell.measured_s * 1e3:9.1f} ms{cell.simulated_s * 1e3:9.1f} ms"
        lines.append(f"{cell.strategy:24}{show_size(cell.nbytes):>9}{times}{cell.error:+9.1%}")
    lines += ["", f"{'fastest at':>12}  {'measured':24}{'predicted':24}which took"]
    lines += [
        f"{show_size(each.nbytes):>12}  {each.measured:24}{each.predicted:24}{each.behind:.3f} times as long"
        for each in winners
    ]
    return "\n".join(lines)


def validated(path: Path, latency_s: float) -> tuple[list[Cell], list[Winner], dict[str, Any]]:
    """Compare one record; cells, winners, and what was assumed."""
    record = json.loads(path.read_text("utf-8"))
    # of the form module:function are strategies that were made on the bed, from what could be measured there
    record["figures"] = [figure for figure in record["figures"] if ":" not in figure["strategy"]]
    free = bed_of(record, latency_s)
    overhead_s, copy_s_per_byte = processor_costs(record, simulated(record, free))
    local = Local(overhead_s=overhead_s, copy=1 / copy_s_per_byte if copy_s_per_byte else None)
    network = SimulatedNetwork(
        hosts=free.hosts, local=local, efficiency=free.efficiency, cpus=free.cpus, burst_nbytes=free.burst_nbytes
    )
    cells = cells_of(record, simulated(record, network))
    constants = {"latency_s": latency_s, "overhead_s": overhead_s, "copy_bytes_per_s": local.copy}
    machine = {name: record["machine"].get(name) for name in ("commit", "cores", "load_average_before")}
    return cells, winners_of(cells), {"record": path.name, **machine, **constants}


@click.command(help=__doc__ and __doc__.split("\n\n")[0])
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--latency", metavar="TIME", help="One way between two hosts, as in 40us; measured by default.")
@click.option("--output", type=click.Path(path_type=Path), help="Where the record goes.")
def main(records: tuple[Path, ...], latency: str | None, output: Path | None) -> None:
    """Compare, print, record."""
    latency_s = one_way_s() if latency is None else parse_time_s(latency)
    cells: list[Cell] = []
    winners: list[Winner] = []
    assumed: list[dict[str, Any]] = []
    for path in records:
        found, best, constants = validated(path, latency_s)
        print(f"{path.name}: {', '.join(f'{name} {value}' for name, value in constants.items())}")
        print(table(found, best), end="\n\n")
        cells, winners, assumed = [*cells, *found], [*winners, *best], [*assumed, constants]
    error = statistics.median(abs(cell.error) for cell in cells)
    right = sum(winner.is_right for winner in winners)
    reached = error <= MAX_ERROR and right >= MIN_WINNERS * len(winners)
    print(f"median error {error:.1%} of {len(cells)} cells; {right} of {len(winners)} winners right")
    path = output or ROOT / f"bench/results/simulator-{datetime.now(UTC):%Y-%m-%d}.json"
    verdict = {"median_error": round(error, 4), "winners_right": right, "winners": len(winners), "reached": reached}
    said = [asdict(cell) | {"error": round(cell.error, 4)} for cell in cells]
    write(
        {"format": 1, "assumed": assumed, "verdict": verdict, "cells": said, "winners": list(map(asdict, winners))},
        path,
    )
    print(f"written: {path}", file=sys.stderr)
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main(prog_name="python -m bench.validate")
