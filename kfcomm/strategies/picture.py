"""Strategies as self-contained SVG pictures.

Hosts are boxes (or bands, where the ranks stand in a circle), ranks circles, sends arrows coloured by phase. Three
arrangements: a chain, and a pair whose two graphs have different edges, go round one circle; a tree on one host spreads
from its root in the middle; a tree over several hosts has a box for each, inside which the tree's parts fan out below
their uppermost ranks, and the boxes stand in rows, those nearer to the root higher. An arrow bends around ranks on its
way; at a rank with many arrows they end before its circle, so that heads do not overlap. Coordinates are
pixels, y downwards. Knows nothing of files.
"""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
_PER_ARROW: Final = 1.3  # pixels of distance from the centre, for each arrow that ends there
_MOST_REACH: Final = 40.0
_BENDS: Final = (0.14, 0.2, 0.3, -0.14, -0.2, -0.3)  # of an arrow's length: tried until it touches no circle
_SAMPLES: Final = 16  # points of an arrow that are compared with circles
_MOST_BENT: Final = 128  # ranks; of more, no arrow is compared


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
        *map(_label, placement.boxes),
        *_ranks(graphs.root, placement.points),
        *_legend((left + _EDGE, top + height - _EDGE), layout.num_hosts > 1, goes_whole=strategy.goes_whole),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _place(pair: GraphPair, layout: Layout) -> Placement:
    chain = pair.size > 2 and all(
        len(below) <= 1 for graph in (pair.reduce, pair.broadcast) for below in graph.children
    )
    alike = set(pair.reduce.edges) == set(pair.broadcast.edges)
    return on_circle(pair.broadcast.preorder, layout) if chain or not alike else in_boxes(pair.reduce, layout)


def _frame(placement: Placement) -> tuple[float, float, float, float]:
    """Left, top, width and height of the whole picture."""
    reach = placement.radius + 2 * _BAND
    height = placement.radius + 1.4 * _BAND
    corners = [(-reach, -height), (reach, height)] if not placement.boxes else []
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
        yield _box(box)
    if not placement.boxes:
        yield from _bands(pair.broadcast, layout, placement.radius)


def _box(box: Box) -> str:
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="12" '
        f'fill="{_HOST_FILLS[box.host % 8]}" stroke="{_HOST_LINES[box.host % 8]}"/>'
    )


def _label(box: Box) -> str:
    """Name of a host, above the arrows and with an edge in the colour of the box."""
    return (
        f'<text x="{box.x + 12:.1f}" y="{box.y + 19:.1f}" font-size="12" fill="{_FAINT}" paint-order="stroke" '
        f'stroke="{_HOST_FILLS[box.host % 8]}" stroke-width="4">host {box.host}</text>'
    )


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


@dataclass(frozen=True, slots=True)
class _Arrows:
    """Arrows between ranks.

    Attributes:
        points: positions of the ranks.
        reach: distance from a rank's centre at which its arrows end.
        hosts: of the ranks.
    """

    points: tuple[Point, ...]
    reach: tuple[float, ...]
    hosts: tuple[int, ...]

    def path(self, a: int, b: int, phase: tuple[str, str]) -> str:
        """From rank ``a`` to rank ``b``; the two phases bend to opposite sides of the line between them."""
        (x0, y0), (x1, y1) = self.points[a], self.points[b]
        length = math.hypot(x1 - x0, y1 - y0)
        along, across = ((x1 - x0) / length, (y1 - y0) / length), ((y1 - y0) / length, (x0 - x1) / length)
        side = (1 if a < b else -1) * (1 if phase[0] == "reduce" else -1)
        off = 4.0 * side
        start = x0 + along[0] * self.reach[a] + across[0] * off, y0 + along[1] * self.reach[a] + across[1] * off
        stop = x1 - along[0] * self.reach[b] + across[0] * off, y1 - along[1] * self.reach[b] + across[1] * off
        bends = [off + side * bend for bend in (min(14.0, 0.08 * length), *(share * length for share in _BENDS))]
        middles = [((x0 + x1) / 2 + across[0] * bend, (y0 + y1) / 2 + across[1] * bend) for bend in bends]
        middle = next((one for one in middles if not self._touches((start, one, stop), (a, b))), middles[0])
        dash = ' stroke-dasharray="6 3"' if self.hosts[a] != self.hosts[b] else ""
        return (
            f'<path d="M{start[0]:.1f} {start[1]:.1f} Q{middle[0]:.1f} {middle[1]:.1f} {stop[0]:.1f} {stop[1]:.1f}" '
            f'fill="none" stroke="{phase[1]}" stroke-width="1.5"{dash} marker-end="url(#{phase[0]})"/>'
        )

    def _touches(self, curve: tuple[Point, Point, Point], ends: tuple[int, int]) -> bool:
        """Whether a quadratic curve comes near the circle of a rank that is not at its ends."""
        if len(self.points) > _MOST_BENT:
            return False
        (x0, y0), (x1, y1), (x2, y2) = curve
        near = (RADIUS + 4.0) ** 2
        others = [point for rank, point in enumerate(self.points) if rank not in ends]
        for at in range(1, _SAMPLES):
            part = at / _SAMPLES
            before, between, after = (1 - part) ** 2, 2 * part * (1 - part), part**2
            x, y = before * x0 + between * x1 + after * x2, before * y0 + between * y1 + after * y2
            if any((x - a) ** 2 + (y - b) ** 2 < near for a, b in others):
                return True
        return False


def _edges(pair: GraphPair, layout: Layout, points: tuple[Point, ...], *, goes_whole: bool) -> Iterator[str]:
    (reduce, warm, _), (broadcast, cold, _) = _PHASES
    sends = [(child, parent, (reduce, warm)) for parent, child in pair.reduce.edges]
    sends += [(parent, child, (broadcast, cold)) for parent, child in (() if goes_whole else pair.broadcast.edges)]
    ends = Counter(rank for a, b, _ in sends for rank in (a, b))
    reach = tuple(max(RADIUS, min(_PER_ARROW * ends[rank], _MOST_REACH)) for rank in range(len(points)))
    arrows = _Arrows(points, reach, layout.hosts)
    for a, b, phase in sends:
        yield arrows.path(a, b, phase)


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
        line = f'stroke="{colour}" stroke-width="1.5" marker-end="url(#{name})"'
        yield _entry((x, y), f'<path d="M{x:.1f} {y - 4:.1f} h30" {line}/>', f"{name}, {meaning}")
        x += 200
    if several_hosts:
        line = f'stroke="{_FAINT}" stroke-width="1.5" stroke-dasharray="6 3"'
        yield _entry((x, y), f'<path d="M{x:.1f} {y - 4:.1f} h30" {line}/>', "between hosts")
        x += 140
    yield _entry((x - 12, y), f'<ellipse cx="{x + 12:.1f}" cy="{y - 4:.1f}" rx="6" ry="6" fill="{_INK}"/>', "root")


def _entry(at: Point, sign: str, text: str) -> str:
    return f'{sign}<text x="{at[0] + 38:.1f}" y="{at[1]:.1f}" font-size="12" fill="{_INK}">{text}</text>'
