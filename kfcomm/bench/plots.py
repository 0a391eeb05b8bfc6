"""The figures of the page, as SVG elements: bandwidth and latency over size, and bars for workloads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kfcomm.bench.drawing import COLORS, LINE_WIDTH, MARKS, STYLE, Drawing, as_svg, mark_axis, size_axis
from kfcomm.bench.figures import Result

_BAND = 0.15


def drawings(results: Sequence[Result]) -> Iterator[Drawing]:
    """A figure for each collective that was measured over sizes, and one for each workload."""
    for verb in dict.fromkeys(result.case.collective for result in results if result.case.workload is None):
        chosen = [result for result in results if (result.case.collective, result.case.workload) == (verb, None)]
        yield Drawing(verb.value, _over_sizes(chosen))
    for workload in dict.fromkeys(result.case.workload for result in results if result.case.workload is not None):
        yield Drawing(workload, _bars([result for result in results if result.case.workload == workload]))


@dataclass(frozen=True, slots=True)
class _Series:
    label: str
    results: tuple[Result, ...]
    color: str
    mark: str


def _series(results: Sequence[Result]) -> list[_Series]:
    """The results that differ in size alone, with a label that says only what differs between series."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        case = result.case
        groups.setdefault((case.strategy, case.transport, case.dtype, case.mode or ""), []).append(result)
    varying = [len(set(values)) > 1 for values in zip(*groups, strict=True)]
    return [
        _Series(
            ", ".join(part for part, varies in zip(key, varying, strict=True) if varies)
            or f"strategy {key[0]}, transport {key[1]}",
            tuple(sorted(group, key=lambda result: result.case.nbytes)),
            COLORS[number % len(COLORS)],
            MARKS[number // len(COLORS) % len(MARKS)],
        )
        for number, (key, group) in enumerate(groups.items())
    ]


def _over_sizes(results: Sequence[Result]) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        bandwidth, latency = figure.subplots(1, 2)
        series = _series(results)
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
        kinds = [
            Line2D([], [], color="#666666", linewidth=LINE_WIDTH, label="busbw"),
            Line2D(
                [],
                [],
                color="#666666",
                linewidth=LINE_WIDTH,
                linestyle=":",
                marker="o",
                markersize=4,
                markerfacecolor="white",
                label="algbw",
            ),
        ]
        bandwidth.legend(handles=kinds, loc="best", frameon=False, fontsize=9)
        handles = [
            Line2D([], [], color=each.color, marker=each.mark, markersize=4, linewidth=LINE_WIDTH, label=each.label)
            for each in series
        ]
        rows = math.ceil(len(handles) * (10 + max(len(each.label) for each in series)) / 130)
        figure.legend(handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows), frameon=False)
        return as_svg(figure, f"sizes {results[0].case.collective}")


def _draw_bandwidth(axes: Any, series: _Series) -> None:
    sizes = [result.case.nbytes for result in series.results]
    busbw = [result.busbw * 1e9 for result in series.results]
    slow = [result.bandwidth(result.p99_s) * result.factor * 1e9 for result in series.results]
    axes.plot(sizes, busbw, color=series.color, marker=series.mark, markersize=3.5, linewidth=LINE_WIDTH)
    _draw_band(axes, sizes, slow, busbw, series.color)
    if any(result.factor != 1 for result in series.results):
        algbw = [result.algbw * 1e9 for result in series.results]
        axes.plot(sizes, algbw, f":{series.mark}", color=series.color, markersize=3, markerfacecolor="white")


def _draw_latency(axes: Any, series: _Series) -> None:
    sizes = [result.case.nbytes for result in series.results]
    p50 = [result.p50_s for result in series.results]
    p99 = [result.p99_s for result in series.results]
    axes.plot(sizes, p50, color=series.color, marker=series.mark, markersize=3.5, linewidth=LINE_WIDTH)
    _draw_band(axes, sizes, p50, p99, series.color)


def _draw_band(axes: Any, sizes: Sequence[int], low: Sequence[float], high: Sequence[float], color: str) -> None:
    axes.fill_between(sizes, low, high, color=color, alpha=_BAND, linewidth=0)
    if len(sizes) == 1:
        axes.vlines(sizes, low, high, color=color, linewidth=1)


def _bars(results: Sequence[Result]) -> str:
    with mpl.rc_context(STYLE):
        series = _series(results)
        figure = Figure(figsize=(11, 1.1 + 0.42 * len(series)), layout="constrained")
        axes = figure.subplots()
        longest = max(each.results[0].p99_s for each in series) * 1e3
        for number, each in enumerate(series):
            (result,) = each.results
            p50, p99 = result.p50_s * 1e3, result.p99_s * 1e3
            axes.barh(number, p50, color=COLORS[0], height=0.62)
            axes.plot([p50, p99], [number, number], color="#222222", linewidth=1.2, marker="|")
            axes.text(p99 + longest * 0.01, number, f"{p50:.1f} ms, {result.algbw:.2f} GB/s", va="center", fontsize=9)
        axes.set_yticks(range(len(series)), [each.label for each in series])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.25)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("ms for all tensors: bar p50, whisker to p99; the bandwidth is algbw")
        return as_svg(figure, f"workload {results[0].case.workload}")
