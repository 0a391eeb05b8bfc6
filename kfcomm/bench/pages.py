"""HTML pages of `kfcomm bench`, `kfcomm bench topologies` and `kfcomm simulate`. Importing this needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from statistics import median
from typing import Any, Final

from kfcomm.bench.figures import drawn_results, drawn_simulations, drawn_step, drawn_steps, series_of
from kfcomm.bench.memory import route_in_words
from kfcomm.bench.report import COLUMNS, Report, ReportColumn, ReportTable, with_units
from kfcomm.bench.steps import CALL_COLUMNS, STEP_COLUMNS, SimulatedSteps
from kfcomm.bench.suite import BenchResult
from kfcomm.bench.topologies import (
    SIMULATED_COLUMNS,
    Findings,
    Grid,
    MeasuredTopologies,
    SimulatedTopologies,
    Simulations,
)  # fmt: skip
from kfcomm.common.drawing import Drawing
from kfcomm.common.html import (
    LEVELS,
    HeatCell,
    ReportPage,
    Section,
    chips_html,
    fields_html,
    heat_html,
    quiet_html,
    table_html,
)  # fmt: skip
from kfcomm.common.sizes import TIME_UNITS, ranges, shortened, show_rate, show_seconds, show_size, three_digits, unit_of
from kfcomm.simulate import Result as Simulated
from kfcomm.simulate import SimulatedNetwork, StepResult

_MEASURED = (
    "Times are those of the slowest rank; every result of every iteration was compared with the expected one. "
    "algbw is size / p50; busbw is algbw × a factor of the collective, as nccl-tests define them. 1 GB is 10⁹ bytes."
)
_VIRTUAL = (
    "Time is virtual: from the moment at which all ranks begin until the last one has its result. bound is what the "
    "busiest port needs at least for what goes through it"
)
_SIMULATED = f"{_VIRTUAL}. busbw is size / time × 2(n−1)/n. 1 GB is 10⁹ bytes."
_STEPS = (
    f"{_VIRTUAL}, or the compute if that is longer. A step is its compute and the exposed communication; overlapped is "
    "the rest of the time in which a call is under way."
)
_HEAT_MAP = (
    "A cell has the time of one all_reduce; its colour says how many times as long it is as the fastest at this size. "
    "The fastest is framed, with bold digits."
)
_SLOWER: Final = (1.05, 1.25, 1.5, 2.0, 4.0, 8.0)
"""Times as long as the fastest: bounds of the levels."""
_MOST_SENTENCES: Final = 3
_MOST_WIDE: Final = 12
"""Columns of the heat map up to which their heads have one line."""
_SIMULATED_COLUMNS: Final = [one for one in SIMULATED_COLUMNS if one.title not in ("algbw", "messages", "events")]


def measured(report: Report) -> str:
    """The page of a report with at least one result."""
    data = report.as_json()
    sections = [*_drawn(drawn_results(report.results), COLUMNS), *surroundings(data, _MEASURED)]
    settings = ReportTable.of(report.results, COLUMNS).settings()
    lead = [f"{report.world()}; {data['time']}"]
    return ReportPage("kfcomm bench", fastest(report.results), lead, sections, settings, data).as_html()


def simulated(simulations: Simulations) -> str:
    """The page of at least one result."""
    data = simulations.as_json()
    sections = [*_drawn(drawn_simulations(simulations.results), _SIMULATED_COLUMNS), _network(simulations.network)]
    headline = fastest_simulated(simulations.results, simulations.verb)
    settings = simulations.table().settings()
    return ReportPage("kfcomm simulate", headline, [simulations.title()], sections, settings, data).as_html()


def simulated_steps(report: SimulatedSteps) -> str:
    """The page of at least one step."""
    over = drawn_steps(report.results)
    sections = [
        *_drawn([over], STEP_COLUMNS),
        *_drawn((drawn_step(strategy, step) for strategy, step in report.results), CALL_COLUMNS),
        _network(report.network, _STEPS),
    ]
    lead = [report.title(), f"workload: {shortened(report.workload, 300)}"]
    settings = ReportTable.of(report.results, STEP_COLUMNS).settings()
    headline = fastest_step(report.results)
    return ReportPage("kfcomm simulate", headline, lead, sections, settings, report.as_json()).as_html()


def measured_topologies(report: MeasuredTopologies) -> str:
    """The page of a measurement with at least one result."""
    data, found = report.as_json(), report.findings()
    sections = [*_advice(found), *surroundings(data, _MEASURED)]
    lead = [f"{report.world()}; {data['time']}"]
    kind = "kfcomm bench topologies"
    return ReportPage(kind, found.headline(), lead, sections, report.settings(), data).as_html()


def simulated_topologies(report: SimulatedTopologies) -> str:
    """The page of a simulation with at least one result."""
    found = report.findings()
    sections = [
        *_advice(found),
        *_drawn(drawn_simulations(report.results), _SIMULATED_COLUMNS),
        _network(report.network),
    ]  # fmt: skip
    kind = "kfcomm bench topologies"
    return ReportPage(kind, found.headline(), [report.world()], sections, "", report.as_json()).as_html()


def fastest(results: Sequence[BenchResult]) -> str:
    """Sentence on the fastest way of each collective and workload, at the largest size."""
    groups: dict[str, list[BenchResult]] = {}
    for result in results:
        groups.setdefault(result.case.workload or result.case.collective.value, []).append(result)
    parts = []
    for name, group in groups.items():
        nbytes = max(result.case.nbytes for result in group)
        at = {one.label: result for one in series_of(group) for result in one.results if result.case.nbytes == nbytes}
        best = min(at, key=lambda label: at[label].p50_s)
        figures = f"{show_seconds(at[best].p50_s)} ({show_rate(1e9 * at[best].busbw)} busbw)"
        lead = _lead({label: result.p50_s for label, result in at.items()})
        parts.append(f"{name} of {show_size(nbytes)} takes {figures} with {best}{lead}")
    return "; ".join(parts[:_MOST_SENTENCES]) + "."


def fastest_simulated(results: Sequence[Simulated], verb: str) -> str:
    """Sentence on the fastest strategy, for the largest message and world."""
    most = max((result.size, result.num_hosts, result.nbytes) for result in results)
    at = {one.strategy: one for one in results if (one.size, one.num_hosts, one.nbytes) == most}
    best = min(at.values(), key=lambda result: result.seconds)
    lead = _lead({strategy: result.seconds for strategy, result in at.items()})
    return (
        f"{verb} of {show_size(best.nbytes)} takes {show_seconds(best.seconds)} on {best.size} ranks with "
        f"{best.strategy}{lead}; the busiest port needs {best.bound_s / best.seconds:.0%} of that."
    )


def fastest_step(results: Sequence[tuple[str, StepResult]]) -> str:
    """Sentence on the fastest strategy, for the largest world."""
    most = max((step.size, step.num_hosts) for _, step in results)
    at = {strategy: step for strategy, step in results if (step.size, step.num_hosts) == most}
    best, step = min(at.items(), key=lambda item: item[1].seconds)
    lead = _lead({strategy: step.seconds for strategy, step in at.items()})
    return (
        f"A step takes {show_seconds(step.seconds)} on {step.size} ranks with {best}{lead}: "
        f"{show_seconds(step.compute_s)} of compute, and {show_seconds(step.exposed_s)} of exposed communication "
        f"({step.exposed_s / step.seconds:.0%})."
    )


def surroundings(data: dict[str, Any], note: str = "") -> list[Section]:
    """Machine, devices and settings of a report's JSON, and a note on the method."""
    suite = dict(data["suite"])
    suite.pop("sizes" if not suite["collectives"] else "modes" if not suite["workloads"] else "", None)
    settings = [(name.replace("_", " "), _in_words(value)) for name, value in suite.items()]
    return [
        Section("Machine", "\n".join(map(_machine, data["hosts"])), is_beside=True),
        *([Section("Devices", _devices(data), is_beside=True)] if data.get("devices") else []),
        Section("Settings", fields_html(one for one in settings if one[1]) + quiet_html(note), is_beside=True),
    ]


