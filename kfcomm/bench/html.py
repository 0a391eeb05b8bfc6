"""A page that needs nothing else: its frame and its tables.

What is given as text is escaped here; what is given as HTML was made by this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import Template

from kfcomm.bench.table import Table

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
.quiet { color: #5b636d; }
pre { white-space: pre-wrap; font-size: .85rem; margin: 0; }
@media (max-width: 44rem) { svg { max-width: none; width: 44rem; } }
@media (prefers-color-scheme: dark) {
  body { color: #dde1e6; background: #101214; }
  section { background: #191c20; border-color: #333940; }
  svg { filter: invert(.88) hue-rotate(180deg); }
  thead th { border-color: #4b535c; }
  th small, .quiet { color: #9aa3ad; }
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


@dataclass(frozen=True, slots=True)
class Section:
    """A box with a heading.

    Attributes:
        title: text.
        content: HTML.
    """

    title: str
    content: str


def document(title: str, lead: Sequence[str], quiet: str, sections: Sequence[Section]) -> str:
    """A page: a title, lines below it, a quiet one, and sections."""
    lines = [*(f"<p>{escape(line)}</p>" for line in lead), f'<p class="quiet">{escape(quiet)}</p>']
    boxes = (f"<section><h2>{escape(each.title)}</h2>\n{each.content}\n</section>" for each in sections)
    return _PAGE.substitute(title=escape(title), lead="\n".join(lines), sections="\n".join(boxes))


def table_html(table: Table) -> str:
    """A table with its heads; what is common to all lines is not in it."""
    kinds = [' class="word"' if column.is_word else "" for column in table.columns]
    heads = "".join(
        f"<th{kind}>{escape(column.title)}{f' <small>{escape(column.unit)}</small>' if column.unit else ''}</th>"
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"
        for cells in table.rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def quiet_html(text: str) -> str:
    """A paragraph in the background."""
    return f'<p class="quiet">{escape(text)}</p>'


def preformatted_html(text: str) -> str:
    """Text as it stands."""
    return f"<pre>{escape(text)}</pre>"
