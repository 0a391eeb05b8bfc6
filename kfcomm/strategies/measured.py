"""Hosts and a minimum spanning tree by measured matrices.

`hosts_of`: ranks are joined, nearest first, as long as the next nearest are not much farther (single linkage, cut at
the widest gap). The distance of two ranks is their latency, divided by what part of their ports the link between them
can fill: so that a host with a slow port is not taken for a far one: all its links are as slow as the port. (Hence a
host of one rank differs from others by latency alone.)

`minimum_spanning_tree`: of all trees the one whose edges add up to the least latency, so that no slow link is used
where a way round it is quicker. It hangs from its centre, the rank from which the farthest is nearest. For short
messages in networks whose links are unlike; what it costs depends on the matrix. KungFu has an operator for the same
tree.

Sources: P. Sneath, "The application of computers to taxonomy" (1957), for single linkage; R. Prim, "Shortest connection
networks and some generalizations" (1957).
"""

from __future__ import annotations

from typing import Final

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.matrices import Matrix, checked_bandwidth, checked_latency, rates_of
from kfcomm.types import Layout

_GAP: Final = 2.5
"""Neighbouring distances that differ by this factor are of two kinds; noise of one kind differs by less."""
_LEAST_S: Final = 1e-7
"""Latencies below are all alike."""


def hosts_of(latency_s: Matrix, bandwidth: Matrix) -> Layout:
    """The hosts (or racks) that measured distances show, as a layout for strategies that look at hosts.

    Where no two kinds of distance can be told apart, every rank is a host by itself. Two ranks alone are, too: there is
    nothing to compare their one distance with.

    Args:
        latency_s: seconds from rank (row) to rank (column).
        bandwidth: bytes/s from rank (row) to rank (column).

    Raises:
        ConfigError: a matrix is not square, they are of different sizes, or an entry is not a latency or bandwidth.
    """
    latencies = checked_latency(latency_s)
    size = len(latencies)
    rates = rates_of(Layout.even(size, size), _of_size(bandwidth, size))

    def distance(a: int, b: int) -> float:
        # The latency, times how much slower the link is than the ports at its ends.
        return max(latencies[a][b], _LEAST_S) * min(rates.send[a], rates.receive[b]) / rates.links[a][b]

    pairs = sorted((max(distance(a, b), distance(b, a)), a, b) for b in range(size) for a in range(b))
    joins = _joins(size, pairs)
    gaps = [after[0] / before[0] for before, after in zip(joins, joins[1:], strict=False)]
    if not gaps or max(gaps) < _GAP:
        return Layout.even(size, size)
    # The greatest jump separates distances inside of hosts from those between them.
    near = joins[: gaps.index(max(gaps)) + 1]
    groups = list(range(size))
    for _, a, b in near:
        old, new = groups[b], groups[a]
        groups = [new if group == old else group for group in groups]
    return Layout.of(groups)


def _of_size(bandwidth: Matrix, size: int) -> Matrix:
    rows = checked_bandwidth(bandwidth)
    if len(rows) != size:
        raise ConfigError(f"latency is of {size} ranks, bandwidth of {len(rows)}")
    return rows


def _joins(size: int, pairs: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """The pairs that join separate groups, nearest first: the edges of a minimum spanning tree."""
    groups = list(range(size))
    joins = []
    for distance, a, b in pairs:
        old, new = groups[b], groups[a]
        if old != new:
            groups = [new if group == old else group for group in groups]
            joins.append((distance, a, b))
    return joins


def minimum_spanning_tree(latency_s: Matrix, *, name: str = "minimum_spanning_tree") -> Strategy:
    """The spanning tree of least latency, hung from its centre.

    A tree's edges carry data both ways, so an edge counts with the sum of both directions; of equals the lowest ranks
    are taken. Below each rank, what arrives first is folded first, and the longest way is served first.

    Args:
        latency_s: seconds from rank (row) to rank (column); the diagonal does not matter.
        name: of the strategy.

    Raises:
        ConfigError: the matrix is empty or not square, or an entry is negative, infinite or not a number.

    Cost: O(n²) to build; 2 · depth steps, and as many messages of the whole size at the busiest rank as it has edges.
    """
    rows = checked_latency(latency_s)
    size = len(rows)
    both = [[rows[a][b] + rows[b][a] for b in range(size)] for a in range(size)]
    neighbours = _joined(size, _prim(both))
    root = min(range(size), key=lambda rank: (max(_ways(neighbours, both, rank).values()), rank))
    parents, heights = _hung(neighbours, both, root)
    below: list[list[int]] = [[] for _ in range(size)]
    for rank, parent in enumerate(parents):
        if rank != root:
            below[parent].append(rank)
    soonest = [sorted(ranks, key=lambda r: heights[r] + both[r][parents[r]]) for ranks in below]
    reduce = Graph(tuple(parents), tuple(map(tuple, soonest)), root)
    # The subtree that is folded last has the longest way: on the way down it is served first.
    broadcast = Graph(tuple(parents), tuple(tuple(reversed(ranks)) for ranks in soonest), root)
    return Strategy(name, (GraphPair(reduce, broadcast),))


def _prim(weights: list[list[float]]) -> list[tuple[int, int]]:
    """Edges of a minimum spanning tree, in the order in which they are found from rank 0 on."""
    nearest = {rank: (weights[0][rank], 0) for rank in range(1, len(weights))}
    edges = []
    while nearest:
        rank = min(nearest, key=lambda other: (nearest[other][0], other))
        edges.append((nearest.pop(rank)[1], rank))
        for other, (weight, _) in nearest.items():
            if weights[rank][other] < weight:
                nearest[other] = (weights[rank][other], rank)
    return edges


def _joined(size: int, edges: list[tuple[int, int]]) -> list[list[int]]:
    """The neighbours of every rank."""
    neighbours: list[list[int]] = [[] for _ in range(size)]
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    return neighbours


def _ways(neighbours: list[list[int]], weights: list[list[float]], start: int) -> dict[int, float]:
    """Distance of every rank from ``start``, each after the one before it on its path."""
    ways = {start: 0.0}
    stack = [start]
    while stack:
        rank = stack.pop()
        for other in neighbours[rank]:
            if other not in ways:
                ways[other] = ways[rank] + weights[rank][other]
                stack.append(other)
    return ways


def _hung(neighbours: list[list[int]], weights: list[list[float]], root: int) -> tuple[list[int], list[float]]:
    """``(parent, how far the farthest rank below is)`` of every rank."""
    parents = list(range(len(neighbours)))
    heights = [0.0] * len(neighbours)
    order = list(_ways(neighbours, weights, root))
    seen = {root}
    for rank in order[1:]:
        parents[rank] = next(other for other in neighbours[rank] if other in seen)
        seen.add(rank)
    for rank in reversed(order[1:]):
        parent = parents[rank]
        heights[parent] = max(heights[parent], heights[rank] + weights[rank][parent])
    return parents, heights
