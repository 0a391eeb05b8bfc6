from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.graph import Graph, GraphPair
from tests.strategies.layouts import assert_spans, links, trees


@given(trees())
def test_a_tree_is_the_same_from_its_edges_and_spans_all_ranks(tree: Graph) -> None:
    assert_spans(tree)
    again = Graph.from_edges(tree.size, tree.edges, root=tree.root)
    assert (again, again.digest, hash(again)) == (tree, tree.digest, hash(tree))
    assert Graph.from_parents(tree.parents).parents == tree.parents


@given(trees())
def test_preorder_depth_and_path_agree(tree: Graph) -> None:
    assert sorted(tree.preorder) == list(range(tree.size))
    place = {rank: at for at, rank in enumerate(tree.preorder)}
    assert all(place[parent] < place[child] for parent, child in tree.edges)
    assert tree.depth == max(len(tree.path(rank)) for rank in range(tree.size)) - 1
    for rank in range(tree.size):
        way = tree.path(rank)
        assert (way[0], way[-1]) == (tree.root, rank)
        assert all(edge in tree.edges for edge in zip(way, way[1:], strict=False))


@given(trees(), st.data())
def test_rerooting_keeps_links_and_the_order_of_children(tree: Graph, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, tree.size - 1))
    moved = tree.rerooted(root)
    assert_spans(moved)
    assert moved.root == root
    assert links(moved) == links(tree)
    way = tree.path(root)
    for rank in range(tree.size):
        kept = tuple(child for child in tree.children[rank] if child not in way)
        former = tuple(way[at - 1] for at in range(1, len(way)) if way[at] == rank)
        if rank not in way:
            assert moved.children[rank] == tree.children[rank]
        else:
            assert moved.children[rank] == kept + former
    assert moved.rerooted(tree.root).parents == tree.parents
    assert tree.rerooted(tree.root) is tree


@pytest.mark.parametrize("root", [-1, 3])
def test_rerooting_at_no_rank(root: int) -> None:
    with pytest.raises(ValueError, match=rf"root {root} is outside 0\.\.2"):
        Graph.from_parents([0, 0, 0]).rerooted(root)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "at least one rank"),
        ([0, 2], r"rank 1 has parent 2, outside 0\.\.1"),
        ([-1, 0], r"rank 0 has parent -1"),
        ([0, 1], r"exactly one root .* got \[0, 1\]"),
        ([1, 0], "got none"),
        ([0, 2, 1], r"ranks \[1, 2\] are on or below a cycle"),
    ],
)
def test_parent_arrays_that_are_no_trees(parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph.from_parents(parents)


@pytest.mark.parametrize(
    ("size", "edges", "message"),
    [
        (0, [], "at least one rank"),
        (2, [(0, 2)], r"edge \(0, 2\) names rank 2, outside 0\.\.1"),
        (2, [(-1, 1)], r"names rank -1"),
        (2, [(1, 1)], "self-loop"),
        (3, [(0, 2), (1, 2)], "rank 2 has two parents, 0 and 1"),
        (3, [(0, 1)], r"exactly one root, got \[0, 2\]"),
        (2, [(0, 1), (1, 0)], "a cycle"),
        (4, [(0, 1), (2, 3), (3, 2)], r"ranks \[2, 3\] are on or below a cycle"),
    ],
)
def test_edges_that_are_no_trees(size: int, edges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Graph.from_edges(size, edges)


def test_the_root_of_edges_can_be_checked_against() -> None:
    with pytest.raises(ValueError, match="the root is rank 1, not 0"):
        Graph.from_edges(2, [(1, 0)], root=0)


@pytest.mark.parametrize(
    ("parents", "children", "root", "message"),
    [
        ((0, 0), ((), ()), 0, "contradict"),
        ((0, 0), ((1,),), 0, "contradict"),
        ((0, 0, 0), ((1, 1), (), ()), 0, "contradict"),
        ((0, 0), ((1, 1), ()), 0, "contradict"),
        ((0, 0), ((1,), ()), 1, "rank 1 is not its own parent"),
        ((0, 0), ((1,), ()), 2, "rank 2 is not its own parent"),
        ((), (), 0, "rank 0 is not its own parent"),
        ((0, 2, 1), ((), (2,), (1,)), 0, "cycle"),
    ],
)
def test_parts_that_do_not_fit_together(
    parents: tuple[int, ...], children: tuple[tuple[int, ...], ...], root: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Graph(parents, children, root)


def test_integers_of_other_kinds_make_the_same_value() -> None:
    plain = Graph.from_parents([0, 0, 1])
    assert Graph.from_parents(list(np.array([0, 0, 1]))).digest == plain.digest
    assert Graph.from_edges(3, np.array([[0, 1], [1, 2]])).digest == plain.digest
    with pytest.raises(TypeError):
        Graph.from_parents([0, 0.5])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        Graph.from_edges(2, [(0, 1.0)])  # type: ignore[list-item]


def test_digests_tell_shape_root_and_fold_order_apart() -> None:
    graphs = [
        Graph.from_edges(3, [(0, 1), (0, 2)]),
        Graph.from_edges(3, [(0, 2), (0, 1)]),
        Graph.from_edges(3, [(0, 1), (1, 2)]),
        Graph.from_edges(3, [(2, 1), (2, 0)]),
        Graph.from_edges(2, [(0, 1)]),
    ]
    assert len({graph.digest for graph in graphs}) == len(set(graphs)) == len(graphs)
    assert all(len(graph.digest) == 16 for graph in graphs)


def test_graphs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Graph.from_parents([0]).root = 1  # type: ignore[misc]


def test_pairs_need_one_size_and_one_root() -> None:
    up, down = Graph.from_edges(3, [(0, 1), (1, 2)]), Graph.from_edges(3, [(0, 2), (2, 1)])
    pair = GraphPair(up, down)
    assert (pair.size, pair.root) == (3, 0)
    assert len({pair.digest, GraphPair(down, up).digest, GraphPair.of(up).digest}) == 3
    with pytest.raises(ValueError, match="one size, got 3 and 2"):
        GraphPair(up, Graph.from_parents([0, 0]))
    with pytest.raises(ValueError, match="one root, got 0 and 2"):
        GraphPair(up, up.rerooted(2))
