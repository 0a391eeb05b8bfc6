"""The page of ``kfcomm bench topologies``: a heat map of the strategies at each size, and the advice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from kfcomm.bench.drawing import STYLE, as_svg
from kfcomm.bench.grid import Grid
from kfcomm.bench.html import Section, document, preformatted_html, quiet_html, table_html
from kfcomm.bench.page import surroundings
from kfcomm.bench.simulated_page import drawings as simulated_drawings
from kfcomm.bench.topologies import LEGEND, Findings, times
from kfcomm.common.sizes import show_size

if TYPE_CHECKING:
    from kfcomm.bench.topologies import MeasuredTopologies, SimulatedTopologies

_COLORS = LinearSegmentedColormap.from_list("slower", ("#1f7a4d", "#9fd3a9", "#f6e7a8", "#eab08a", "#b8566b"))
_MOST = 8.0
_TICKS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_NOTE = (
    "A cell has the time of one all_reduce; its colour says how many times as long it is as the fastest at this size. "
    "The fastest is framed, with bold digits."
)


def measured_page(report: MeasuredTopologies) -> str:
    """The page of a measurement with at least one result.

    Raises:
        ImportError: matplotlib is not installed.
    """
    data = report.as_json()
    sections = [*_sections(report.findings()), *surroundings(data)]
    title = f"kfcomm bench topologies: {data['ranks']} ranks, {data['time']}"
    return document(title, [report.world()], report.settings(), sections)


def simulated_page(report: SimulatedTopologies) -> str:
    """The page of a simulation with at least one result.

    Raises:
        ImportError: matplotlib is not installed.
    """
    data = report.as_json()
    curves = [Section(drawing.title, drawing.svg) for drawing in simulated_drawings(report.results)]
    network = Section("Network", preformatted_html(json.dumps(data["network"], indent=1)))
    sections = [*_sections(report.findings()), *curves, Section("Simulations", table_html(report.table())), network]
    return document("kfcomm bench topologies, simulated", [report.world()], "", sections)


def _sections(findings: Findings) -> Iterator[Section]:
    advice, *others = findings.lines()
    words = f"<p><strong>{escape(advice)}</strong></p>" + "".join(map(quiet_html, others))
    yield Section("Advice", words)
    yield Section("Fastest strategy by size", heat_map(findings.grid) + quiet_html(_NOTE))
    yield Section("Times", table_html(times(findings.grid)) + quiet_html(LEGEND))


def heat_map(grid: Grid) -> str:
    """An SVG element: strategies by sizes, coloured by how much longer they take than the fastest."""
    rows, columns = len(grid.strategies), len(grid.sizes)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.5, 3.2 + 0.82 * columns), 1.6 + 0.44 * rows), layout="constrained")
        axes = figure.subplots()
        slower = [[grid.slower(strategy, nbytes) for nbytes in grid.sizes] for strategy in grid.strategies]
        mesh = axes.pcolormesh(
            slower, cmap=_COLORS, norm=LogNorm(1, _MOST, clip=True), edgecolors="#ffffff", linewidth=1.5
        )
        for row, strategy in enumerate(grid.strategies):
            for column, nbytes in enumerate(grid.sizes):
                wins = strategy == grid.winner(nbytes)
                axes.text(
                    column + 0.5, row + 0.5, _time(grid.seconds[strategy, nbytes]), ha="center", va="center",
                    fontsize=9.5, color=_ink(slower[row][column]),
                    fontweight="bold" if wins else "normal",
                )  # fmt: skip
                if wins:
                    frame = Rectangle((column + 0.03, row + 0.05), 0.94, 0.9, fill=False, edgecolor="#0b2b1b", lw=2)
                    axes.add_patch(frame)
        axes.set_xticks([at + 0.5 for at in range(columns)], [show_size(nbytes) for nbytes in grid.sizes])
        axes.set_yticks([at + 0.5 for at in range(rows)], grid.strategies)
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("size of the message")
        axes.set_ylabel("strategy")
        bar = figure.colorbar(mesh, ax=axes, pad=0.015, aspect=max(8, 4 * rows), label="times as long as the fastest")
        bar.ax.yaxis.set_major_locator(FixedLocator(_TICKS))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.ax.set_yticklabels([f"{tick:g}×" for tick in _TICKS[:-1]] + ["8× or more"])
        bar.outline.set_visible(False)
        return as_svg(figure, "winners")


def _ink(slower: float) -> str:
    """A colour that can be read on the cell's."""
    red, green, blue, _ = _COLORS(LogNorm(1, _MOST, clip=True)(slower))
    return "#1d2126" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.56 else "#ffffff"


def _time(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            number = seconds / scale
            return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f} {unit}"
    return ""
