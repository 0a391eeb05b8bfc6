"""Positions of ranks and hosts in a picture of a strategy. Coordinates are pixels, y downwards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kfcomm.core.graph import Graph
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
