"""The figures of the page, as SVG elements: bandwidth and latency over size, and bars for workloads.

Needs matplotlib, which is used without its global state: no window, no ``pyplot``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from kfcomm.bench.figures import Result
from kfcomm.sizes import show_size

_STYLE: dict[Any, Any] = {
    # letters stay letters: small, searchable, and set in the reader's own font
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e6ea",
    "axes.edgecolor": "#8a9099",
}
# told apart also by those who do not see all colours (Okabe and Ito 2008), then again with other marks
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444")
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_LINE_WIDTH = 1.6
_BAND = 0.15


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure.

    Attributes:
        title: what it shows.
        svg: the element, to be put into a page.
    """

    title: str
    svg: str


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
            _COLORS[number % len(_COLORS)],
            _MARKS[number // len(_COLORS) % len(_MARKS)],
        )
        for number, (key, group) in enumerate(groups.items())
    ]


def _over_sizes(results: Sequence[Result]) -> str:
    with mpl.rc_context(_STYLE):
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
            _scale(axes, sorted({result.case.nbytes for result in results}))
            axes.set_title(title, fontsize=10.5, loc="left")
            _mark(axes.yaxis, unit)
        kinds = [
            Line2D([], [], color="#666666", linewidth=_LINE_WIDTH, label="busbw"),
            Line2D(
                [],
                [],
                color="#666666",
                linewidth=_LINE_WIDTH,
                linestyle=":",
                marker="o",
                markersize=4,
                markerfacecolor="white",
                label="algbw",
            ),
        ]
        bandwidth.legend(handles=kinds, loc="best", frameon=False, fontsize=9)
        handles = [
            Line2D([], [], color=each.color, marker=each.mark, markersize=4, linewidth=_LINE_WIDTH, label=each.label)
            for each in series
        ]
        rows = math.ceil(len(handles) * (10 + max(len(each.label) for each in series)) / 130)
        figure.legend(handles=handles, loc="outside lower center", ncols=math.ceil(len(handles) / rows), frameon=False)
        return _svg(figure, f"sizes {results[0].case.collective}")


def _draw_bandwidth(axes: Any, series: _Series) -> None:
    sizes = [result.case.nbytes for result in series.results]
    busbw = [result.busbw * 1e9 for result in series.results]
    slow = [result.bandwidth(result.p99_s) * result.factor * 1e9 for result in series.results]
    axes.plot(sizes, busbw, color=series.color, marker=series.mark, markersize=3.5, linewidth=_LINE_WIDTH)
    _draw_band(axes, sizes, slow, busbw, series.color)
    if any(result.factor != 1 for result in series.results):
        algbw = [result.algbw * 1e9 for result in series.results]
        axes.plot(sizes, algbw, f":{series.mark}", color=series.color, markersize=3, markerfacecolor="white")


def _draw_latency(axes: Any, series: _Series) -> None:
    sizes = [result.case.nbytes for result in series.results]
    p50 = [result.p50_s for result in series.results]
    p99 = [result.p99_s for result in series.results]
    axes.plot(sizes, p50, color=series.color, marker=series.mark, markersize=3.5, linewidth=_LINE_WIDTH)
    _draw_band(axes, sizes, p50, p99, series.color)


def _draw_band(axes: Any, sizes: Sequence[int], low: Sequence[float], high: Sequence[float], color: str) -> None:
    axes.fill_between(sizes, low, high, color=color, alpha=_BAND, linewidth=0)
    if len(sizes) == 1:
        axes.vlines(sizes, low, high, color=color, linewidth=1)


def _scale(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_size(round(value))))
    axes.tick_params(axis="x", labelrotation=30)
    axes.set_xlabel("size of the message")
    if len(sizes) == 1:
        axes.set_xlim(sizes[0] / 2, sizes[0] * 2)


def _mark(axis: Any, unit: str) -> None:
    """Ticks on a logarithmic axis: some however short it is, with 1, 2, 5 in each decade if there are few."""
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    below, above = [tick for tick in ticks if tick <= low], [tick for tick in ticks if tick >= high]
    axis.set_view_interval(max(below, default=low), min(above, default=high), ignore=True)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(EngFormatter(unit=unit))
    axis.set_minor_locator(NullLocator())


def _bars(results: Sequence[Result]) -> str:
    with mpl.rc_context(_STYLE):
        series = _series(results)
        figure = Figure(figsize=(11, 1.1 + 0.42 * len(series)), layout="constrained")
        axes = figure.subplots()
        longest = max(each.results[0].p99_s for each in series) * 1e3
        for number, each in enumerate(series):
            (result,) = each.results
            p50, p99 = result.p50_s * 1e3, result.p99_s * 1e3
            axes.barh(number, p50, color=_COLORS[0], height=0.62)
            axes.plot([p50, p99], [number, number], color="#222222", linewidth=1.2, marker="|")
            axes.text(p99 + longest * 0.01, number, f"{p50:.1f} ms, {result.algbw:.2f} GB/s", va="center", fontsize=9)
        axes.set_yticks(range(len(series)), [each.label for each in series])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.25)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("ms for all tensors: bar p50, whisker to p99; the bandwidth is algbw")
        return _svg(figure, f"workload {results[0].case.workload}")


def _svg(figure: Figure, salt: str) -> str:
    """The figure as an element: ids differ between figures, and nothing in it depends on when it was drawn."""
    text = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]
    prefix = re.sub(r"\W+", "-", salt)
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    return re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", element)
