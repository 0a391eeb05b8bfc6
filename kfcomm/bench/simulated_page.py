"""The page of simulations: time over size for each world, time over ranks for each size, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kfcomm.bench.drawing import COLORS, LINE_WIDTH, MARKS, STYLE, Drawing, as_svg, mark_axis, size_axis
from kfcomm.bench.html import Section, document, preformatted_html, quiet_html, table_html
from kfcomm.bench.simulated import worlds_of
from kfcomm.common.sizes import show_size
from kfcomm.simulate import Result

if TYPE_CHECKING:
    from kfcomm.bench.simulated import Simulations

_NOTE = (
    "Time is virtual: from the moment at which all ranks begin until the last one has its result. bound is what the "
    "busiest port needs at least for what goes through it; in the plots it is dotted. algbw is size / time; busbw is "
    "algbw × 2(n−1)/n. 1 GB is 10⁹ bytes."
)
Axis = Callable[[Result], float]


def page(simulations: Simulations) -> str:
    """The page of at least one result.

    Raises:
        ImportError: matplotlib is not installed.
    """
    data = simulations.as_json()
    table = simulations.table()
    sections = [
        *(Section(drawing.title, drawing.svg) for drawing in drawings(simulations.results)),
        Section("Results", table_html(table) + quiet_html(_NOTE)),
        Section("Network", preformatted_html(json.dumps(data["network"], indent=1))),
    ]
    return document("kfcomm simulate", [simulations.title()], table.settings(), sections)


def drawings(results: Sequence[Result]) -> Iterator[Drawing]:
    """Time over size for each world, where there are several sizes, and over ranks, where there are several worlds.

    Over ranks for the smallest, the median and the largest size only. Bars, where there is one size and one world.
    """
    worlds, sizes = worlds_of(results), sorted({result.nbytes for result in results})
    if len(sizes) > 1:
        for hosts, ranks in worlds:
            chosen = [result for result in results if (result.num_hosts, result.size) == (hosts, ranks)]
            where = f"{ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}"
            yield Drawing(f"Time over size, {where}", _over_sizes(chosen, f"sizes {hosts} {ranks}"))
    if len(worlds) > 1:
        for nbytes in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            chosen = [result for result in results if result.nbytes == nbytes]
            yield Drawing(f"Time over ranks, {show_size(nbytes)}", _over_ranks(chosen, f"ranks {nbytes}"))
    if len(sizes) == len(worlds) == 1:
        yield Drawing("Time", _bars(results))


def _over_sizes(results: Sequence[Result], salt: str) -> str:
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        series = _draw(axes, results, lambda result: result.nbytes)
        size_axis(axes, sorted({result.nbytes for result in results}))
        return _finished(figure, axes, series, salt)


def _over_ranks(results: Sequence[Result], salt: str) -> str:
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        series = _draw(axes, results, lambda result: result.size)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted({result.size for result in results})))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.set_xlabel("ranks")
        return _finished(figure, axes, series, salt)


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    return figure, figure.subplots()


def _draw(axes: Any, results: Sequence[Result], x: Axis) -> list[Line2D]:
    """A line for each strategy, with its bound dotted; returns what the legend shows."""
    handles = []
    for number, strategy in enumerate(dict.fromkeys(result.strategy for result in results)):
        chosen = sorted((result for result in results if result.strategy == strategy), key=x)
        color, mark = COLORS[number % len(COLORS)], MARKS[number // len(COLORS) % len(MARKS)]
        places = [x(result) for result in chosen]
        look: dict[str, Any] = {"color": color, "marker": mark, "markersize": 4, "linewidth": LINE_WIDTH}
        axes.plot(places, [result.seconds for result in chosen], **look)
        axes.plot(places, [result.bound_s for result in chosen], ":", color=color, linewidth=1)
        handles.append(Line2D([], [], label=strategy, **look))
    handles.append(Line2D([], [], color="#666666", linestyle=":", linewidth=1, label="bound of the busiest port"))
    return handles


def _finished(figure: Figure, axes: Any, handles: list[Line2D], salt: str) -> str:
    axes.set_ylabel("time")
    mark_axis(axes.yaxis, "s")
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return as_svg(figure, salt)


def _bars(results: Sequence[Result]) -> str:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.0 + 0.42 * len(results)), layout="constrained")
        axes = figure.subplots()
        longest = max(result.seconds for result in results) * 1e3
        for number, result in enumerate(results):
            time_ms, bound_ms = result.seconds * 1e3, result.bound_s * 1e3
            axes.barh(number, time_ms, color=COLORS[0], height=0.62)
            axes.plot([bound_ms] * 2, [number - 0.31, number + 0.31], color="#222222", linewidth=1.2)
            axes.text(time_ms + longest * 0.01, number, f"{time_ms:.4g} ms", va="center", fontsize=9)
        axes.set_yticks(range(len(results)), [result.strategy for result in results])
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.2)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("time in ms; the mark in a bar is the bound of the busiest port")
        return as_svg(figure, "simulated")
