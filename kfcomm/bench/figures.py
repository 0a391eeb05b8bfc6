"""Figures of benchmarks and simulations: SVG elements for `kfcomm.bench.pages`. Importing this needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from kfcomm.bench.steps import label
from kfcomm.bench.suite import BenchResult
from kfcomm.bench.topologies import worlds_of
from kfcomm.common.drawing import (
    CARD,
    COLORS,
    FAINT,
    INK,
    LINE_WIDTH,
    MARKS,
    STYLE,
    Drawing,
    as_svg,
    mark_axis,
    size_axis,
)
from kfcomm.common.sizes import show_rate, show_seconds, show_size
from kfcomm.simulate import Result as Simulated
from kfcomm.simulate import StepResult

_BAND = 0.15
_COMPUTE, _OVERLAPPED, _EXPOSED = COLORS[2], COLORS[0], COLORS[1]
_MOST_ROWS_INCHES = 6.0
_MOST_LABELS = 24
_Spans: TypeAlias = list[tuple[float, float]]


def drawn_results(results: Sequence[BenchResult]) -> Iterator[Drawing]:
    """A figure for each collective that was measured over sizes, and one for each workload."""
    for verb in dict.fromkeys(result.case.collective for result in results if result.case.workload is None):
        chosen = [result for result in results if (result.case.collective, result.case.workload) == (verb, None)]
        yield Drawing(verb.value, _measured_over_sizes(chosen), chosen)
    for workload in dict.fromkeys(result.case.workload for result in results if result.case.workload is not None):
        chosen = [result for result in results if result.case.workload == workload]
        bars = [_Bar.measured(each) for each in series_of(chosen)]
        label = "ms for all tensors: bar p50, whisker to p99; the bandwidth is algbw"
        yield Drawing(workload, _bars(bars, label, f"workload {workload}"), chosen)


def drawn_simulations(results: Sequence[Simulated]) -> Iterator[Drawing]:
    """Time over size for each world, where there are several sizes, and over ranks, where there are several worlds.

    Over ranks for the smallest, the median and the largest size only. Bars, where there is one size and one world.
    """
    worlds, sizes = worlds_of(results), sorted({result.nbytes for result in results})
    if len(sizes) > 1:
        for hosts, ranks in worlds:
            chosen = [result for result in results if (result.num_hosts, result.size) == (hosts, ranks)]
            where = f"{ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}"
            yield Drawing(
                f"Time over size, {where}",
                _simulated_over(chosen, attrgetter("nbytes"), size_axis, f"sizes {hosts} {ranks}"),
                chosen,
            )
    if len(worlds) > 1:
        for nbytes in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            chosen = [result for result in results if result.nbytes == nbytes]
            yield Drawing(
                f"Time over ranks, {show_size(nbytes)}",
                _simulated_over(chosen, attrgetter("size"), _ranks_axis, f"ranks {nbytes}"),
                chosen,
            )
    if len(sizes) == len(worlds) == 1:
        label = "time in ms; the mark in a bar is the bound of the busiest port"
        yield Drawing("Time", _bars([_Bar.simulated(result) for result in results], label, "simulated"), results)


def drawn_steps(results: Sequence[tuple[str, StepResult]]) -> Drawing:
    """A bar for each step: its compute, and its exposed communication."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.4 + 0.42 * len(results)), layout="constrained")
        axes = figure.subplots()
        longest_s = max(step.seconds for _, step in results)
        for row, (_, step) in enumerate(results):
            _span(axes, row, [(0.0, step.compute_s)], _COMPUTE)
            _span(axes, row, [(step.compute_s, step.seconds)], _EXPOSED)
            axes.plot([step.bound_s] * 2, [row - 0.31, row + 0.31], color=INK, linewidth=1.2)
            axes.text(step.seconds + longest_s * 0.01, row, show_seconds(step.seconds), va="center", fontsize=9)
        several = len({(step.size, step.num_hosts) for _, step in results}) > 1
        labels = [label(*result) if several else result[0] for result in results]
        axes.set_xlim(0, longest_s * 1.15)
        _rows(axes, labels)
        bound = Line2D([], [], color=INK, marker="|", linestyle="", markersize=9, label="bound")
        _draw_legend(figure, [_key("compute", _COMPUTE), _key("exposed communication", _EXPOSED), bound])
        return Drawing("Steps", as_svg(figure, "steps"), results)


