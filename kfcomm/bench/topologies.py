"""The fastest strategy at each size, measured or simulated, with advice; and the report of any simulations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Self

from kfcomm.bench.report import Report, ReportColumn, ReportTable, show_number
from kfcomm.common.sizes import show_rate, show_seconds, show_size
from kfcomm.simulate import Result, SimulatedNetwork
from kfcomm.strategies.plugins import build
from kfcomm.types import Layout

TOLERANCE = 1.05
"""A strategy that is slower by up to this factor counts as the fastest, if that saves a rule."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Times of every strategy at every size."""

    strategies: tuple[str, ...]  # their names, in order
    sizes: tuple[int, ...]  # bytes, ascending
    seconds: Mapping[tuple[str, int], float]  # by strategy and size

    @classmethod
    def of(cls, cells: Iterable[tuple[str, int, float]]) -> Self:
        """The grid of ``(strategy, nbytes, seconds)``; sizes at which not all strategies were timed are left out."""
        seconds = {(strategy, nbytes): time_s for strategy, nbytes, time_s in cells}
        strategies = tuple(dict.fromkeys(strategy for strategy, _ in seconds))
        sizes = sorted({nbytes for _, nbytes in seconds})
        whole = (nbytes for nbytes in sizes if all((strategy, nbytes) in seconds for strategy in strategies))
        return cls(strategies, tuple(whole), seconds)

    def ranking(self, nbytes: int) -> list[str]:
        """The strategies, the fastest first."""
        return sorted(self.strategies, key=lambda strategy: self.seconds[strategy, nbytes])

    def winner(self, nbytes: int) -> str:
        """The fastest strategy."""
        return self.ranking(nbytes)[0]

    def slower(self, strategy: str, nbytes: int) -> float:
        """How many times as long as the fastest a strategy takes."""
        return self.seconds[strategy, nbytes] / self.seconds[self.winner(nbytes), nbytes]

    def lead(self, strategy: str, nbytes: int) -> float:
        """How many times as long as this strategy the fastest of the others takes; 1 without others."""
        others = [self.seconds[other, nbytes] for other in self.strategies if other != strategy]
        return min(others, default=self.seconds[strategy, nbytes]) / self.seconds[strategy, nbytes]


@dataclass(frozen=True, slots=True)
class TopologyRule:
    """Strategy for a range of sizes."""

    sizes: tuple[int, ...]  # those of the grid for which it holds, ascending
    upto: int | None  # largest size in bytes; None for no limit
    strategy: str
    lead: float  # how many times as long the fastest of the others takes, the geometric mean over ``sizes``

    def describe(self) -> str:
        """The strategy, and how much it is worth."""
        if len(self.sizes) == 0 or self.lead == 1:
            return self.strategy
        if self.lead < TOLERANCE:
            return f"{self.strategy} (about as fast as the next)"
        return f"{self.strategy} ({self.lead:.{1 if self.lead < 10 else 0}f}× the next)"


