"""The report as one HTML page that needs nothing else: figures, table, machine, settings.

Everything that comes from outside, such as the name of a host, is escaped.
"""

from __future__ import annotations

import json
from html import escape
from string import Template
from typing import TYPE_CHECKING

from kfcomm.bench.plots import drawings
from kfcomm.bench.table import Table, is_word
from kfcomm.sizes import show_size

if TYPE_CHECKING:
    from kfcomm.bench.report import Report

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
tbody tr:nth-child(even) { background: #f6f7f9; }
.quiet { color: #5b636d; }
pre { white-space: pre-wrap; font-size: .85rem; margin: 0; }
</style>
</head>
<body>
<main>
<h1>$title</h1>
<p>$world</p>
<p class="quiet">$common</p>
$figures
<section><h2>Results</h2>
$table
<p class="quiet">Times are those of the slowest rank; every result of every iteration was compared with what it must be.
algbw is size / p50; busbw is algbw × a factor of the collective, as nccl-tests define them. 1 GB is 10⁹ bytes.</p>
</section>
<section><h2>Machine</h2>
$machines
</section>
<section><h2>Settings</h2>
<pre>$settings</pre>
</section>
</main>
</body>
</html>
""")


def page(report: Report) -> str:
    """The page of a report with at least one result.

    Raises:
        ImportError: matplotlib is not installed.
    """
    data = report.as_json()
    table = Table.of(report.results)
    return _PAGE.substitute(
        title=f"kfcomm bench: {data['ranks']} ranks, {escape(data['time'])}",
        world=escape(report.world()),
        common=escape(", ".join(f"{title} {value}" for title, value in table.common)),
        figures="\n".join(
            f"<section><h2>{escape(drawing.title)}</h2>\n{drawing.svg}</section>"
            for drawing in drawings(report.results)
        ),
        table=_table(table),
        machines="\n".join(map(_machine, data["hosts"])),
        settings=escape(json.dumps(data["suite"], indent=1)),
    )


def _table(table: Table) -> str:
    kinds = [' class="word"' if is_word(column) else "" for column in table.columns]
    heads = "".join(
        f"<th{kind}>{escape(column.title)}{f' <small>{escape(column.unit)}</small>' if column.unit else ''}</th>"
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"
        for cells in table.rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table>"


def _machine(host: dict[str, object]) -> str:
    ranks, nbytes, versions = host["ranks"], host["memory_nbytes"], host["versions"]
    rows = {
        "ranks": ", ".join(map(str, ranks)) if isinstance(ranks, (list, tuple)) else "",
        "host": host["hostname"],
        "processor": f"{host['processor']}, {host['usable_cores']} of {host['cores']} cores usable",
        "memory": show_size(nbytes) if isinstance(nbytes, int) else "",
        "system": host["system"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        if isinstance(versions, dict)
        else "",
    }
    lines = "".join(
        f'<tr><th class="word">{name}</th><td class="word">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><tbody>{lines}</tbody></table>"
