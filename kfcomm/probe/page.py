"""HTML page of a probe: both matrices as heat maps, and the words of the report.

Importing this module needs matplotlib. Nothing on the page depends on when it was drawn.
"""

from __future__ import annotations

from html import escape
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from kfcomm.common.drawing import STYLE, as_svg
from kfcomm.common.html import Section, document, quiet_html, table_html
from kfcomm.probe.record import Matrix, Probe
from kfcomm.probe.report import cell, findings, forecasts, summary, tables, unit_of

_MOST_CELLS: Final = 16
"""Ranks up to which each cell holds its figure."""
_NOTE = (
    "Latencies are half of the shortest round trip, bandwidths those of the quickest message; each pair of ranks "
    "measured while no other used the ports of its hosts. The bound is that of the ports. 1 GB is 10⁹ bytes."
)


class _Head(NamedTuple):
    title: str
    is_word: bool = False
    unit: str = ""


_FORECASTS = (_Head("strategy", is_word=True), _Head("seconds"), _Head("bound / seconds"))


def page(probe: Probe) -> str:
    """The page."""
    stands_out = "\n".join(f"<p>{escape(line)}</p>" for line in findings(probe))
    maps = []
    for title, matrix, units in tables(probe):
        scale, unit = unit_of(matrix, units)
        drawn = heat_map(matrix / scale, unit, probe.layout.hosts, is_good=title == "bandwidth")
        maps.append(Section(f"{title}, {unit}", drawn, is_beside=True))
    rows = [(one.strategy, f"{one.seconds:.4g}", f"{one.of_bound:.0%}") for one in forecasts(probe)]
    predicted = Section("all_reduce of 32 MiB, by the cost model", table_html(_FORECASTS, rows) + quiet_html(_NOTE))
    return document("kfcomm probe", [summary(probe)], "", [Section("What stands out", stands_out), *maps, predicted])


def heat_map(matrix: Matrix, unit: str, hosts: tuple[int, ...], *, is_good: bool) -> str:
    """The matrix as an SVG element: dark is slow. ``is_good``: of large values."""
    size = len(matrix)
    shown = np.ma.masked_array(matrix, np.eye(size, dtype=bool))
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(5.4, 4.6), layout="constrained")
        axes = figure.subplots()
        if size > 1:
            low, high = float(shown.min()), float(shown.max())
            low = min(low, high / 2) or 1e-12  # noise alone shall not look like a difference
            norm = LogNorm(low, high)
            image = axes.imshow(shown, cmap="viridis" if is_good else "viridis_r", norm=norm)
            bar = figure.colorbar(image, ax=axes, shrink=0.85, label=unit)
            bar.ax.yaxis.set_major_formatter(ScalarFormatter())
            bar.ax.yaxis.set_minor_formatter(ScalarFormatter() if high < 10 * low else NullFormatter())
        else:
            axes.imshow(shown)
        if size <= _MOST_CELLS:
            _write_cells(axes, shown, image.norm if size > 1 else None, is_good=is_good)
        _draw_hosts(axes, hosts)
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=16, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(-0.5, size - 0.5)
        axes.set_ylim(size - 0.5, -0.5)
        return as_svg(figure, f"map {unit}")


def _write_cells(axes: Any, shown: Any, norm: Any, *, is_good: bool) -> None:
    size = len(shown)
    for a in range(size):
        for b in range(size):
            if a != b:
                bright = float(norm(shown[a, b])) > 0.55
                axes.text(
                    b, a, cell(float(shown[a, b])), ha="center", va="center", fontsize=9 if size <= 8 else 7,
                    color="#1d2126" if bright == is_good else "white",
                )  # fmt: skip


def _draw_hosts(axes: Any, hosts: tuple[int, ...]) -> None:
    """Lines between ranks that are neighbours by number, and on different hosts."""
    if len(set(hosts)) in (1, len(hosts)):
        return
    for rank in range(1, len(hosts)):
        if hosts[rank] != hosts[rank - 1]:
            for line in (axes.axhline, axes.axvline):
                line(rank - 0.5, color="white", linewidth=2.5)
