"""Minimum spanning tree by measured latency.

One pair: of all trees the one whose edges add up to the least latency, so that no slow link is used where a way round
it is quicker. It hangs from its centre, the rank from which the farthest is nearest. For short messages in networks
whose links are unlike; what it costs depends on the matrix. KungFu has an operator for the same tree.

Source: R. Prim, "Shortest connection networks and some generalizations" (1957).
"""

from __future__ import annotations

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies.base import Strategy
from kfcomm.strategies.matrices import Matrix, checked_latency


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
    """How far every rank is from ``start``, each after the one before it on its way."""
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