def drawn_step(strategy: str, step: StepResult) -> Drawing:
    """Compute and calls over time, a row for each call."""
    with mpl.rc_context(STYLE):
        rows = 1 + len(step.calls)
        figure = Figure(figsize=(7.5, 1.4 + min(0.3 * rows, _MOST_ROWS_INCHES)), layout="constrained")
        axes = figure.subplots()
        _span(axes, 0, step.compute_spans_s, _COMPUTE)
        for row, call in enumerate(step.calls, 1):
            beside, alone = _split(call.posted_s, call.done_s, step.compute_spans_s)
            _span(axes, row, beside, _OVERLAPPED)
            _span(axes, row, alone, _EXPOSED)
        numbered = list(enumerate(step.calls, 1))
        calls = (f"{call.name or f'call {number}'}, {show_size(call.nbytes)}" for number, call in numbered)
        axes.set_xlim(0, step.seconds * 1.02)
        _rows(axes, ["compute", *calls])
        keys = [("compute", _COMPUTE), ("call beside compute", _OVERLAPPED), ("call without compute", _EXPOSED)]
        _draw_legend(figure, [_key(*one) for one in keys])
        title = label(strategy, step)
        return Drawing(title, as_svg(figure, f"step {title}"), numbered)


def _split(begin_s: float, end_s: float, spans_s: Sequence[tuple[float, float]]) -> tuple[_Spans, _Spans]:
    """The parts of a time inside of ascending spans, and those outside."""
    inside, outside, at_s = [], [], begin_s
    for low_s, high_s in spans_s:
        low_s, high_s = max(low_s, at_s), min(high_s, end_s)
        if low_s < high_s:
            outside.append((at_s, low_s))
            inside.append((low_s, high_s))
            at_s = high_s
    return inside, [*outside, (at_s, end_s)]


def _span(axes: Any, row: int, spans_s: Sequence[tuple[float, float]], color: str) -> None:
    axes.broken_barh([(begin, end - begin) for begin, end in spans_s if end > begin], (row - 0.31, 0.62), color=color)


def _rows(axes: Any, labels: Sequence[str]) -> None:
    """Rows from the top down over seconds; of many, not all have a label."""
    every = math.ceil(len(labels) / _MOST_LABELS)
    axes.set_yticks(range(0, len(labels), every), labels[::every])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))


def _key(name: str, color: str) -> Line2D:
    return Line2D([], [], color=color, marker="s", linestyle="", markersize=8, label=name)


@dataclass(frozen=True, slots=True)
class BenchSeries:
    """Results that differ in size alone."""

    label: str
    results: tuple[BenchResult, ...]
    color: str
    mark: str


def series_of(results: Sequence[BenchResult]) -> list[BenchSeries]:
    """The results that differ in size alone, with a label that says only what differs between series."""
    groups: dict[tuple[str, ...], list[BenchResult]] = {}
    for result in results:
        case = result.case
        groups.setdefault((case.strategy, case.transport, case.dtype, case.mode or ""), []).append(result)
    varying = [len(set(values)) > 1 for values in zip(*groups, strict=True)]
    return [
        BenchSeries(
            ", ".join(part for part, varies in zip(key, varying, strict=True) if varies)
            or f"strategy {key[0]}, transport {key[1]}",
            tuple(sorted(group, key=lambda result: result.case.nbytes)),
            *_look(number),
        )
        for number, (key, group) in enumerate(groups.items())
    ]


def _look(number: int) -> tuple[str, str]:
    """Colour and mark of a series."""
    return COLORS[number % len(COLORS)], MARKS[number // len(COLORS) % len(MARKS)]


def _measured_over_sizes(results: Sequence[BenchResult]) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 7.4), layout="constrained")
        bandwidth, latency = figure.subplots(2, 1)
        series = series_of(results)
        for each in series:
            _draw_bandwidth(bandwidth, each)
            _draw_latency(latency, each)
        for axes, title, unit in (
            (bandwidth, "Bandwidth at p50, band to p99", "B/s"),
            (latency, "Time at p50, band to p99", "s"),
        ):
            size_axis(axes, sorted({result.case.nbytes for result in results}))
            axes.set_title(title, fontsize=10.5, loc="left")
            mark_axis(axes.yaxis, unit)
        line: dict[str, Any] = {"color": FAINT, "linewidth": LINE_WIDTH}
        dotted: dict[str, Any] = {"linestyle": ":", "marker": "o", "markersize": 4, "markerfacecolor": CARD}
        kinds = [Line2D([], [], label="busbw", **line), Line2D([], [], label="algbw", **line, **dotted)]
        bandwidth.legend(handles=kinds, loc="best", frameon=False, fontsize=9)
        handles = [
            Line2D([], [], color=each.color, marker=each.mark, markersize=4, linewidth=LINE_WIDTH, label=each.label)
            for each in series
        ]
        _draw_legend(figure, handles)
        return as_svg(figure, f"sizes {results[0].case.collective}")


def _draw_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    # About 80 characters fit side by side, of which each mark takes 10.
    rows = math.ceil(len(handles) * (10 + max(len(str(each.get_label())) for each in handles)) / 80)
    figure.legend(handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows), frameon=False)