@dataclass(frozen=True, slots=True)
class Advice:
    """Strategies to set, by size."""

    rules: tuple[TopologyRule, ...]  # with ascending bounds; the last one is unbounded

    @classmethod
    def of(cls, grid: Grid) -> Self:
        """The fewest rules that stay within `TOLERANCE` of the fastest at all sizes."""
        rules: list[TopologyRule] = []
        left = grid.sizes
        while left:
            # The longest stretch each time gives the fewest rules.
            reach = {strategy: _reach(grid, strategy, left) for strategy in grid.strategies}
            most = max(reach.values())
            longest = [strategy for strategy in grid.strategies if reach[strategy] == most]
            best = min(longest, key=lambda strategy: _mean(grid.slower(strategy, nbytes) for nbytes in left[:most]))
            taken, left = left[:most], left[most:]
            lead = _mean(grid.lead(best, nbytes) for nbytes in taken)
            rules.append(TopologyRule(taken, taken[-1] if left else None, best, lead))
        return cls(tuple(rules))

    def in_words(self) -> str:
        """A sentence."""
        *bounded, last = self.rules
        parts = [f"up to {show_size(rule.upto)}: {rule.describe()}" for rule in bounded if rule.upto is not None]
        return "; ".join([*parts, f"{'above' if parts else 'at all sizes'}: {last.describe()}"])

    def as_setting(self) -> str:
        """The value of ``strategy``: a name, or rules such as ``<=64KiB: star, else: ring``."""
        *bounded, last = self.rules
        if not bounded:
            return last.strategy
        rules = [f"<={_exact(rule.upto)}: {rule.strategy}" for rule in bounded if rule.upto is not None]
        return ", ".join([*rules, f"else: {last.strategy}"])

    def as_json(self) -> dict[str, Any]:
        """The advice as JSON."""
        rules = [
            {"upto_nbytes": rule.upto, "strategy": rule.strategy, "lead": round(rule.lead, 4)} for rule in self.rules
        ]
        return {"words": self.in_words(), "setting": self.as_setting(), "rules": rules}


def distinct(names: Sequence[str], layout: Layout) -> dict[str, tuple[str, ...]]:
    """The strategies whose graphs differ for this layout, each with the names of others that have the same ones.

    Raises:
        ConfigError: a name is unknown.
    """
    found: dict[bytes, list[str]] = {}
    for name in names:
        found.setdefault(build(name, layout).digest, []).append(name)
    return {first: tuple(others) for first, *others in found.values()}


def _reach(grid: Grid, strategy: str, sizes: Sequence[int]) -> int:
    """For how many sizes, from the first, a strategy is as good as the fastest."""
    good = [grid.slower(strategy, nbytes) <= TOLERANCE for nbytes in sizes]
    return good.index(False) if False in good else len(good)


