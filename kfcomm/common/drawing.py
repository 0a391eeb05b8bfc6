"""Matplotlib figures as SVG elements of a page: style, axes and export.

Uses matplotlib without its global state: no window, no ``pyplot``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from kfcomm.common.sizes import show_size

INK, FAINT, GRID, CARD = "#1d232b", "#626b77", "#e3e6ea", "#fefefe"
"""Colours of the page's light theme; `as_svg` replaces them, and `COLORS`, by those of the reader's theme."""
STYLE: dict[Any, Any] = {
    # text stays text: small, searchable, in the reader's own font
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "figure.facecolor": "none",  # that of the page, light or dark
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}
# A palette for colour-blind readers (Okabe and Ito 2008); more series repeat it with other marks.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b98300", "#56b4e9", "#6b5ca5")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LINE_WIDTH = 1.6
_THEME = {
    **{color: f"var(--s{number})" for number, color in enumerate(COLORS)},
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    GRID: "var(--grid)",
    CARD: "var(--card)",
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure.

    Attributes:
        title: its heading.
        svg: the element.
        results: what it shows.
    """

    title: str
    svg: str
    results: Sequence[Any] = ()


def size_axis(axes: Any, sizes: Sequence[int]) -> None:
    """Logarithmic axes, the x axis of these sizes in bytes."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_size(round(value))))
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("size of the message")
    if len(sizes) == 1:
        axes.set_xlim(sizes[0] / 2, sizes[0] * 2)


def mark_axis(axis: Any, unit: str) -> None:
    """Ticks on a logarithmic axis: some however short it is, with 1, 2, 5 in each decade if there are few."""
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    below, above = [tick for tick in ticks if tick <= low], [tick for tick in ticks if tick >= high]
    axis.set_view_interval(max(below, default=low), min(above, default=high), ignore=True)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(EngFormatter(unit=unit))
    axis.set_minor_locator(NullLocator())


def as_svg(figure: Figure, salt: str) -> str:
    """The figure as an element: ids that differ between figures, no date, so that equal data gives equal bytes."""
    text = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]
    prefix = re.sub(r"\W+", "-", salt)
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", element)
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda found: _THEME.get(found[0], found[0]), element)