def _lead(seconds: dict[str, float]) -> str:
    """How much faster the first is than the second, in words."""
    if len(seconds) == 1:
        return ""
    first, second, *_ = sorted(seconds, key=seconds.__getitem__)
    times = seconds[second] / seconds[first]
    return (
        f", {times:.{1 if times < 10 else 0}f} times as fast as {second}"
        if times >= 1.05
        else f", about as fast as {second}"
    )


def _drawn(drawings: Iterable[Drawing], columns: Sequence[ReportColumn[Any]]) -> Iterator[Section]:
    for drawing in drawings:
        table = ReportTable.of(drawing.results, with_units(columns))
        yield Section(drawing.title, drawing.svg, table_html(table.columns, table.rows))


def _network(network: SimulatedNetwork, note: str = _SIMULATED) -> Section:
    """Defaults of the hosts, and the exceptions by name."""
    host, local = network.default, network.local
    behind = f"{network.hosts_per_switch} hosts behind each" if network.hosts_per_switch else ""
    fields = [
        ("port of a host", f"{show_rate(host.bandwidth)} each way, {show_seconds(host.latency_s)} to another host"),
        ("inside a host", f"{show_rate(local.bandwidth)}, {show_seconds(local.latency_s)}"),
        ("hosts of their own kind", ", ".join(one.name for one in network.hosts)),
        ("links of their own kind", ", ".join(" and ".join(one.between) for one in network.links)),
        ("switches", behind or len(network.switches)),
    ]  # fmt: skip
    return Section("Network", fields_html(one for one in fields if one[1]) + quiet_html(note))


