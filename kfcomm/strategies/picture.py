"""Strategies as self-contained SVG pictures.

Owns colours and shapes: hosts as boxes (or bands, where the ranks stand in a circle), ranks as circles, sends as
arrows coloured by phase, a title and a legend. Positions come from `placement`. Knows nothing of files.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import Final

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import measure
from kfcomm.strategies.placement import RADIUS, Box, Placement, Point, in_boxes, on_circle
from kfcomm.types import Layout

_PHASES: Final = (("reduce", "#d9480f", "towards the root"), ("broadcast", "#1971c2", "from the root"))
_HOST_FILLS: Final = ("#edf2ff", "#ebfbee", "#fff9db", "#fff0f6", "#e3fafc", "#f3f0ff", "#fff4e6", "#f1f3f5")
_HOST_LINES: Final = ("#91a7ff", "#8ce99a", "#ffe066", "#faa2c1", "#66d9e8", "#b197fc", "#ffc078", "#ced4da")
_INK: Final = "#212529"
_FAINT: Final = "#868e96"
_EDGE: Final = 30.0  # white space around the picture
_HEAD: Final = 66.0  # room for the title
_FOOT: Final = 44.0  # room for the legend
_BAND: Final = 46.0  # width of a host's band on the circle
_LEAST_WIDTH: Final = 640.0  # the title and the legend need this


def as_svg(strategy: Strategy, layout: Layout, pair: int = 0) -> str:
    """A picture of one graph pair, as the text of an SVG file.

    Raises:
        ConfigError: sizes differ, or the pair does not exist.
    """
    if strategy.size != layout.size:
        raise ConfigError(f"strategy {strategy.name!r} is for {strategy.size} ranks, not for {layout.size}")
    if not 0 <= pair < len(strategy.pairs):
        raise ConfigError(f"strategy {strategy.name!r} has graph pairs 0..{len(strategy.pairs) - 1}, no pair {pair}")
    graphs = strategy.pairs[pair]
    placement = _place(graphs, layout)
    left, top, width, height = _frame(placement)
    box = f"{left:.1f} {top:.1f} {width:.1f} {height:.1f}"
    font = "DejaVu Sans, Helvetica, Arial, sans-serif"
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{width:.0f}" height="{height:.0f}"'
    lines = [
        f'<svg {head} font-family="{font}">',
        *_markers(),
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="white"/>',
        *_title(strategy, layout, pair, (left + _EDGE, top + _EDGE)),
        *_hosts(placement, graphs, layout),
        *_edges(graphs, layout, placement.points, goes_whole=strategy.goes_whole),
        *_ranks(graphs.root, placement.points),
        *_legend((left + _EDGE, top + height - _EDGE), layout.num_hosts > 1, goes_whole=strategy.goes_whole),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _place(pair: GraphPair, layout: Layout) -> Placement:
    chain = pair.size > 2 and all(
        len(below) <= 1 for graph in (pair.reduce, pair.broadcast) for below in graph.children
    )
    return on_circle(pair.broadcast.preorder, layout) if chain else in_boxes(pair.reduce, layout)


def _frame(placement: Placement) -> tuple[float, float, float, float]:
    """Left, top, width and height of the whole picture."""
    reach = placement.radius + 2 * _BAND
    corners = [(-reach, -reach), (reach, reach)] if not placement.boxes else []
    for box in placement.boxes:
        corners += [(box.x, box.y), (box.x + box.width, box.y + box.height)]
    left, right = min(x for x, _ in corners), max(x for x, _ in corners)
    top, bottom = min(y for _, y in corners), max(y for _, y in corners)
    width = max(right - left, _LEAST_WIDTH)
    left = (left + right - width) / 2
    return left - _EDGE, top - _EDGE - _HEAD, width + 2 * _EDGE, bottom - top + 2 * _EDGE + _HEAD + _FOOT


def _markers() -> Iterator[str]:
    yield "<defs>"
    for name, colour, _ in _PHASES:
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.6 L8 4 L0 7.4 z" fill="{colour}"/></marker>'
        )
    yield "</defs>"


def _title(strategy: Strategy, layout: Layout, pair: int, at: Point) -> Iterator[str]:
    cost = measure(strategy, layout)
    root = strategy.pairs[pair].root
    which = f"pair {pair} of 0..{len(strategy.pairs) - 1}, root {root}" if len(strategy.pairs) > 1 else f"root {root}"
    head = f"{html.escape(strategy.name)} <tspan fill='{_FAINT}' font-weight='normal'>· {which}</tspan>"
    yield f'<text x="{at[0]:.1f}" y="{at[1] + 10:.1f}" font-size="22" font-weight="bold" fill="{_INK}">{head}</text>'
    facts = f"{layout.size} rank{'s' * (layout.size > 1)} on {layout.num_hosts} host{'s' * (layout.num_hosts > 1)}"
    facts += f" · all_reduce in {cost.steps} steps · per byte the busiest rank moves {cost.bytes}"
    facts += f", the busiest host {cost.cross_host_bytes}" if layout.num_hosts > 1 else ""
    yield f'<text x="{at[0]:.1f}" y="{at[1] + 34:.1f}" font-size="12" fill="{_FAINT}">{facts}</text>'


def _hosts(placement: Placement, pair: GraphPair, layout: Layout) -> Iterator[str]:
    for box in placement.boxes:
        yield from _box(box)
    if not placement.boxes:
        yield from _bands(pair.broadcast, layout, placement.radius)


def _box(box: Box) -> Iterator[str]:
    yield (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="12" '
        f'fill="{_HOST_FILLS[box.host % 8]}" stroke="{_HOST_LINES[box.host % 8]}"/>'
    )
    yield f'<text x="{box.x + 12:.1f}" y="{box.y + 19:.1f}" font-size="12" fill="{_FAINT}">host {box.host}</text>'


def _bands(chain: Graph, layout: Layout, radius: float) -> Iterator[str]:
    """An arc behind each run of ranks of one host."""
    order, step = chain.preorder, 2 * math.pi / chain.size
    starts = [at for at, rank in enumerate(order) if layout.hosts[rank] != layout.hosts[order[at - 1]]]
    for start, stop in zip(starts, [*starts[1:], starts[0] + len(order)], strict=True):
        host = layout.hosts[order[start]]
        ends = (start - 0.42) * step, (stop - 1 + 0.42) * step
        (x0, y0), (x1, y1) = (_polar(radius, angle) for angle in ends)
        large = int(ends[1] - ends[0] > math.pi)
        yield (
            f'<path d="M{x0:.1f} {y0:.1f} A{radius:.1f} {radius:.1f} 0 {large} 1 {x1:.1f} {y1:.1f}" fill="none" '
            f'stroke="{_HOST_LINES[host % 8]}" stroke-opacity="0.4" stroke-width="{_BAND}"/>'
        )
        x, y = _polar(radius + 0.95 * _BAND, sum(ends) / 2)
        label = f"host {host}" if len(starts) <= 16 else str(host)
        yield f'<text x="{x:.1f}" y="{y + 4:.1f}" font-size="12" text-anchor="middle" fill="{_FAINT}">{label}</text>'


def _polar(radius: float, angle: float) -> Point:
    return radius * math.sin(angle), -radius * math.cos(angle)


def _edges(pair: GraphPair, layout: Layout, points: tuple[Point, ...], *, goes_whole: bool) -> Iterator[str]:
    (reduce, warm, _), (broadcast, cold, _) = _PHASES
    for parent, child in pair.reduce.edges:
        yield _arrow(child, parent, layout, points, (reduce, warm))
    for parent, child in () if goes_whole else pair.broadcast.edges:
        yield _arrow(parent, child, layout, points, (broadcast, cold))


def _arrow(a: int, b: int, layout: Layout, points: tuple[Point, ...], phase: tuple[str, str]) -> str:
    """From rank ``a`` to rank ``b``; the two phases bend to opposite sides of the line between them."""
    (x0, y0), (x1, y1) = points[a], points[b]
    length = math.hypot(x1 - x0, y1 - y0)
    along, across = ((x1 - x0) / length, (y1 - y0) / length), ((y1 - y0) / length, (x0 - x1) / length)
    side = (1 if a < b else -1) * (1 if phase[0] == "reduce" else -1)
    off = 4.0 * side
    bend = off + min(14.0, 0.08 * length) * side
    start, stop = (x0 + along[0] * RADIUS, y0 + along[1] * RADIUS), (x1 - along[0] * RADIUS, y1 - along[1] * RADIUS)
    middle = (x0 + x1) / 2 + across[0] * bend, (y0 + y1) / 2 + across[1] * bend
    dash = ' stroke-dasharray="6 3"' if layout.hosts[a] != layout.hosts[b] else ""
    return (
        f'<path d="M{start[0] + across[0] * off:.1f} {start[1] + across[1] * off:.1f} '
        f'Q{middle[0]:.1f} {middle[1]:.1f} {stop[0] + across[0] * off:.1f} {stop[1] + across[1] * off:.1f}" '
        f'fill="none" stroke="{phase[1]}" stroke-width="1.5"{dash} marker-end="url(#{phase[0]})"/>'
    )


def _ranks(root: int, points: tuple[Point, ...]) -> Iterator[str]:
    for rank, (x, y) in enumerate(points):
        fill, ink = (_INK, "white") if rank == root else ("white", _INK)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{fill}" stroke="{_INK}" stroke-width="1.4"/>'
        yield (
            f'<text x="{x:.1f}" y="{y + 4:.1f}" font-size="{12 if rank < 100 else 10}" text-anchor="middle" '
            f'fill="{ink}">{rank}</text>'
        )


def _legend(at: Point, several_hosts: bool, *, goes_whole: bool) -> Iterator[str]:
    x, y = at
    for name, colour, meaning in _PHASES[:1] if goes_whole else _PHASES:
        yield (
            f'<path d="M{x:.1f} {y - 4:.1f} h30" stroke="{colour}" stroke-width="1.5" marker-end="url(#{name})"/>'
            f'<text x="{x + 38:.1f}" y="{y:.1f}" font-size="12" fill="{_INK}">{name}, {meaning}</text>'
        )
        x += 210
    if several_hosts:
        yield (
            f'<path d="M{x:.1f} {y - 4:.1f} h30" stroke="{_FAINT}" stroke-width="1.5" stroke-dasharray="6 3"/>'
            f'<text x="{x + 38:.1f}" y="{y:.1f}" font-size="12" fill="{_INK}">between hosts</text>'
        )
