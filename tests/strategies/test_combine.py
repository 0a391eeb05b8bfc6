"""Combinations of a strategy inside hosts with one between them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.strategies import SizedStrategy, Strategy, build, names
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.strategies.cost import measure
from kfcomm.types import Layout
from tests.conformance import oracle
from tests.conformance.worlds import everywhere, same_bits, world
from tests.strategies.layouts import LAYOUTS, assert_spans

NAMES = st.sampled_from(names())


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, NAMES, NAMES, st.integers(0, 1 << 26))
def test_every_graph_spans_all_ranks_and_crosses_hosts_at_one_rank(
    layout: Layout, inside: str, between: str, nbytes: int
) -> None:
    combination = build(f"inside: {inside}, between: {between}", layout)
    assert combination.digest == build({"inside": inside, "between": between}, layout).digest
    for pair in combination.select(nbytes).pairs:
        for graph in (pair.reduce, pair.broadcast):
            assert_spans(graph)
            speakers = {rank for edge in graph.edges for rank in edge if _crosses(layout, edge)}
            assert len(speakers) == (layout.num_hosts if layout.num_hosts > 1 else 0)
            assert len({layout.hosts[rank] for rank in speakers}) == len(speakers)


def _crosses(layout: Layout, edge: tuple[int, int]) -> bool:
    return layout.hosts[edge[0]] != layout.hosts[edge[1]]


@settings(deadline=None)
@given(LAYOUTS)
def test_named_hierarchies_are_combinations(layout: Layout) -> None:
    for name, between in {"tree": "star", "binary_tree_star": "binary_tree", "multi_star": "clique"}.items():
        assert build(f"inside: star, between: {between}", layout).digest == build(name, layout).digest
    if layout.num_hosts > 1:
        assert build("inside: star, between: double_tree", layout).digest == build("double_tree", layout).digest


def test_cliques_inside_and_rings_between_load_all_ranks_alike() -> None:
    layout = Layout.even(12, 3)
    combination = build("inside: clique, between: ring", layout).select(1 << 20)
    assert len(combination.pairs) == layout.size
    cost = measure(combination, layout)
    assert cost.cross_host_bytes == Fraction(2 * 2, 3)
    assert cost.steps == 2 + 2 * 2
    assert cost.bytes < 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "spec",
    [
        "inside: direct, between: double_tree",
        "inside: ring, between: halving_doubling",
        "inside: binary_tree, between: dissemination",
        "<=1KiB: star, else: (inside: clique, between: ring)",
        "inside: (<=1KiB: star, else: ring), between: auto",
    ],
)
@pytest.mark.parametrize(("size", "hosts"), [(5, 2), (6, 3), (7, 7), (3, 1)])
async def test_results_are_those_of_the_graphs(spec: str, size: int, hosts: int) -> None:
    async with world(size, hosts=hosts, strategy=spec) as comms:
        for length in (1, 300, 20_000):
            xs = [oracle.data("float32", length, rank) for rank in range(size)]
            results = await everywhere(comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], "x"))
            wanted = oracle.all_reduced("sum", xs, comms[0].strategy, "x")
            assert all(same_bits(result, wanted) for result in results)


def test_direct_inside_is_another_graph_for_long_messages() -> None:
    combination = build("inside: direct, between: ring", Layout.even(8, 2))
    assert isinstance(combination, SizedStrategy)
    assert [bound for bound, _ in combination.rules] == [DIRECT_NBYTES, None]


@pytest.mark.parametrize(
    "text",
    [
        "inside: ring, between: star",
        "<=64KiB: star, else: (inside: direct, between: double_tree)",
        "inside: (<=1KiB: star, else: ring), between: clique",
    ],
)
def test_names_read_back_as_the_same(text: str) -> None:
    layout = Layout.even(6, 3)
    built = build(text, layout)
    assert build(built.name, layout).digest == built.digest


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("inside: star, beyond: ring", "a combination has 'inside' and 'between'"),
        ({"inside": "star"}, "there are 'inside'"),
        ("inside: star, between: ring, else: star", "there are 'inside', 'between', 'else'"),
        ("inside: star, inside: ring", "'inside' comes twice"),
        ("inside: star, between: rong", "did you mean ring"),
        ("inside: (star, between: ring", "a bracket is not closed"),
        ("inside: star), between: ring", "a bracket is closed but not opened"),
    ],
)
def test_combinations_that_cannot_be_are_refused(spec: str | dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(spec, Layout.even(6, 3))


def test_shares_of_both_are_multiplied() -> None:
    layout = Layout.even(4, 2)
    uneven = Strategy("mine", build("clique", Layout.even(2, 2)).select(0).pairs, shares=(1, 3))
    assert build({"inside": "clique", "between": uneven}, layout).select(0).shares == (1, 3, 1, 3)
