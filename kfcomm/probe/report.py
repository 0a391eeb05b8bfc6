"""A probe for people: as text, with both matrices, the slowest links in words and what collectives should take; a page.

The page has the matrices as heat maps; drawing it imports matplotlib. Nothing on it depends on when it was drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, NamedTuple

import numpy as np

from kfcomm.common.html import Section, document, quiet_html, table_html
from kfcomm.common.sizes import ranks_in_words
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
_LATENCIES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RATES: Final = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
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
            f"  {one.strategy:<24}{_shown(one.seconds, _LATENCIES):>10}  {one.of_bound:4.0%}"
            for one in forecasts(probe)
        ]
    return "\n".join(lines) + "\n"


def summary(probe: Probe) -> str:
    """Header: the ranks that were measured."""
    ranks, hosts = probe.size, probe.layout.num_hosts
    return f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"


def tables(probe: Probe) -> tuple[tuple[str, Matrix, Sequence[tuple[float, str]]], ...]:
    """Title, matrix and units of both."""
    return (("latency one way", probe.latency_s, _LATENCIES), ("bandwidth", probe.bandwidth, _RATES))


def unit_of(matrix: Matrix, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit that is at most the matrix's median, without its diagonal."""
    size = len(matrix)
    off = [float(matrix[a, b]) for a in range(size) for b in range(size) if a != b]
    middle = statistics.median(off) if off else 0.0
    return next((unit for unit in units if middle >= unit[0]), units[-1])


