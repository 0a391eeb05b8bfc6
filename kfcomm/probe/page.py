"""A probe as one HTML page that needs nothing else: both matrices as heat maps, and the words of the report.

Needs matplotlib, which is used without its global state. Nothing on the page depends on when it was drawn.
"""

from __future__ import annotations

import io
import re
from html import escape
from string import Template
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from kfcomm.probe.record import Matrix, Probe
from kfcomm.probe.report import cell, findings, forecasts, summary, tables, unit_of

_MOST_CELLS: Final = 16
"""Ranks up to which each cell holds its figure."""
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10.0}

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kfcomm probe: $summary</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2126; background: #f6f7f9; margin: 0; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; }
.maps { display: flex; flex-wrap: wrap; gap: 0 1rem; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; padding: 1rem; margin: 1rem 0;
          overflow-x: auto; }
.maps section { flex: 1 1 26rem; margin: 1rem 0 0; }
svg { max-width: 100%; height: auto; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 1px solid #b9c0c8; font-weight: 600; }
tbody tr:nth-child(even) { background: #f6f7f9; }
.quiet { color: #5b636d; }
</style>
</head>
<body>
<main>
<h1>kfcomm probe</h1>
<p>$summary</p>
<section><h2>What stands out</h2>
$findings
</section>
<div class="maps">
$maps
</div>
<section><h2>all_reduce of 32 MiB, by the cost model</h2>
<table><thead><tr><th>strategy</th><th>seconds</th><th>bound / seconds</th></tr></thead>
<tbody>
$forecasts
</tbody></table>
<p class="quiet">Latencies are half of the shortest round trip, bandwidths those of the quickest message; each pair of
ranks measured while no other used the ports of its hosts. The bound is that of the ports. 1 GB is 10⁹ bytes.</p>
</section>
</main>
</body>
</html>
""")


def page(probe: Probe) -> str:
    """The page.

    Raises:
        ImportError: matplotlib is not installed (on import of this module).
    """
    maps = []
    for title, matrix, units in tables(probe):
        scale, unit = unit_of(matrix, units)
        drawn = heat_map(matrix / scale, unit, probe.layout.hosts, is_good=title == "bandwidth")
        maps.append(f"<section><h2>{escape(title)}, {escape(unit)}</h2>\n{drawn}</section>")
    return _PAGE.substitute(
        summary=escape(summary(probe)),
        findings="\n".join(f"<p>{escape(line)}</p>" for line in findings(probe)),
        maps="\n".join(maps),
        forecasts="\n".join(
            f"<tr><td>{escape(one.strategy)}</td><td>{one.seconds:.4g}</td><td>{one.of_bound:.0%}</td></tr>"
            for one in forecasts(probe)
        ),
    )


def heat_map(matrix: Matrix, unit: str, hosts: tuple[int, ...], *, is_good: bool) -> str:
    """The matrix as an SVG element: dark is slow. ``is_good``: of large values."""
    size = len(matrix)
    shown = np.ma.masked_array(matrix, np.eye(size, dtype=bool))
    with mpl.rc_context(_STYLE):
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
        return _svg(figure, unit)


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


def _svg(figure: Figure, salt: str) -> str:
    """The figure as an element whose ids differ from those of others on the page."""
    text = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    element = text.getvalue()
    element = re.sub(r"<metadata>.*?</metadata>", "", element[element.index("<svg") :], flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", f"map {salt}")
    return re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", element)
