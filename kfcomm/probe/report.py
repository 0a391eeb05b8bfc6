"""A probe for people: as text, with both matrices, the slowest links in words and what collectives should take; a page.

The page has the matrices as heat maps. Nothing on it depends on when it was made.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

import numpy as np

from kfcomm.common import sizes
from kfcomm.common.html import (
    LEVELS,
    HeatCell,
    ReportPage,
    Section,
    chips_html,
    dense_html,
    heat_html,
    quiet_html,
    table_html,
)
from kfcomm.common.sizes import RATE_UNITS, TIME_UNITS, ranks_in_words, show_rate, show_seconds
from kfcomm.common.sizes import three_digits as cell
from kfcomm.probe.record import Matrix, Probe
from kfcomm.strategies import AnyStrategy
from kfcomm.strategies.builtin import ALGORITHMS
from kfcomm.strategies.cost import predict_seconds
from kfcomm.strategies.matrices import rates_of
from kfcomm.strategies.tree_packing import ports_of

_SLOW: Final = 0.7
"""Of what is usual: what is slower is worth a word."""
_FAR: Final = 3.0
_MOST_WORDS: Final = 5
_MOST_PAIRS: Final = 128
FORECAST_NBYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Forecast:
    """Time of an all_reduce by the cost model."""

    strategy: str
    seconds: float  # of `FORECAST_NBYTES` bytes
    of_bound: float  # the bound of the network's ports, as a part of that


def as_text(probe: Probe) -> str:
    """Tables and words, in lines that end with a newline."""
    lines = [summary(probe), ""]
    for title, matrix, units in tables(probe):
        scale, unit = unit_of(matrix, units)
        lines += [f"{title}, {unit} (from row to column)", *_table(matrix / scale), ""]
    lines += findings(probe)
    if probe.size > 1:
        lines += ["", "all_reduce of 32 MiB by the cost model, and the part of it that the bound of the ports takes:"]
        lines += [
            f"  {one.strategy:<24}{show_seconds(one.seconds):>10}  {one.of_bound:4.0%}" for one in forecasts(probe)
        ]
    return "\n".join(lines) + "\n"


def summary(probe: Probe) -> str:
    """Header: the ranks that were measured."""
    ranks, hosts = probe.size, probe.layout.num_hosts
    return f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"


def tables(probe: Probe) -> tuple[tuple[str, Matrix, Sequence[tuple[float, str]]], ...]:
    """Title, matrix and units of both."""
    return (("latency one way", probe.latency_s, TIME_UNITS), ("bandwidth", probe.bandwidth, RATE_UNITS))


def unit_of(matrix: Matrix, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit that is at most the matrix's median, without its diagonal."""
    size = len(matrix)
    off = [float(matrix[a, b]) for a in range(size) for b in range(size) if a != b]
    middle = statistics.median(off) if off else 0.0
    return sizes.unit_of(middle, units)


def findings(probe: Probe) -> list[str]:
    """Findings, in sentences: slow hosts, then slow links, then distant ones, then uplinks that racks share."""
    if probe.size == 1:
        return ["One rank has no links."]
    found = [*_slow_hosts(probe), *_slow_links(probe), *_distant(probe), *_uplinks(probe)]
    a, b = probe.slowest(1)[0]
    slowest = f"The slowest link is {a} → {b} with {show_rate(probe.bandwidth[a, b])}."
    return [*(found or ["No host and no link is much slower than the others."]), slowest, *_work(probe)]


def forecasts(probe: Probe) -> list[Forecast]:
    """Of all strategies, and of those that were made for this network; the quickest first."""
    layout, network = probe.layout, probe.network()
    few = probe.size <= _MOST_PAIRS
    strategies: list[AnyStrategy] = [each.build(layout) for each in ALGORITHMS if few or not each.pair_per_rank]
    strategies += [probe.packed_trees(), probe.minimum_spanning_tree()]
    bound_s = probe.bound_seconds(FORECAST_NBYTES)
    made = []
    for strategy in strategies:
        seconds = predict_seconds(strategy, layout, FORECAST_NBYTES, network)
        made.append(Forecast(strategy.name, seconds, bound_s / seconds if seconds else 1.0))
    return sorted(made, key=lambda one: one.seconds)


def _work(probe: Probe) -> Iterator[str]:
    costs = probe.costs()
    if costs.overhead_s is not None:
        yield f"A message takes {show_seconds(costs.overhead_s)} of work."
    if costs.gamma_s_per_byte is not None:
        yield f"A rank folds {show_rate(1 / costs.gamma_s_per_byte)}."


def _table(matrix: Matrix) -> Iterator[str]:
    size = len(matrix)
    cells = [["·" if a == b else cell(float(matrix[a, b])) for b in range(size)] for a in range(size)]
    widths = [max(len(str(b)), *(len(row[b]) for row in cells)) for b in range(size)]
    edge = len(str(size - 1))
    yield " " * edge + "".join(f"  {b:>{width}}" for b, width in enumerate(widths))
    for a, row in enumerate(cells):
        yield f"{a:>{edge}}" + "".join(f"  {text:>{width}}" for text, width in zip(row, widths, strict=True))


def _slow_hosts(probe: Probe) -> Iterator[str]:
    nodes = ports_of(probe.layout)
    rates = rates_of(nodes, probe.bandwidth.tolist())
    for verb, ports in (("sends", rates.send), ("receives", rates.receive)):
        usual = statistics.median(ports)
        for host, rate in sorted(enumerate(ports), key=lambda one: one[1])[:_MOST_WORDS]:
            if rate < _SLOW * usual:
                yield (
                    f"{_named(probe, nodes.ranks_of(host)).capitalize()} {verb} at most {show_rate(rate)}, "
                    f"{rate / usual:.0%} of what is usual here."
                )


