"""Strategies as self-contained SVG pictures.

Hosts are boxes (or bands, where the ranks stand in a circle), ranks circles, sends arrows coloured by phase. Three
arrangements: a chain goes round one circle; a tree on one host spreads from its root in the middle; a tree over several
hosts has a box for each, inside which the tree's parts fan out below their uppermost ranks, and the boxes stand in
rows, those nearer to the root higher. Coordinates are pixels, y downwards. Knows nothing of files.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.cost import measure
from kfcomm.types import Layout

RADIUS: Final = 14.0  # of a rank's circle
SPACING: Final = 44.0  # between neighbouring circles, at least
_LEVEL: Final = 66.0  # between a parent and its children, at least
_MARGIN: Final = 20.0  # between a box's edge and its circles
_BOX_HEAD: Final = 24.0  # room for a box's label
_GAP: Final = 56.0  # between boxes
_ROW: Final = 1500.0  # a row of boxes longer than this is broken

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A host's rectangle."""

    host: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Positions of all ranks, and the boxes of the hosts (none where the ranks stand in a circle of several)."""

    points: tuple[Point, ...]
    boxes: tuple[Box, ...]
    radius: float = 0.0  # of the circle on which all ranks stand, around the origin; 0 where they do not


def on_circle(order: Sequence[int], layout: Layout) -> Placement:
    """Ranks in this order clockwise round a circle, the first on top."""
    radius = max(2 * SPACING, _radius_for(2 * math.pi / len(order)))
    angles = {rank: 2 * math.pi * at / len(order) for at, rank in enumerate(order)}
    points = [(radius * math.sin(angles[rank]), -radius * math.cos(angles[rank])) for rank in range(len(order))]
    boxes = (_around(0, points),) if layout.num_hosts == 1 else ()
    return Placement(tuple(points), boxes, radius)


def in_boxes(graph: Graph, layout: Layout) -> Placement:
    """A tree, its hosts in boxes."""
    if layout.num_hosts == 1:
        points = _fan(graph, graph.root, layout, 2 * math.pi)
        placed = [points[rank] for rank in range(graph.size)]
        return Placement(tuple(placed), (_around(0, placed),))
    return _rows(graph, layout)


def _rows(graph: Graph, layout: Layout) -> Placement:
    insides = {host: _inside(graph, layout, host) for host in range(layout.num_hosts)}
    points: dict[int, Point] = {}
    boxes: list[Box] = []
    top = 0.0
    for row in _broken(_levels(graph, layout), insides):
        sizes = [_around(host, list(insides[host].values())) for host in row]
        left = -(sum(box.width for box in sizes) + _GAP * (len(row) - 1)) / 2
        for box in sizes:
            boxes.append(Box(box.host, left, top, box.width, box.height))
            points |= {rank: (x + left - box.x, y + top - box.y) for rank, (x, y) in insides[box.host].items()}
            left += box.width + _GAP
        top += max(box.height for box in sizes) + _GAP
    return Placement(tuple(points[rank] for rank in range(graph.size)), tuple(boxes))


def _levels(graph: Graph, layout: Layout) -> list[list[int]]:
    """The hosts in rows: the root's host, then those first reached from it, and so on."""
    level: dict[int, int] = {layout.hosts[graph.root]: 0}
    for above, below in graph.edges:
        # Edges come in preorder: the host above has its level already.
        level.setdefault(layout.hosts[below], level[layout.hosts[above]] + 1)
    return [[host for host, at in level.items() if at == depth] for depth in range(max(level.values()) + 1)]


def _broken(rows: list[list[int]], insides: dict[int, dict[int, Point]]) -> list[list[int]]:
    """Rows that are too wide cut into several."""
    broken: list[list[int]] = []
    for row in rows:
        width = math.inf
        for host in row:
            extent = _around(host, list(insides[host].values())).width + _GAP
            if width + extent > _ROW:
                broken.append([])
                width = 0.0
            broken[-1].append(host)
            width += extent
    return broken


def _inside(graph: Graph, layout: Layout, host: int) -> dict[int, Point]:
    """The ranks of one host: each part of the tree a fan, side by side."""
    placed: dict[int, Point] = {}
    left = 0.0
    for rank in graph.preorder:
        if layout.hosts[rank] == host and rank not in placed:
            fan = _fan(graph, rank, layout, math.pi)
            shift = left - min(x for x, _ in fan.values())
            placed |= {r: (x + shift, y) for r, (x, y) in fan.items()}
            left = max(x for x, _ in placed.values()) + SPACING
    return placed


def _fan(graph: Graph, top: int, layout: Layout, span: float) -> dict[int, Point]:
    """The part of a tree below ``top`` on its host, spread over an angle of ``span`` below it."""
    local: dict[int, tuple[int, ...]] = {}
    stack = [top]
    while stack:
        rank = stack.pop()
        local[rank] = _local_children(graph, rank, layout)
        stack.extend(local[rank])
    leaves = dict.fromkeys(local, 1)
    # Children before their parents; without recursion, since a chain is as deep as it has ranks.
    for rank in reversed(list(local)):
        leaves[rank] = max(1, sum(leaves[child] for child in local[rank]))
    rows: list[list[tuple[int, float]]] = []
    level: list[tuple[int, float, float]] = [(top, -span / 2, span / 2)]
    while level:
        rows.append([(rank, (low + high) / 2) for rank, low, high in level])
        level = [share for rank, low, high in level for share in _shares(local[rank], leaves, low, high)]
    return _on_arcs(rows, span)


def _local_children(graph: Graph, rank: int, layout: Layout) -> tuple[int, ...]:
    return tuple(child for child in graph.children[rank] if layout.hosts[child] == layout.hosts[rank])


def _shares(children: Sequence[int], leaves: dict[int, int], low: float, high: float) -> list[tuple[int, float, float]]:
    """The angle between ``low`` and ``high``, dealt out by number of leaves."""
    per_leaf = (high - low) / max(1, sum(leaves[child] for child in children))
    shares = []
    for child in children:
        shares.append((child, low, low + per_leaf * leaves[child]))
        low += per_leaf * leaves[child]
    return shares


def _on_arcs(rows: list[list[tuple[int, float]]], span: float) -> dict[int, Point]:
    """Angles of each depth to points; arcs are as wide as their most crowded place needs."""
    points = {rows[0][0][0]: (0.0, 0.0)}
    radius = 0.0
    turn = -1 if span == 2 * math.pi else 1  # clockwise all round, else from left to right
    for row in rows[1:]:
        angles = [angle for _, angle in row]
        gaps = [b - a for a, b in zip(angles, [*angles[1:], angles[0] + 2 * math.pi], strict=True)]
        radius = max(radius + _LEVEL, _radius_for(min([span, *gaps])))
        points |= {rank: (turn * radius * math.sin(angle), radius * math.cos(angle)) for rank, angle in row}
    return points


def _radius_for(angle: float) -> float:
    """The radius at which neighbours at this angle are `SPACING` apart."""
    return SPACING / (2 * math.sin(min(angle, math.pi) / 2))


def _around(host: int, points: Sequence[Point]) -> Box:
    """The box of a host whose ranks stand at ``points``."""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top, bottom = min(y for _, y in points), max(y for _, y in points)
    pad = RADIUS + _MARGIN
    width = max(right - left + 2 * pad, 2 * pad + SPACING)
    return Box(host, (left + right - width) / 2, top - pad - _BOX_HEAD, width, bottom - top + 2 * pad + _BOX_HEAD)


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
