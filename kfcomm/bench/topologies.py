"""Reports of ``kfcomm bench topologies``: the fastest strategy at each size, measured or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kfcomm.bench.grid import Advice, Grid
from kfcomm.bench.report import Report
from kfcomm.bench.simulated import Simulations
from kfcomm.bench.table import Column, Table, show_number
from kfcomm.common.sizes import show_size

_SHADES = ((1.0, "█"), (1.25, "▓"), (2.0, "▒"), (4.0, "░"))
_SLOWEST = "·"
LEGEND = "█ fastest, ▓ up to 1.25 times as long, ▒ up to 2, ░ up to 4, · longer"

Twins = dict[str, tuple[str, ...]]
"""By strategy: others that have the same graphs."""


@dataclass(frozen=True, slots=True)
class Findings:
    """A grid and the advice that follows from it.

    Attributes:
        grid: at least one strategy at one size.
        twins: strategies with the same graphs, by strategy; empty tuples for those without.
        left_out: strategies that were not timed, and why.
    """

    grid: Grid
    twins: Twins
    left_out: str = ""

    @property
    def advice(self) -> Advice:
        """Strategies to set."""
        return Advice.of(self.grid)

    def as_text(self) -> str:
        """The times, each with a shade; then the advice."""
        return "\n".join([times(self.grid).as_text(), LEGEND, "", "Advice: " + "\n".join(self.lines()), ""])

    def lines(self) -> list[str]:
        """Advice, setting and notes, a line each."""
        advice = self.advice
        lines = [f"{advice.in_words()}.", f"As setting: --strategy '{advice.as_setting()}'"]
        for name, others in self.twins.items():
            if others:
                lines.append(f"Of the same graphs as {name} here: {', '.join(others)}.")
        return [*lines, *([self.left_out] if self.left_out else [])]

    def as_json(self) -> dict[str, Any]:
        """Winners and advice."""
        winners = []
        for nbytes in self.grid.sizes:
            winner = self.grid.winner(nbytes)
            seconds, lead = self.grid.seconds[winner, nbytes], self.grid.lead(winner, nbytes)
            winners.append({"nbytes": nbytes, "strategy": winner, "seconds": seconds, "lead": lead})
        same = {name: list(others) for name, others in self.twins.items() if others}
        return {"winners": winners, "advice": self.advice.as_json(), "same_graphs": same}


def times(grid: Grid) -> Table:
    """A line for each size, a column for each strategy; the shade says how far it is from the fastest."""
    columns: list[Column[int]] = [Column("size", "", show_size, always=True)]
    columns += [Column(f"{name}  ", "µs  ", partial(_cell, grid, name), is_setting=False) for name in grid.strategies]
    return Table.of(grid.sizes, columns)


def _cell(grid: Grid, strategy: str, nbytes: int) -> str:
    slower = grid.slower(strategy, nbytes)
    shade = next((sign for most, sign in _SHADES if slower <= most), _SLOWEST)
    return f"{show_number(grid.seconds[strategy, nbytes] * 1e6)} {shade}"


@dataclass(slots=True)
class MeasuredTopologies(Report):
    """Topologies among real ranks.

    Attributes:
        twins: as in `Findings`.
    """

    twins: Twins = field(default_factory=dict)

    def findings(self) -> Findings:
        """Findings of at least one result; times are medians."""
        cells = ((result.case.strategy, result.case.nbytes, result.p50_s) for result in self.results)
        return Findings(Grid.of(cells), self.twins)

    def settings(self) -> str:
        """Settings that all results share."""
        suite = self.suite
        return f"all_reduce, op {suite.op}, dtype {suite.dtypes[0]}, transport {suite.transports[0]}: p50"

    def as_text(self) -> str:
        """World, times and advice; empty without results."""
        if not self.results:
            return ""
        return f"{self.world()}\n{self.settings()}\n{self.findings().as_text()}"

    def as_json(self) -> dict[str, Any]:
        """As that of any benchmark, with winners and advice."""
        # super() without arguments does not work in a dataclass with slots.
        return {**Report.as_json(self), **self.findings().as_json()}

    def as_html(self) -> str:
        """The page."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.measured_topologies(self)


@dataclass(slots=True)
class SimulatedTopologies(Simulations):
    """Topologies on a simulated network, with one world.

    Attributes:
        twins, left_out: as in `Findings`.
    """

    twins: Twins = field(default_factory=dict)
    left_out: Sequence[str] = ()

    def findings(self) -> Findings:
        """Findings of at least one result."""
        cells = ((result.strategy, result.nbytes, result.seconds) for result in self.results)
        reason = f"Left out, since they have a graph pair for each rank: {', '.join(self.left_out)}."
        return Findings(Grid.of(cells), self.twins, reason if self.left_out else "")

    def world(self) -> str:
        """One line on the simulated world."""
        result = self.results[0]
        hosts = f"{result.num_hosts} host{'s' if result.num_hosts > 1 else ''}"
        return f"{result.size} ranks on {hosts}, {self.title()}"

    def as_text(self) -> str:
        """World, times and advice; empty without results."""
        return f"{self.world()}\n{self.findings().as_text()}" if self.results else ""

    def as_json(self) -> dict[str, Any]:
        """As that of any simulation, with winners and advice."""
        return {**Simulations.as_json(self), **self.findings().as_json()}

    def as_html(self) -> str:
        """The page."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.simulated_topologies(self)
