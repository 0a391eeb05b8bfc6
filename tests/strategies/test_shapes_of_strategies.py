"""Structure of each strategy's graphs, independent of the code that makes them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.strategies import Strategy, build, names
from kfcomm.strategies.builtin import ALGORITHMS, build_all
from kfcomm.types import Layout
from tests.strategies.layouts import LAYOUTS, assert_spans

HIERARCHICAL = ("tree", "binary_tree_star", "multi_binary_tree_star", "multi_star", "double_tree")
# Nine ranks: two on the first host, three on the second, four on the third.
NINE = Layout.of("AABBBCCCC")


def made(name: str, layout: Layout) -> Strategy:
    return build(name, layout).select(0)


def parents(strategy: Strategy) -> list[tuple[int, ...]]:
    assert all(pair.reduce == pair.broadcast for pair in strategy.pairs)
    return [pair.reduce.parents for pair in strategy.pairs]


@given(LAYOUTS, st.sampled_from(names()), st.integers(0, 1 << 26))
def test_every_graph_spans_all_ranks_and_is_the_same_again(layout: Layout, name: str, nbytes: int) -> None:
    strategy = build(name, layout).select(nbytes)
    for pair in strategy.pairs:
        assert_spans(pair.reduce)
        assert_spans(pair.broadcast)
        assert pair.size == layout.size
    assert build(name, layout).digest == build(name, Layout(layout.hosts)).digest


@given(LAYOUTS)
def test_strategies_built_together_are_those_built_alone(layout: Layout) -> None:
    together = {one.name: one for one in build_all(layout)}
    left_out = {"tree": "star", "binary_tree_star": "binary_tree", "multi_star": "clique"}
    for algorithm in ALGORITHMS:
        alone = algorithm.build(layout)
        found = together.get(algorithm.name) or together[left_out[algorithm.name]]
        assert found.digest == alone.digest
        assert found.select(1 << 30).digest == alone.select(1 << 30).digest
    assert together["direct"].pairs is together["clique"].pairs


@given(LAYOUTS)
def test_star_is_rank_0_above_all(layout: Layout) -> None:
    assert parents(made("star", layout)) == [(0,) * layout.size]


@given(LAYOUTS)
def test_clique_is_a_star_around_each_rank(layout: Layout) -> None:
    assert parents(made("clique", layout)) == [(rank,) * layout.size for rank in range(layout.size)]


@given(LAYOUTS)
def test_ring_goes_round_once_to_the_root_and_once_from_it(layout: Layout) -> None:
    size = layout.size
    for root, pair in enumerate(made("ring", layout).pairs):
        assert pair.reduce.preorder[::-1] == tuple((root + 1 + step) % size for step in range(size))
        assert pair.broadcast.preorder == tuple((root + step) % size for step in range(size))
        for graph in (pair.reduce, pair.broadcast):
            assert max(map(len, graph.children)) <= 1


@given(LAYOUTS)
def test_binary_tree_is_a_heap(layout: Layout) -> None:
    assert parents(made("binary_tree", layout)) == [tuple(max(0, rank - 1) // 2 for rank in range(layout.size))]


@given(LAYOUTS, st.sampled_from(HIERARCHICAL))
def test_in_hierarchies_only_masters_cross_hosts(layout: Layout, name: str) -> None:
    assume(name != "double_tree" or layout.num_hosts > 1)
    masters = layout.masters
    for graph in (pair.reduce for pair in made(name, layout).pairs):
        for rank, host in enumerate(layout.hosts):
            if rank not in masters:
                assert graph.parents[rank] == masters[host]
                assert graph.children[rank] == ()
            else:
                assert graph.parents[rank] in masters
                local = [child for child in graph.children[rank] if layout.hosts[child] == host]
                assert list(graph.children[rank][: len(local)]) == local == sorted(local)


@given(LAYOUTS)
def test_the_masters_form_stars_and_heaps(layout: Layout) -> None:
    masters, count = layout.masters, layout.num_hosts

    def of_masters(name: str) -> list[list[int]]:
        return [[masters.index(graph[rank]) for rank in masters] for graph in parents(made(name, layout))]

    heap = [max(0, host - 1) // 2 for host in range(count)]
    turned = [[(heap[(host - top) % count] + top) % count for host in range(count)] for top in range(count)]
    assert of_masters("tree") == [[0] * count]
    assert of_masters("multi_star") == [[top] * count for top in range(count)]
    assert of_masters("binary_tree_star") == [heap]
    assert of_masters("multi_binary_tree_star") == turned


def test_hierarchies_written_out() -> None:
    assert parents(made("tree", NINE)) == [(0, 0, 0, 2, 2, 0, 5, 5, 5)]
    assert parents(made("binary_tree_star", NINE)) == [(0, 0, 0, 2, 2, 0, 5, 5, 5)]
    assert parents(made("multi_star", NINE)) == [
        (0, 0, 0, 2, 2, 0, 5, 5, 5),
        (2, 0, 2, 2, 2, 2, 5, 5, 5),
        (5, 0, 5, 2, 2, 5, 5, 5, 5),
    ]
    four_hosts = Layout.of("ABCDABCD")
    assert parents(made("binary_tree_star", four_hosts)) == [(0, 0, 0, 1, 0, 1, 2, 3)]
    assert parents(made("multi_binary_tree_star", four_hosts))[3] == (3, 3, 0, 3, 0, 1, 2, 3)


@pytest.mark.parametrize("bits", range(7))
def test_binomial_is_recursive_halving_and_doubling(bits: int) -> None:
    """In step b all ranks swap n/2^(b+1) parts with the rank whose number differs in bit b."""
    size = 1 << bits
    pairs = made("binomial", Layout.even(size)).pairs
    swapped = {(i, i ^ 1 << b): size >> (b + 1) for i in range(size) for b in range(bits)}
    up = Counter((child, parent) for pair in pairs for parent, child in pair.reduce.edges)
    down = Counter(edge for pair in pairs for edge in pair.broadcast.edges)
    assert up == down == swapped
    for root, pair in enumerate(pairs):
        assert pair.root == root
        assert [child ^ root for child in pair.reduce.children[root]] == [1 << b for b in range(bits)]
        for child, parent in enumerate(pair.reduce.parents):
            ready = [below ^ child for below in pair.reduce.children[child]]
            assert all(step < child ^ parent for step in ready) or child == root


@given(LAYOUTS)
def test_binomial_loads_all_ranks_alike(layout: Layout) -> None:
    size = layout.size
    pairs = made("binomial", layout).pairs
    assert [pair.root for pair in pairs] == list(range(size))
    for pair in pairs:
        assert pair.reduce.parents == pair.broadcast.parents
        assert pair.reduce.children == tuple(below[::-1] for below in pair.broadcast.children)
        assert pair.reduce.depth == size.bit_length() - 1
    ends = Counter(parent for pair in pairs for parent, _ in pair.reduce.edges)
    assert all(ends[rank] == size - 1 for rank in range(size))


@pytest.mark.parametrize("hosts", range(1, 8))
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_binomial_crosses_hosts_as_little_as_can_be(hosts: int, ranks: int) -> None:
    """Hosts of a power of two of ranks: inside a host first, then each rank with its like on other hosts."""
    layout = Layout.even(hosts * ranks, hosts)
    for pair in made("binomial", layout).pairs:
        for parent, child in pair.reduce.edges:
            assert layout.hosts[parent] == layout.hosts[child] or parent % ranks == child % ranks
        assert sum(layout.hosts[a] != layout.hosts[b] for a, b in pair.reduce.edges) == hosts - 1


def _sums(pair: GraphPair) -> list[int]:
    """The sum at every rank after rank ``r`` gave ``2**r``: an all_reduce has every bit exactly once."""
    held = [1 << rank for rank in range(pair.size)]
    for rank in reversed(pair.reduce.preorder[1:]):
        held[pair.reduce.parents[rank]] += held[rank]
    for parent, child in _downwards(pair.broadcast):
        held[child] = held[parent]
    return held


def _downwards(graph: Graph) -> list[tuple[int, int]]:
    return [(graph.parents[rank], rank) for rank in graph.preorder[1:]]


@given(LAYOUTS, st.sampled_from(names()))
def test_following_the_graphs_sums_every_rank_once(layout: Layout, name: str) -> None:
    everything = (1 << layout.size) - 1
    for pair in build(name, layout).select(1 << 20).pairs:
        assert _sums(pair) == [everything] * layout.size


@pytest.mark.parametrize("size", range(1, 200))
def test_inner_ranks_of_one_of_two_trees_are_leaves_of_the_other(size: int) -> None:
    """Also with the least depth that binary trees with so many leaves have, and with the neighbours next to it."""
    first, second = (pair.reduce for pair in made("double_tree", Layout.even(size, size)).pairs)
    above = [{rank for rank, below in enumerate(graph.children) if below} for graph in (first, second)]
    assert not above[0] & above[1]
    assert len(above[0]) + len(above[1]) >= size - 1
    for graph in (first, second):
        assert_spans(graph)
        assert max(map(len, graph.children)) <= 2
        assert graph.depth == (size // 2).bit_length()
        for rank in range(size):
            below = sorted(_below(graph, rank))
            assert below[-1] - below[0] == len(below) - 1 or graph is second


def _below(graph: Graph, rank: int) -> list[int]:
    return [rank, *(other for child in graph.children[rank] for other in _below(graph, child))]


def test_on_one_host_the_two_trees_are_those_of_its_ranks() -> None:
    assert made("double_tree", Layout.even(9)).pairs == made("double_tree", Layout.even(9, 9)).pairs