def _draw_bandwidth(axes: Any, series: BenchSeries) -> None:
    sizes = [result.case.nbytes for result in series.results]
    busbw = [result.busbw * 1e9 for result in series.results]
    slow = [result.bandwidth(result.p99_s) * result.factor * 1e9 for result in series.results]
    axes.plot(sizes, busbw, color=series.color, marker=series.mark, markersize=3.5, linewidth=LINE_WIDTH)
    _draw_band(axes, sizes, slow, busbw, series.color)
    if any(result.factor != 1 for result in series.results):
        algbw = [result.algbw * 1e9 for result in series.results]
        axes.plot(sizes, algbw, f":{series.mark}", color=series.color, markersize=3, markerfacecolor=CARD)


def _draw_latency(axes: Any, series: BenchSeries) -> None:
    sizes = [result.case.nbytes for result in series.results]
    p50 = [result.p50_s for result in series.results]
    p99 = [result.p99_s for result in series.results]
    axes.plot(sizes, p50, color=series.color, marker=series.mark, markersize=3.5, linewidth=LINE_WIDTH)
    _draw_band(axes, sizes, p50, p99, series.color)


def _draw_band(axes: Any, sizes: Sequence[int], low: Sequence[float], high: Sequence[float], color: str) -> None:
    axes.fill_between(sizes, low, high, color=color, alpha=_BAND, linewidth=0)
    # A band over one size has no width.
    if len(sizes) == 1:
        axes.vlines(sizes, low, high, color=color, linewidth=1)


def _simulated_over(
    results: Sequence[Simulated], x: Callable[[Simulated], int], mark: Callable[[Any, list[int]], None], salt: str
) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5), layout="constrained")
        axes = figure.subplots()
        handles = _draw_simulated(axes, results, x)
        mark(axes, sorted({x(result) for result in results}))
        axes.set_ylabel("time")
        mark_axis(axes.yaxis, "s")
        _draw_legend(figure, handles)
        return as_svg(figure, salt)


def _ranks_axis(axes: Any, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("ranks")


def _draw_simulated(axes: Any, results: Sequence[Simulated], x: Callable[[Simulated], float]) -> list[Line2D]:
    """A line for each strategy, with its bound dotted; returns what the legend shows."""
    handles = []
    for number, strategy in enumerate(dict.fromkeys(result.strategy for result in results)):
        chosen = sorted((result for result in results if result.strategy == strategy), key=x)
        color, mark = _look(number)
        places = [x(result) for result in chosen]
        look: dict[str, Any] = {"color": color, "marker": mark, "markersize": 4, "linewidth": LINE_WIDTH}
        axes.plot(places, [result.seconds for result in chosen], **look)
        axes.plot(places, [result.bound_s for result in chosen], ":", color=color, linewidth=1)
        handles.append(Line2D([], [], label=strategy, **look))
    handles.append(Line2D([], [], color=FAINT, linestyle=":", linewidth=1, label="bound of the busiest port"))
    return handles


@dataclass(frozen=True, slots=True)
class _Bar:
    """A horizontal bar of milliseconds."""

    label: str  # to the left of it
    ms: float  # its length
    end_ms: float  # where its text begins
    text: str  # to the right of it
    mark: tuple[tuple[float, float], tuple[float, float]]  # a line on it, as milliseconds and places across the bar
    marker: str  # at both ends of that line

    @classmethod
    def measured(cls, series: BenchSeries) -> _Bar:
        (result,) = series.results
        p50, p99 = result.p50_s * 1e3, result.p99_s * 1e3
        text = f"{show_seconds(result.p50_s)}, {show_rate(1e9 * result.algbw)}"
        return cls(series.label, p50, p99, text, ((p50, p99), (0.0, 0.0)), "|")

    @classmethod
    def simulated(cls, result: Simulated) -> _Bar:
        ms, bound_ms = result.seconds * 1e3, result.bound_s * 1e3
        return cls(result.strategy, ms, ms, show_seconds(result.seconds), ((bound_ms, bound_ms), (-0.31, 0.31)), "")


def _bars(bars: Sequence[_Bar], label: str, salt: str) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 1.1 + 0.42 * len(bars)), layout="constrained")
        axes = figure.subplots()
        longest = max(bar.end_ms for bar in bars)
        for number, bar in enumerate(bars):
            places, across = bar.mark
            axes.barh(number, bar.ms, color=COLORS[0], height=0.62)
            axes.plot(places, [number + at for at in across], color=INK, linewidth=1.2, marker=bar.marker)
            axes.text(bar.end_ms + longest * 0.01, number, bar.text, va="center", fontsize=9)
        axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.25)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
        return as_svg(figure, salt)
