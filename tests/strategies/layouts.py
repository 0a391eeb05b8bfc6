"""Random layouts and trees, and an independent idea of what a spanning tree is."""

from __future__ import annotations

from hypothesis import strategies as st

from kfcomm.core.graph import Graph
from kfcomm.types import Layout

# One host, hosts in blocks, and ranks strewn over hosts in any order.
_SPREAD = st.lists(st.integers(0, 5), min_size=1, max_size=16).map(Layout.of)
_BLOCKS = st.integers(1, 16).flatmap(lambda n: st.integers(1, n).map(lambda hosts: Layout.even(n, hosts)))
_LARGE = st.integers(17, 64).flatmap(lambda n: st.integers(1, n).map(lambda hosts: Layout.even(n, hosts)))
LAYOUTS = st.one_of(_SPREAD, _BLOCKS, _LARGE)


@st.composite
def trees(draw: st.DrawFn, max_size: int = 16) -> Graph:
    """Any rooted tree with any order of children."""
    size = draw(st.integers(1, max_size))
    order = draw(st.permutations(range(size)))
    edges = [(order[draw(st.integers(0, at - 1))], order[at]) for at in range(1, size)]
    return Graph.from_edges(size, edges)


def links(graph: Graph) -> set[frozenset[int]]:
    """The edges without their direction."""
    return {frozenset(edge) for edge in graph.edges}


def assert_spans(graph: Graph) -> None:
    """Every rank comes to the root by its parents, and children say the same as parents."""
    assert graph.parents[graph.root] == graph.root
    for rank in range(graph.size):
        way = [rank]
        while way[-1] != graph.root:
            way.append(graph.parents[way[-1]])
            assert len(way) <= graph.size
        assert rank == graph.root or graph.children[graph.parents[rank]].count(rank) == 1
    assert sum(map(len, graph.children)) == graph.size - 1