def _mean(values: Iterable[float]) -> float:
    # Geometric, since the values are ratios.
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _exact(nbytes: int) -> str:
    """A size without loss and without blanks."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


_FORMAT = 1

SIMULATED_COLUMNS: Final[tuple[ReportColumn[Result], ...]] = (
    ReportColumn(
        "strategy", "", lambda one: one.strategy if one.graphs == one.strategy else f"{one.strategy}: {one.graphs}",
        is_word=True,
    ),
    ReportColumn("hosts", "", lambda result: str(result.num_hosts)),
    ReportColumn("ranks", "", lambda result: str(result.size)),
    ReportColumn("size", "", lambda result: show_size(result.nbytes), always=True),
    ReportColumn("time", "ms", lambda result: show_number(result.seconds * 1e3), is_setting=False,
                 shown=lambda result: show_seconds(result.seconds)),
    ReportColumn("algbw", "GB/s", lambda result: show_number(result.algbw), is_setting=False,
                 shown=lambda result: show_rate(1e9 * result.algbw)),
    ReportColumn("busbw", "GB/s", lambda result: show_number(result.busbw), is_setting=False,
                 shown=lambda result: show_rate(1e9 * result.busbw)),
    ReportColumn("bound", "ms", lambda result: show_number(result.bound_s * 1e3), is_setting=False,
                 shown=lambda result: show_seconds(result.bound_s)),
    ReportColumn("bound/time", "%", lambda result: f"{100 * result.bound_s / result.seconds:.1f}", is_setting=False),
    ReportColumn("busiest port", "", lambda result: result.busiest.port, is_setting=False, is_word=True),
    ReportColumn("messages", "", lambda result: str(result.messages), is_setting=False),
    ReportColumn("events", "", lambda result: str(result.events), is_setting=False),
)  # fmt: skip


@dataclass(slots=True)
class Simulations:
    """Report of simulations; implements ``report.Shown``."""

    network: SimulatedNetwork  # the simulated one; hosts that it does not list are like its default
    source: str  # where it is described
    dtype: str = "float32"  # of the elements
    verb: str = "all_reduce"
    results: list[Result] = field(default_factory=list)  # so far

    def title(self) -> str:
        """One line on what was simulated."""
        return f"simulated {self.verb} of {self.dtype}; network: {self.source}"

    def as_text(self) -> str:
        """Title and table; nothing without results."""
        return f"{self.title()}\n{self.table().as_text()}\n" if self.results else ""

    def table(self) -> ReportTable:
        """The table of at least one result."""
        return ReportTable.of(self.results, SIMULATED_COLUMNS)

    def as_json(self) -> dict[str, Any]:
        """Everything that the results depend on, and the results."""
        return {
            "format": _FORMAT,
            "network": asdict(self.network),
            "source": self.source,
            "dtype": self.dtype,
            "verb": self.verb,
            "results": [result.as_json() for result in self.results],
        }

    def as_html(self) -> str:
        """A page with plots over size and over ranks, and the table."""
        from kfcomm.bench import pages  # imports matplotlib

        return pages.simulated(self)


def worlds_of(results: Sequence[Result]) -> tuple[tuple[int, int], ...]:
    """``(hosts, ranks)`` of each world that was simulated, in order."""
    return tuple(dict.fromkeys((result.num_hosts, result.size) for result in results))


_SHADES = ((1.0, "█"), (1.25, "▓"), (2.0, "▒"), (4.0, "░"))
_SLOWEST = "·"
LEGEND = "█ fastest, ▓ up to 1.25 times as long, ▒ up to 2, ░ up to 4, · longer"

Twins = dict[str, tuple[str, ...]]
"""By strategy: others that have the same graphs."""


@dataclass(frozen=True, slots=True)
class Findings:
    """A grid and the advice that follows from it."""

    grid: Grid  # at least one strategy at one size
    twins: Twins  # strategies with the same graphs, by strategy; empty tuples for those without
    left_out: str = ""  # strategies that were not timed, and why

    @property
    def advice(self) -> Advice:
        """Strategies to set."""
        return Advice.of(self.grid)

    def as_text(self) -> str:
        """The times, each with a shade; then the advice."""
        return "\n".join([times(self.grid).as_text(), LEGEND, "", "Advice: " + "\n".join(self.lines()), ""])

    def headline(self) -> str:
        """The advice, as a sentence; of many rules the first and the last."""
        first, *between, last = self.advice.rules * (1 + (len(self.advice.rules) == 1))
        if len(between) < 2 or first.upto is None or between[-1].upto is None:
            return f"Fastest all_reduce {self.advice.in_words()}."
        return (
            f"Fastest all_reduce up to {show_size(first.upto)}: {first.describe()}; above "
            f"{show_size(between[-1].upto)}: {last.describe()}; others between."
        )

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


def times(grid: Grid) -> ReportTable:
    """A line for each size, a column for each strategy; the shade says how far it is from the fastest."""
    columns: list[ReportColumn[int]] = [ReportColumn("size", "", show_size, always=True)]
    columns += [
        ReportColumn(f"{name}  ", "µs  ", partial(_cell, grid, name), is_setting=False) for name in grid.strategies
    ]
    return ReportTable.of(grid.sizes, columns)


def _cell(grid: Grid, strategy: str, nbytes: int) -> str:
    slower = grid.slower(strategy, nbytes)
    shade = next((sign for most, sign in _SHADES if slower <= most), _SLOWEST)
    return f"{show_number(grid.seconds[strategy, nbytes] * 1e6)} {shade}"


@dataclass(slots=True)
class MeasuredTopologies(Report):
    """Topologies among real ranks."""

    twins: Twins = field(default_factory=dict)  # as in `Findings`

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
    """Topologies on a simulated network, with one world."""

    twins: Twins = field(default_factory=dict)  # as in `Findings`
    left_out: Sequence[str] = ()  # strategies that were not simulated

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
