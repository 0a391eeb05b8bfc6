"""Self-contained HTML pages: frame, style, sections and tables.

Arguments called text are escaped here; those called HTML are inserted as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from string import Template
from typing import Protocol

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2126; background: #f6f7f9; margin: 0; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; padding: 1rem; margin: 1rem 0;
          overflow-x: auto; }
svg { max-width: 100%; height: auto; font-family: system-ui, sans-serif; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom: 1px solid #b9c0c8; }
th small { font-weight: 400; color: #5b636d; }
.word { text-align: left; }
td.word:last-child { white-space: normal; min-width: 14rem; }
tbody tr:nth-child(even) { background: #f6f7f9; }
.wide { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.wide section { flex: 1 1 26rem; margin: 1rem 0 0; }
.quiet { color: #5b636d; }
pre { white-space: pre-wrap; font-size: .85rem; margin: 0; }
@media (max-width: 44rem) { svg { max-width: none; width: 44rem; } }
@media (prefers-color-scheme: dark) {
  body { color: #dde1e6; background: #101214; }
  section { background: #191c20; border-color: #333940; }
  svg { filter: invert(.88) hue-rotate(180deg); }
  thead th { border-color: #4b535c; }
  th small, main > .wide { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.wide section { flex: 1 1 26rem; margin: 1rem 0 0; }
.quiet { color: #9aa3ad; }
  tbody tr:nth-child(even) { background: #202429; }
}
</style>
</head>
<body>
<main>
<h1>$title</h1>
$lead
$sections
</main>
</body>
</html>
""")


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
        is_beside: it stands beside the next one of this kind, if the page is wide enough.
    """

    title: str
    content: str
    is_beside: bool = False

    def as_html(self) -> str:
        """The element."""
        return f"<section><h2>{escape(self.title)}</h2>\n{self.content}\n</section>"


def document(title: str, lead: Sequence[str], quiet: str, sections: Sequence[Section]) -> str:
    """The page: a title, lines below it, a line in the background, and sections."""
    # Nothing is loaded from elsewhere: a page must open from a file, and on a cluster without network.
    lines = [*(f"<p>{escape(line)}</p>" for line in lead), *([quiet_html(quiet)] if quiet else [])]
    boxes = []
    for is_beside, group in groupby(sections, lambda section: section.is_beside):
        inside = "\n".join(section.as_html() for section in group)
        boxes.append(f'<div class="wide">{inside}</div>' if is_beside else inside)
    return _PAGE.substitute(title=escape(title), lead="\n".join(lines), sections="\n".join(boxes))


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
    return f"<table><tbody>{lines}</tbody></table>"


def quiet_html(text: str) -> str:
    """A paragraph of text in the background."""
    return f'<p class="quiet">{escape(text)}</p>'


def preformatted_html(text: str) -> str:
    """Text with its line breaks."""
    return f"<pre>{escape(text)}</pre>"