def _advice(findings: Findings) -> Iterator[Section]:
    advice, setting, *others = findings.lines()
    words = (
        f"<p>Fastest {escape(advice)}</p><p>As setting: <code>{escape(setting.removeprefix('As setting: '))}</code></p>"
    )
    content = _heat_map(findings.grid) + quiet_html(_HEAT_MAP)
    yield Section("Fastest strategy by size", content + words + "".join(map(quiet_html, others)))


def _heat_map(grid: Grid) -> str:
    usual = [median(grid.seconds[strategy, nbytes] for strategy in grid.strategies) for nbytes in grid.sizes]
    units = [unit_of(seconds, TIME_UNITS) for seconds in usual]
    space = " " if len(grid.sizes) <= _MOST_WIDE else "\n"
    heads = [
        f"{show_size(nbytes).replace(' ', space)}\n{unit}" for nbytes, (_, unit) in zip(grid.sizes, units, strict=True)
    ]
    rows = [
        (
            strategy,
            [_cell(grid, strategy, nbytes, scale) for nbytes, (scale, _) in zip(grid.sizes, units, strict=True)],
        )
        for strategy in grid.strategies
    ]
    labels = [f"up to {bound:g}× the fastest" for bound in _SLOWER] + [f"above {_SLOWER[-1]:g}×"]
    return heat_html("strategy", heads, rows) + chips_html(enumerate(labels))


def _cell(grid: Grid, strategy: str, nbytes: int, scale: float) -> HeatCell:
    slower = grid.slower(strategy, nbytes)
    level = next((level for level, bound in enumerate(_SLOWER) if slower <= bound), LEVELS - 1)
    return HeatCell(three_digits(grid.seconds[strategy, nbytes] / scale), level, strategy == grid.winner(nbytes))


def _in_words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(show_size(one) if isinstance(one, int) else str(one) for one in value)
    return "" if value in (None, False) else "yes" if value is True else str(value)


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
