"""Graphs and edge lists that several strategies are made of. Pure arithmetic on indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kfcomm.core.graph import Graph
from kfcomm.types import Layout


def star_edges(size: int, centre: int = 0) -> Iterator[tuple[int, int]]:
    """``(centre, other)`` for every other index, ascending."""
    return ((centre, other) for other in range(size) if other != centre)


def star_around(size: int, centre: int) -> Graph:
    """A star around one rank, others ascending."""
    children: list[tuple[int, ...]] = [()] * size
    children[centre] = (*range(centre), *range(centre + 1, size))
    return Graph((centre,) * size, tuple(children), centre)


def chain_along(order: Sequence[int], alone: Sequence[tuple[int]]) -> Graph:
    """A tree in which each rank has the next one of ``order``, which names all, below it; ``alone[r]`` is ``(r,)``.

    Many chains mention each rank as the same object, which takes a third of the memory.
    """
    parents = [order[0]] * len(order)
    children: list[tuple[int, ...]] = [()] * len(order)
    for above, below in zip(order, order[1:], strict=False):
        parents[below], children[above] = above, alone[below]
    return Graph(tuple(parents), tuple(children), order[0])


def heap_edges(size: int, offset: int = 0) -> Iterator[tuple[int, int]]:
    """A complete binary tree in heap order (``i`` above ``2i+1`` and ``2i+2``), all indices rotated by ``offset``."""
    return ((((below - 1) // 2 + offset) % size, (below + offset) % size) for below in range(1, size))


def heap_depth(size: int) -> int:
    """Edges from the root of a heap of ``size`` to its lowest leaf: floor(log2 size)."""
    return size.bit_length() - 1


def heap_degree(size: int) -> int:
    """Edges at the busiest node of a heap: the root has up to two, the node below it up to three."""
    return max(min(2, size - 1), min(3, size - 2))


def hierarchy(layout: Layout, host_edges: Iterable[tuple[int, int]]) -> Graph:
    """A star inside each host around its master; the masters joined by a tree of hosts.

    ``host_edges`` are ``(parent, child)`` pairs of host numbers that form a tree. Ranks of the own host come
    before other masters among the children, because their data arrives first.
    """
    masters = layout.masters
    local = [(masters[host], rank) for rank, host in enumerate(layout.hosts) if rank != masters[host]]
    between = [(masters[above], masters[below]) for above, below in host_edges]
    return Graph.from_edges(layout.size, local + between)


def host_sizes(layout: Layout) -> tuple[int, ...]:
    """Number of ranks on each host."""
    counts = [0] * layout.num_hosts
    for host in layout.hosts:
        counts[host] += 1
    return tuple(counts)
