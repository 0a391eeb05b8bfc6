"""Graphs along which chunks travel: rooted spanning trees with ordered children.

A *graph* is a tree over the ranks ``0 .. size-1``. In a reduce graph data flows from the leaves to the
root, in a broadcast graph from the root to the leaves; the value is the same, only the direction of use
differs. A *graph pair* is one of each with a common root: the way of one part of an ``all_reduce``.

The order of ``children[r]`` is part of the value: contributions are folded in that order, which makes results the same
on every run. Graphs know neither hosts nor links nor time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index


@dataclass(frozen=True)
class Graph:
    """A spanning tree: ``parents[r]`` is the rank above ``r``; the root is its own parent.

    ``children[r]`` are the ranks below ``r``, in the order in which their data is folded. `from_parents` and
    `from_edges` derive the one from the other.

    Raises:
        ValueError: parents and children contradict each other, or do not form one tree below ``root``.
    """

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    root: int

    def __post_init__(self) -> None:
        above = {(parent, child) for child, parent in enumerate(self.parents) if parent != child}
        below = [(parent, child) for parent, ranks in enumerate(self.children) for child in ranks]
        if len(self.children) != self.size or len(below) != len(above) or set(below) != above:
            raise ValueError(f"parents {self.parents} and children {self.children} contradict each other")
        if not 0 <= self.root < self.size or self.parents[self.root] != self.root:
            raise ValueError(f"rank {self.root} is not its own parent, so it is not the root")
        missing = sorted(set(range(self.size)).difference(self.preorder))
        if missing:
            raise ValueError(f"ranks {missing} are on or below a cycle: the root {self.root} does not reach them")

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> Graph:
        """A tree from its parent array; children are ordered by rank.

        Raises:
            ValueError: no root, two roots, a rank out of range, or a cycle (the message says which).
            TypeError: a parent that is not an integer.
        """
        parents = tuple(map(index, parents))
        size = len(parents)
        if size == 0:
            raise ValueError("a graph needs at least one rank")
        for rank, parent in enumerate(parents):
            if not 0 <= parent < size:
                raise ValueError(f"rank {rank} has parent {parent}, outside 0..{size - 1}")
        roots = [rank for rank, parent in enumerate(parents) if rank == parent]
        if len(roots) != 1:
            raise ValueError(f"a graph needs exactly one root (a rank that is its own parent), got {roots or 'none'}")
        children: list[list[int]] = [[] for _ in range(size)]
        for rank, parent in enumerate(parents):
            if rank != parent:
                children[parent].append(rank)
        return cls(parents, tuple(map(tuple, children)), roots[0])

    @classmethod
    def from_edges(cls, size: int, edges: Iterable[tuple[int, int]], root: int | None = None) -> Graph:
        """A tree from ``(parent, child)`` edges, children in the order of the edges.

        ``root`` is only needed to check against; without edges the single rank is the root.

        Raises:
            ValueError: a rank out of range, missing or with two parents, two roots, or a cycle.
            TypeError: a rank that is not an integer.
        """
        if size < 1:
            raise ValueError("a graph needs at least one rank")
        parents = list(range(size))
        children: list[list[int]] = [[] for _ in range(size)]
        for edge in edges:
            parent, child = map(index, edge)
            for rank in (parent, child):
                if not 0 <= rank < size:
                    raise ValueError(f"edge ({parent}, {child}) names rank {rank}, outside 0..{size - 1}")
            if parent == child:
                raise ValueError(f"edge ({parent}, {child}) is a self-loop")
            if parents[child] != child:
                raise ValueError(f"rank {child} has two parents, {parents[child]} and {parent}")
            parents[child] = parent
            children[parent].append(child)
        roots = [rank for rank in range(size) if parents[rank] == rank]
        if len(roots) != 1:
            missing = [rank for rank in roots if not children[rank]]
            hint = f": no edge names {', '.join(map(str, missing))}" if missing else ""
            raise ValueError(f"a graph needs exactly one root, got {roots or 'none (a cycle)'}{hint}")
        if root is not None and roots[0] != root:
            raise ValueError(f"the root is rank {roots[0]}, not {root}")
        return cls(tuple(parents), tuple(map(tuple, children)), roots[0])

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parents)

    @cached_property
    def preorder(self) -> tuple[int, ...]:
        """The ranks from the root down, each before its children."""
        order: list[int] = []
        stack, children = [self.root], self.children
        while stack:
            rank = stack.pop()
            order.append(rank)
            if below := children[rank]:  # most ranks are leaves
                stack += below[::-1]
        return tuple(order)

    @cached_property
    def depth(self) -> int:
        """Number of edges on the longest way from the root to a leaf."""
        level = [0] * self.size
        for rank in self.preorder:
            if rank != self.root:
                level[rank] = level[self.parents[rank]] + 1
        return max(level)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All ``(parent, child)`` pairs, from the root down."""
        return tuple((rank, child) for rank in self.preorder for child in self.children[rank])

    def path(self, rank: int) -> tuple[int, ...]:
        """The ranks from the root to ``rank``, both included."""
        way = [rank]
        while way[-1] != self.root:
            way.append(self.parents[way[-1]])
        return tuple(reversed(way))

    def rerooted(self, root: int) -> Graph:
        """The same undirected tree with another root.

        The former parent comes last among a rank's children, so that the order of the others is kept.

        Raises:
            ValueError: ``root`` is out of range.
        """
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is outside 0..{self.size - 1}")
        if root == self.root:
            return self
        parents = list(self.parents)
        children = [list(below) for below in self.children]
        way = self.path(root)
        for above, below in zip(way, way[1:], strict=False):
            children[above].remove(below)
            children[below].append(above)
            parents[above] = below
        parents[root] = root
        return Graph(tuple(parents), tuple(map(tuple, children)), root)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ if parents or the order of children differ."""
        text = repr((self.root, self.children)).encode()
        return hashlib.blake2b(text, digest_size=16).digest()


@dataclass(frozen=True)
class GraphPair:
    """A reduce graph and a broadcast graph with the same root and size.

    Raises:
        ValueError: roots or sizes differ.
    """

    reduce: Graph
    broadcast: Graph

    def __post_init__(self) -> None:
        if self.reduce.size != self.broadcast.size:
            raise ValueError(f"a pair needs graphs of one size, got {self.reduce.size} and {self.broadcast.size}")
        if self.reduce.root != self.broadcast.root:
            raise ValueError(f"a pair needs one root, got {self.reduce.root} and {self.broadcast.root}")

    @classmethod
    def of(cls, tree: Graph) -> GraphPair:
        """The same tree in both directions."""
        return cls(tree, tree)

    @property
    def root(self) -> int:
        """The common root."""
        return self.reduce.root

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.reduce.size

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that identify the pair."""
        return hashlib.blake2b(self.reduce.digest + self.broadcast.digest, digest_size=16).digest()