def cell(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def findings(probe: Probe) -> list[str]:
    """Findings, in sentences: slow hosts, then slow links, then distant ones, then uplinks that racks share."""
    if probe.size == 1:
        return ["One rank has no links."]
    found = [*_slow_hosts(probe), *_slow_links(probe), *_distant(probe), *_uplinks(probe)]
    a, b = probe.slowest(1)[0]
    slowest = f"The slowest link is {a} → {b} with {_shown(probe.bandwidth[a, b], _RATES)}."
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
        yield f"A message takes {_shown(costs.overhead_s, _LATENCIES)} of work."
    if costs.gamma_s_per_byte is not None:
        yield f"A rank folds {_shown(1 / costs.gamma_s_per_byte, _RATES)}."


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
                    f"{_named(probe, nodes.ranks_of(host)).capitalize()} {verb} at most {_shown(rate, _RATES)}, "
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
        yield f"{ends} goes {_shown(rates.links[a][b], _RATES)}, {part:.0%} of what both ends can do."


def _distant(probe: Probe) -> Iterator[str]:
    """Ranks of different hosts, or of one if there is only one, that are much farther apart than is usual."""
    hosts = ports_of(probe.layout).hosts
    pairs = [(a, b) for a in range(probe.size) for b in range(probe.size) if hosts[a] != hosts[b]]
    usual = statistics.median(float(probe.latency_s[pair]) for pair in pairs)
    far = sorted(pairs, key=lambda pair: -probe.latency_s[pair])[:_MOST_WORDS]
    for a, b in far:
        if probe.latency_s[a, b] > _FAR * usual:
            yield (
                f"{a} → {b} takes {_shown(probe.latency_s[a, b], _LATENCIES)}, "
                f"{probe.latency_s[a, b] / usual:.1f} times what is usual."
            )


def _uplinks(probe: Probe) -> Iterator[str]:
    """Racks whose hosts hold each other up."""
    rates = rates_of(probe.layout, probe.bandwidth.tolist()) if probe.uplinks else None
    for one in probe.uplinks:
        ports = sum(rates.send[host] for host in one.hosts) if rates is not None else 0.0
        hosts = ", ".join(map(str, one.hosts))
        yield (
            f"Hosts {hosts} share an uplink: {_shown(one.send, _RATES)} out and {_shown(one.receive, _RATES)} in, "
            f"{one.send / ports:.0%} of what their ports can do."
        )


def _named(probe: Probe, ranks: Sequence[int]) -> str:
    if probe.layout.num_hosts == 1 or probe.layout.num_hosts == probe.size:
        return ranks_in_words(ranks[:1])
    return f"host {probe.layout.hosts[ranks[0]]} ({ranks_in_words(ranks)})"


def _shown(value: float, units: Sequence[tuple[float, str]]) -> str:
    scale, unit = next((unit for unit in units if value >= unit[0]), units[-1])
    return f"{cell(value / scale)} {unit}"


_MOST_CELLS: Final = 16
"""Ranks up to which each cell holds its figure."""
_NOTE = (
    "Latencies are half of the shortest round trip, bandwidths those of the quickest message; each pair of ranks "
    "measured while no other used the ports of its hosts. The bound is that of ports and uplinks. 1 GB is 10⁹ bytes."
)


class _Head(NamedTuple):
    title: str
    is_word: bool = False
    unit: str = ""


_FORECASTS = (_Head("strategy", is_word=True), _Head("seconds"), _Head("bound / seconds"))


def page(probe: Probe) -> str:
    """The page."""
    stands_out = "\n".join(f"<p>{escape(line)}</p>" for line in findings(probe))
    maps = []
    for title, matrix, units in tables(probe):
        scale, unit = unit_of(matrix, units)
        drawn = heat_map(matrix / scale, unit, probe.layout.hosts, is_good=title == "bandwidth")
        maps.append(Section(f"{title}, {unit}", drawn, is_beside=True))
    rows = [(one.strategy, f"{one.seconds:.4g}", f"{one.of_bound:.0%}") for one in forecasts(probe)]
    predicted = Section("all_reduce of 32 MiB, by the cost model", table_html(_FORECASTS, rows) + quiet_html(_NOTE))
    return document("kfcomm probe", [summary(probe)], "", [Section("What stands out", stands_out), *maps, predicted])


def heat_map(matrix: Matrix, unit: str, hosts: tuple[int, ...], *, is_good: bool) -> str:
    """The matrix as an SVG element: dark is slow. ``is_good``: of large values."""
    import matplotlib as mpl
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    from kfcomm.common.drawing import STYLE, as_svg

    size = len(matrix)
    shown = np.ma.masked_array(matrix, np.eye(size, dtype=bool))
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(5.4, 4.6), layout="constrained")
        axes = figure.subplots()
        if size > 1:
            low, high = float(shown.min()), float(shown.max())
            low = min(low, high / 2) or 1e-12  # noise alone shall not look like a difference
            norm = LogNorm(low, high)
            image = axes.imshow(shown, cmap="viridis" if is_good else "viridis_r", norm=norm)
            bar = figure.colorbar(image, ax=axes, shrink=0.85, label=unit)
            bar.ax.yaxis.set_major_formatter(ScalarFormatter())
            bar.ax.yaxis.set_minor_formatter(ScalarFormatter() if high < 10 * low else NullFormatter())
        else:
            axes.imshow(shown)
        if size <= _MOST_CELLS:
            _write_cells(axes, shown, image.norm if size > 1 else None, is_good=is_good)
        _draw_hosts(axes, hosts)
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=16, integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlim(-0.5, size - 0.5)
        axes.set_ylim(size - 0.5, -0.5)
        return as_svg(figure, f"map {unit}")


def _write_cells(axes: Any, shown: Any, norm: Any, *, is_good: bool) -> None:
    size = len(shown)
    for a in range(size):
        for b in range(size):
            if a != b:
                bright = float(norm(shown[a, b])) > 0.55
                axes.text(
                    b, a, cell(float(shown[a, b])), ha="center", va="center", fontsize=9 if size <= 8 else 7,
                    color="#1d2126" if bright == is_good else "white",
                )  # fmt: skip


def _draw_hosts(axes: Any, hosts: tuple[int, ...]) -> None:
    """Lines between ranks that are neighbours by number, and on different hosts."""
    if len(set(hosts)) in (1, len(hosts)):
        return
    for rank in range(1, len(hosts)):
        if hosts[rank] != hosts[rank - 1]:
            for line in (axes.axhline, axes.axvline):
                line(rank - 0.5, color="white", linewidth=2.5)
