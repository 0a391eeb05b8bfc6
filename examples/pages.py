"""Pages of the examples: panels over one axis of seconds.

Needs matplotlib, as ``kfcomm bench --html`` does, and has its looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfcomm.bench.report import ReportColumn
from kfcomm.common.html import ReportPage, table_html


@dataclass
class Panels:
    """Axes one above the other, by name, and what is drawn into them as an SVG element once that is done."""

    axes: dict[str, Any] = field(default_factory=dict)
    svg: str = ""


@contextmanager
def panels(heights: Mapping[str, float], *, salt: str) -> Iterator[Panels]:
    """Draw into them inside the block.

    Args:
        heights: of each panel, in inches, by the label of its axis.
        salt: names the figure.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from kfcomm.common.drawing import STYLE, as_svg

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, sum(heights.values()) + 0.6), layout="constrained")
        drawn = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=list(heights.values()))[:, 0]
        found = Panels(dict(zip(heights, drawn, strict=True)))
        for label, axes in found.axes.items():
            axes.set_ylabel(label)
        yield found
        drawn[-1].set_xlabel("seconds")
        figure.align_ylabels()
        found.svg = as_svg(figure, salt)


def write_page(path: Path, page: ReportPage) -> None:
    """Write a page, which needs no other file."""
    path.write_text(page.as_html(), encoding="utf-8")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As HTML, of words."""
    return table_html([ReportColumn(head, "", str, is_word=True) for head in heads], rows)
