"""Self-contained HTML report pages: one template for all commands and examples that draw.

A page has a headline (the result in one sentence), charts with their tables beside them, and its data behind a link. It
loads nothing from elsewhere: it must open from a file, and on a cluster without network. Charts and heat maps have the
colours of the template, ``report.html``, which has a dark theme and a style for paper.

Arguments called text are escaped here; those called HTML are inserted as they are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, Final, Protocol

from kfcomm.common.version import __version__

_TEMPLATE = Path(__file__).with_name("report.html")


class Head(Protocol):
    """Head of a column of a table."""

    @property
    def title(self) -> str:
        """Text."""

    @property
    def unit(self) -> str:
        """Unit of its numbers; empty for words."""

    @property
    def is_word(self) -> bool:
        """Whether its cells are words, which are aligned to the left."""


@dataclass(frozen=True, slots=True)
class Section:
    """A box with a heading.

    Attributes:
        title: text.
        content: HTML.
        numbers: HTML beside the content, or below it if the page is narrow.
        is_beside: it stands beside the next one of this kind, if the page is wide enough.
    """

    title: str
    content: str
    numbers: str = ""
    is_beside: bool = False

    def as_html(self) -> str:
        """The element."""
        inside = self.content
        if self.numbers:
            beside = f'<div class="figure">{self.content}</div>\n<div class="numbers">{self.numbers}</div>'
            inside = f'<div class="beside">{beside}</div>'
        return f"<section><h2>{escape(self.title)}</h2>\n{inside}\n</section>"


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A page.

    Attributes:
        kind: text: what made it, such as ``kfcomm bench``.
        headline: text: the result in one sentence.
        lead: text: lines below it.
        sections: in order.
        quiet: text: a line in the background, below ``lead``.
        data: what the page shows, as JSON, to be downloaded; None for none.
    """

    kind: str
    headline: str
    lead: Sequence[str]
    sections: Sequence[Section]
    quiet: str = ""
    data: Any = None

    def as_html(self) -> str:
        """The document."""
        lines = [*(f"<p>{escape(line)}</p>" for line in self.lead), *([quiet_html(self.quiet)] if self.quiet else [])]
        boxes = []
        for is_beside, group in groupby(self.sections, lambda section: section.is_beside):
            inside = "\n".join(section.as_html() for section in group)
            boxes.append(f'<div class="wide">{inside}</div>' if is_beside else inside)
        kind, headline = escape(self.kind), escape(self.headline)
        return Template(_TEMPLATE.read_text("utf-8")).substitute(
            title=f"{kind}: {headline}", kind=kind, headline=headline, lead="\n".join(lines),
            sections="\n".join(boxes), foot=f"<span>kfcomm {__version__}</span>{self._download()}",
        )  # fmt: skip

    def _download(self) -> str:
        if self.data is None:
            return ""
        text = base64.b64encode(json.dumps(self.data).encode()).decode()
        name = f"{self.kind.replace(' ', '-')}.json"
        return f'<a download="{escape(name)}" href="data:application/json;base64,{text}">Download the data (JSON)</a>'


def table_html(heads: Sequence[Head], rows: Iterable[Sequence[str]]) -> str:
    """A table of text."""
    kinds = [' class="word"' if head.is_word else "" for head in heads]
    shown = "".join(
        f"<th{kind}>{escape(head.title)}{f' <small>{escape(head.unit)}</small>' if head.unit else ''}</th>"
        for kind, head in zip(kinds, heads, strict=True)
    )
    lines = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"
        for cells in rows
    )
    return f"<table><thead><tr>{shown}</tr></thead><tbody>\n{lines}\n</tbody></table>"


def fields_html(fields: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""
    lines = "".join(
        f'<tr><th class="word">{escape(name)}</th><td class="word">{escape(str(value))}</td></tr>'
        for name, value in fields
    )
    return f'<table class="fields"><tbody>{lines}</tbody></table>'


def quiet_html(text: str) -> str:
    """A paragraph of text in the background."""
    return f'<p class="quiet">{escape(text)}</p>'


LEVELS: Final = 7
"""Colours of a heat map: level 0 is the best, `LEVELS` - 1 the worst."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """Cell of a heat map."""

    text: str
    level: int | None  # None for none
    is_best: bool = False  # it is framed


def chips_html(labels: Iterable[tuple[int, str]]) -> str:
    """A legend: levels, and what they mean."""
    chips = "".join(f'<span><i class="h{level}"></i>{escape(label)}</span>' for level, label in labels)
    return f'<div class="chips">{chips}</div>'


def heat_html(
    corner: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[HeatCell]]], breaks: Iterable[int] = ()
) -> str:
    """A table of coloured cells.

    Args:
        corner: text above the heads of the rows.
        columns: their heads, text; the last of several lines is a unit.
        rows: head and cells of each.
        breaks: rows and columns before which there is a gap.
    """
    gaps = set(breaks)
    heads = "".join(f"<th{_gap(at in gaps)}>{_lines(column)}</th>" for at, column in enumerate(columns))
    lines = []
    for at, (head, cells) in enumerate(rows):
        shown = "".join(_heat_cell(cell, number in gaps) for number, cell in enumerate(cells))
        lines.append(f'<tr{" class=new-row" * (at in gaps)}><th class="word">{escape(head)}</th>{shown}</tr>')
    head = f'<tr><th class="word"><small>{escape(corner)}</small></th>{heads}</tr>'
    return f'<div class="heat"><table><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table></div>'


def dense_html(levels: Sequence[Sequence[int | None]]) -> str:
    """A heat map without text, for many rows."""
    rects = []
    for y, row in enumerate(levels):
        x = 0
        # One element for each run: a map of many alike cells stays small.
        for level, run in groupby(row):
            width = len(list(run))
            if level is not None:
                rects.append(f'<rect class="h{level}" x="{x}" y="{y}" width="{width}" height="1"/>')
            x += width
    box = f'viewBox="0 0 {len(levels)} {len(levels)}" shape-rendering="crispEdges"'
    return f'<div class="heat"><svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(rects)}</svg></div>'


def _gap(is_new: bool) -> str:
    return ' class="new-column"' if is_new else ""


def _lines(text: str) -> str:
    *words, last = map(escape, text.split("\n"))
    return "<br>".join([*words, f"<small>{last}</small>"]) if words else last


def _heat_cell(cell: HeatCell, is_new_column: bool) -> str:
    names = [] if cell.level is None else [f"h{cell.level}"]
    names += ["best"] * cell.is_best + ["new-column"] * is_new_column
    return f'<td class="{" ".join(names)}">{escape(cell.text)}</td>'
