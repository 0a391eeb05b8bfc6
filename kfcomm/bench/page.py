"""The report of `kfcomm bench` as one HTML page: figures, table, machine, settings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from kfcomm.bench.devices import route_in_words
from kfcomm.bench.html import Section, document, preformatted_html, quiet_html, table_html
from kfcomm.bench.plots import drawings
from kfcomm.bench.table import COLUMNS, Table
from kfcomm.common.sizes import show_size

if TYPE_CHECKING:
    from kfcomm.bench.report import Report

_NOTE = (
    "Times are those of the slowest rank; every result of every iteration was compared with what it must be. "
    "algbw is size / p50; busbw is algbw × a factor of the collective, as nccl-tests define them. 1 GB is 10⁹ bytes."
)


def page(report: Report) -> str:
    """The page of a report with at least one result.

    Raises:
        ImportError: matplotlib is not installed.
    """
    data = report.as_json()
    table = Table.of(report.results, COLUMNS)
    sections = [
        *(Section(drawing.title, drawing.svg) for drawing in drawings(report.results)),
        Section("Results", table_html(table) + quiet_html(_NOTE)),
        *surroundings(data),
    ]
    title = f"kfcomm bench: {data['ranks']} ranks, {data['time']}"
    return document(title, [report.world()], table.settings(), sections)


def surroundings(data: dict[str, Any]) -> list[Section]:
    """Where something was measured, and what was asked for, of a report's JSON."""
    return [
        Section("Machine", "\n".join(map(_machine, data["hosts"]))),
        *([Section("Devices", _devices(data))] if data.get("devices") else []),
        Section("Settings", preformatted_html(json.dumps(data["suite"], indent=1))),
    ]


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
    return _named(rows.items())


def _devices(data: dict[str, Any]) -> str:
    """The devices that the arrays were on, and the way that they went."""
    rows: list[tuple[str, object]] = []
    for one in data["devices"]:
        rows += [
            ("ranks", ", ".join(map(str, one["ranks"]))),
            ("devices", f"{one['physical']} {one['model']}"),
            ("driver", f"CUDA {one['driver']}"),
            ("backend", one["backend"] or "none"),
        ]
    return _named([*rows, *((f"transport {name}", route_in_words(one)) for name, one in data["routes"].items())])


def _named(rows: Iterable[tuple[str, object]]) -> str:
    """A table of names and values."""
    lines = "".join(
        f'<tr><th class="word">{escape(name)}</th><td class="word">{escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f"<table><tbody>{lines}</tbody></table>"
