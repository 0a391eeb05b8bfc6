"""HTML pages of `kfcomm bench`, `kfcomm bench topologies` and `kfcomm simulate`. Importing this needs matplotlib."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from kfcomm.bench.figures import drawn_results, drawn_simulations, heat_map
from kfcomm.bench.memory import route_in_words
from kfcomm.bench.report import COLUMNS, Report, ReportTable
from kfcomm.bench.topologies import (
    LEGEND,
    Findings,
    MeasuredTopologies,
    SimulatedTopologies,
    Simulations,
    times,
)  # fmt: skip
from kfcomm.common.drawing import Drawing
from kfcomm.common.html import Section, document, fields_html, preformatted_html, quiet_html, table_html
from kfcomm.common.sizes import ranges, show_size

_MEASURED = (
    "Times are those of the slowest rank; every result of every iteration was compared with the expected one. "
    "algbw is size / p50; busbw is algbw × a factor of the collective, as nccl-tests define them. 1 GB is 10⁹ bytes."
)
_SIMULATED = (
    "Time is virtual: from the moment at which all ranks begin until the last one has its result. bound is what the "
    "busiest port needs at least for what goes through it; in the plots it is dotted. algbw is size / time; busbw is "
    "algbw × 2(n−1)/n. 1 GB is 10⁹ bytes."
)
_HEAT_MAP = (
    "A cell has the time of one all_reduce; its colour says how many times as long it is as the fastest at this size. "
    "The fastest is framed, with bold digits."
)


def measured(report: Report) -> str:
    """The page of a report with at least one result."""
    data = report.as_json()
    table = ReportTable.of(report.results, COLUMNS)
    sections = [*_drawn(drawn_results(report.results)), _results(table, _MEASURED), *surroundings(data)]
    title = f"kfcomm bench: {data['ranks']} ranks, {data['time']}"
    return document(title, [report.world()], table.settings(), sections)


def simulated(simulations: Simulations) -> str:
    """The page of at least one result."""
    table = simulations.table()
    sections = [
        *_drawn(drawn_simulations(simulations.results)), _results(table, _SIMULATED), _network(simulations.as_json())
    ]  # fmt: skip
    return document("kfcomm simulate", [simulations.title()], table.settings(), sections)


def measured_topologies(report: MeasuredTopologies) -> str:
    """The page of a measurement with at least one result."""
    data = report.as_json()
    sections = [*_advice(report.findings()), *surroundings(data)]
    title = f"kfcomm bench topologies: {data['ranks']} ranks, {data['time']}"
    return document(title, [report.world()], report.settings(), sections)


def simulated_topologies(report: SimulatedTopologies) -> str:
    """The page of a simulation with at least one result."""
    sections = [
        *_advice(report.findings()),
        *_drawn(drawn_simulations(report.results)),
        Section("Simulations", _table(report.table())),
        _network(report.as_json()),
    ]
    return document("kfcomm bench topologies, simulated", [report.world()], "", sections)


def surroundings(data: dict[str, Any]) -> list[Section]:
    """Machine, devices and settings of a report's JSON."""
    return [
        Section("Machine", "\n".join(map(_machine, data["hosts"]))),
        *([Section("Devices", _devices(data))] if data.get("devices") else []),
        Section("Settings", preformatted_html(json.dumps(data["suite"], indent=1))),
    ]


def _drawn(drawings: Iterable[Drawing]) -> Iterator[Section]:
    return (Section(drawing.title, drawing.svg) for drawing in drawings)


def _table(table: ReportTable) -> str:
    return table_html(table.columns, table.rows)


def _results(table: ReportTable, note: str) -> Section:
    return Section("Results", _table(table) + quiet_html(note))


def _network(data: dict[str, Any]) -> Section:
    return Section("Network", preformatted_html(json.dumps(data["network"], indent=1)))


def _advice(findings: Findings) -> Iterator[Section]:
    advice, *others = findings.lines()
    words = f"<p><strong>{escape(advice)}</strong></p>" + "".join(map(quiet_html, others))
    yield Section("Advice", words)
    yield Section("Fastest strategy by size", heat_map(findings.grid) + quiet_html(_HEAT_MAP))
    yield Section("Times", _table(times(findings.grid)) + quiet_html(LEGEND))


def _machine(host: dict[str, Any]) -> str:
    versions = host["versions"].items()
    return fields_html(
        [
            ("ranks", ranges(host["ranks"])),
            ("host", host["hostname"]),
            ("processor", f"{host['processor']}, {host['usable_cores']} of {host['cores']} cores usable"),
            ("memory", show_size(host["memory_nbytes"])),
            ("system", host["system"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions if version)),
        ]
    )


def _devices(data: dict[str, Any]) -> str:
    """The devices that hold the arrays, and the route of each transport."""
    rows: list[tuple[str, object]] = []
    for one in data["devices"]:
        rows += [
            ("ranks", ranges(one["ranks"])),
            ("devices", f"{one['physical']} {one['model']}"),
            ("driver", f"CUDA {one['driver']}"),
            ("backend", one["backend"] or "none"),
        ]
    return fields_html([*rows, *((f"transport {name}", route_in_words(one)) for name, one in data["routes"].items())])