def _slow_links(probe: Probe) -> Iterator[str]:
    nodes = ports_of(probe.layout)
    rates = rates_of(nodes, probe.bandwidth.tolist())
    slow = []
    for a in range(nodes.num_hosts):
        for b in range(nodes.num_hosts):
            part = 1.0 if a == b else rates.links[a][b] / min(rates.send[a], rates.receive[b])
            if part < _SLOW:
                slow.append((part, a, b))
    for part, a, b in sorted(slow)[:_MOST_WORDS]:
        ends = f"From {_named(probe, nodes.ranks_of(a))} to {_named(probe, nodes.ranks_of(b))}"
        yield f"{ends} goes {show_rate(rates.links[a][b])}, {part:.0%} of what both ends can do."


def _distant(probe: Probe) -> Iterator[str]:
    """Ranks of different hosts, or of one if there is only one, that are much farther apart than is usual."""
    hosts = ports_of(probe.layout).hosts
    pairs = [(a, b) for a in range(probe.size) for b in range(probe.size) if hosts[a] != hosts[b]]
    usual = statistics.median(float(probe.latency_s[pair]) for pair in pairs)
    far = sorted(pairs, key=lambda pair: -probe.latency_s[pair])[:_MOST_WORDS]
    for a, b in far:
        if probe.latency_s[a, b] > _FAR * usual:
            yield (
                f"{a} → {b} takes {show_seconds(probe.latency_s[a, b])}, "
                f"{probe.latency_s[a, b] / usual:.1f} times what is usual."
            )


def _uplinks(probe: Probe) -> Iterator[str]:
    """Racks whose hosts hold each other up."""
    rates = rates_of(probe.layout, probe.bandwidth.tolist()) if probe.uplinks else None
    for one in probe.uplinks:
        ports = sum(rates.send[host] for host in one.hosts) if rates is not None else 0.0
        hosts = ", ".join(map(str, one.hosts))
        yield (
            f"Hosts {hosts} share an uplink: {show_rate(one.send)} out and {show_rate(one.receive)} in, "
            f"{one.send / ports:.0%} of what their ports can do."
        )


def _named(probe: Probe, ranks: Sequence[int]) -> str:
    if probe.layout.num_hosts == 1 or probe.layout.num_hosts == probe.size:
        return ranks_in_words(ranks[:1])
    return f"host {probe.layout.hosts[ranks[0]]} ({ranks_in_words(ranks)})"


_MOST_CELLS: Final = 16
"""Ranks up to which each cell holds its figure."""
_MOST_NARROW: Final = 8
"""Ranks up to which two such maps stand beside each other."""
_NOTE = (
    "Latencies are half of the shortest round trip, bandwidths those of the quickest message; each pair of ranks "
    "measured while no other used the ports of its hosts. The bound is that of ports and uplinks. 1 GB is 10⁹ bytes."
)


class _Head(NamedTuple):
    title: str
    is_word: bool = False
    unit: str = ""


_FORECASTS = (_Head("strategy", is_word=True), _Head("time"), _Head("bound / time"))


def page(probe: Probe) -> str:
    """The page."""
    found, predicted = findings(probe), forecasts(probe)
    stands_out = "\n".join(f"<p>{escape(line)}</p>" for line in found)
    maps = [
        Section(
            f"{title}, {unit_of(matrix, units)[1]}",
            heat_map(probe, matrix, units),
            is_beside=not 8 < probe.size <= _MOST_CELLS,
        )
        for title, matrix, units in tables(probe)
    ]
    rows = [(one.strategy, show_seconds(one.seconds), f"{one.of_bound:.0%}") for one in predicted]
    below = [
        Section("What stands out", stands_out, is_beside=True),
        Section(
            "all_reduce of 32 MiB, by the cost model", table_html(_FORECASTS, rows) + quiet_html(_NOTE), is_beside=True
        ),
    ]
    headline = f"{summary(probe)}: {found[0][0].lower()}{found[0][1:]}"
    return ReportPage("kfcomm probe", headline, [], [*maps, *below], "", probe.as_json()).as_html()


def heat_map(probe: Probe, matrix: Matrix, units: Sequence[tuple[float, str]]) -> str:
    """The matrix as HTML: green is fast, red is slow."""
    (scale, unit), size, is_rate = unit_of(matrix, units), probe.size, matrix is probe.bandwidth
    if size == 1:
        return ""
    off = matrix[~np.eye(size, dtype=bool)]
    low, high = float(off.min()), float(off.max())
    low = min(low, high / 2) or 1e-12  # noise alone shall not look like a difference
    bounds = [low * (high / low) ** (number / LEVELS) for number in range(LEVELS)]
    levels = np.searchsorted(bounds, matrix, side="right").clip(1) - 1
    if is_rate:
        levels = LEVELS - 1 - levels
    labels = [f"from {cell(bound / scale)} {unit}" for bound in (reversed(bounds) if is_rate else bounds)]
    of_cells = [[None if a == b else int(levels[a, b]) for b in range(size)] for a in range(size)]
    if size > _MOST_CELLS:
        drawn = dense_html(of_cells) + quiet_html(
            f"A row for each sending rank, a column for each receiving one: 0 to {size - 1}."
        )
    else:
        hosts = probe.layout.hosts
        breaks = [rank for rank in range(1, size) if hosts[rank] != hosts[rank - 1]]
        rows = [
            (
                str(a),
                [HeatCell(cell(float(matrix[a, b]) / scale) if a != b else "", of_cells[a][b]) for b in range(size)],
            )
            for a in range(size)
        ]
        drawn = heat_html("from, to", [*map(str, range(size))], rows, breaks if len(set(hosts)) < size else ())
    return drawn + chips_html(enumerate(labels))
