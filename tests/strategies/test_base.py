from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, SizedStrategy, Strategy, build, from_edges, from_parents, names
from kfcomm.types import Layout
from tests.strategies.layouts import LAYOUTS, assert_spans, links, trees

FOUR = Layout.even(4, 2)


@given(LAYOUTS, st.data())
def test_any_rank_can_be_the_root(layout: Layout, data: st.DataObject) -> None:
    strategy = build(data.draw(st.sampled_from(names())), layout).select(data.draw(st.integers(0, 1 << 24)))
    root = data.draw(st.integers(0, layout.size - 1))
    pair = strategy.rooted(root)
    assert pair.root == root
    assert_spans(pair.reduce)
    assert_spans(pair.broadcast)
    assert strategy.rooted(root) is pair
    if root in {p.root for p in strategy.pairs}:
        assert pair is next(p for p in strategy.pairs if p.root == root)
    else:
        assert links(pair.reduce) == links(strategy.pairs[0].reduce)
        assert links(pair.broadcast) == links(strategy.pairs[0].broadcast)


def test_both_graphs_of_a_pair_are_rerooted() -> None:
    pair = GraphPair(Graph.from_edges(3, [(0, 1), (1, 2)]), Graph.from_edges(3, [(0, 2), (2, 1)]))
    moved = Strategy("odd", (pair,)).rooted(2)
    assert (moved.reduce.parents, moved.broadcast.parents) == ((1, 2, 2), (2, 2, 2))


@pytest.mark.parametrize("root", [-1, 4])
def test_a_root_out_of_range(root: int) -> None:
    with pytest.raises(ConfigError, match=rf"root {root} is outside 0\.\.3"):
        build("star", FOUR).select(0).rooted(root)


@given(trees(), trees())
def test_digests_depend_on_graphs_alone(one: Graph, two: Graph) -> None:
    first, second = from_edges(one.size, one.edges, name="a"), Strategy("b", (GraphPair.of(two),))
    assert (first.digest == second.digest) == (one == two)
    assert len(first.digest) == 16
    assert first.digest == Strategy("c", (GraphPair.of(one),)).digest


def test_the_order_of_pairs_is_part_of_the_digest() -> None:
    clique = build("clique", FOUR).select(0)
    assert Strategy("clique", clique.pairs[::-1]).digest != clique.digest
    assert len({build(name, Layout.even(8, 4)).digest for name in names()}) == len(names())


def test_shares_are_kept_in_lowest_terms() -> None:
    pairs = build("clique", FOUR).select(0).pairs
    assert Strategy("mine", pairs, shares=(2, 4, 6, 2)).shares == (1, 2, 3, 1)
    assert Strategy("mine", pairs, shares=[7, 7, 7, 7]) == Strategy("mine", pairs)  # type: ignore[arg-type]
    assert Strategy("mine", pairs[:1], shares=(5,)).shares == ()
    assert Strategy("mine", pairs, shares=(1 << 40,) * 4).shares == ()


def test_shares_are_part_of_the_digest() -> None:
    pairs = build("clique", FOUR).select(0).pairs
    shares = [(), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 12)]
    digests = {Strategy("mine", pairs, whole, one).digest for one in shares for whole in (False, True)}
    assert len(digests) == 8
    assert Strategy("yours", pairs, shares=(2, 4, 2, 2)).digest == Strategy("mine", pairs, shares=(1, 2, 1, 1)).digest


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((1, 2), r"strategy 'mine' needs one share for each of its 4 graph pairs, got 2"),
        ((1, 2, 0, 4), r"strategy 'mine' gives pair 2 a share of 0, not an integer > 0"),
        ((1, 2, 3, -4), r"gives pair 3 a share of -4"),
        ((1, 0.5, 3, 4), r"gives pair 1 a share of 0\.5"),
        ((True, 2, 3, 4), r"gives pair 0 a share of True"),
        ((1, 1, 1, 1 << 24), r"the shares of strategy 'mine' add up to more than 16777216"),
    ],
)
def test_shares_that_cannot_be(shares: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Strategy("mine", build("clique", FOUR).select(0).pairs, shares=shares)


def test_strategies_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="'none' has no graph pair"):
        Strategy("none", ())
    mixed = tuple(GraphPair.of(Graph.from_parents([0] * size)) for size in (2, 3))
    with pytest.raises(ConfigError, match=r"mixes graphs of sizes \[2, 3\]"):
        Strategy("mixed", mixed)


def test_a_sized_strategy_goes_by_its_bounds() -> None:
    star, ring, tree = (build(name, FOUR).select(0) for name in ("star", "ring", "tree"))
    sized = SizedStrategy("mine", ((0, tree), (10, star), (None, ring)))
    assert [sized.select(nbytes).name for nbytes in (0, 1, 10, 11, 1 << 40)] == ["tree", "star", "star", "ring", "ring"]
    assert sized.size == 4
    others: list[AnyStrategy] = [
        SizedStrategy("mine", ((0, tree), (11, star), (None, ring))),
        SizedStrategy("mine", ((0, tree), (10, ring), (None, star))),
        SizedStrategy("mine", ((None, star),)),
    ]
    digests = {strategy.digest for strategy in [*others, sized, star]}
    assert len(digests) == 5
    assert SizedStrategy("yours", sized.rules).digest == sized.digest


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], "exactly one rule without a bound"),
        ([10], "exactly one rule without a bound"),
        ([None, 10], "exactly one rule without a bound"),
        ([None, None], "exactly one rule without a bound"),
        ([10, 10, None], r"ascending bounds from 0, got \[10, 10\]"),
        ([-1, None], r"ascending bounds from 0, got \[-1\]"),
    ],
)
def test_bounds_that_cannot_be(bounds: list[int | None], message: str) -> None:
    star = build("star", FOUR).select(0)
    with pytest.raises(ConfigError, match=message):
        SizedStrategy("mine", tuple((bound, star) for bound in bounds))


def test_rules_of_different_sizes() -> None:
    star, small = build("star", FOUR).select(0), build("star", Layout.even(2)).select(0)
    with pytest.raises(ConfigError, match=r"mixes graphs of sizes \[2, 4\]"):
        SizedStrategy("mine", ((1, star), (None, small)))


def test_a_users_own_tree() -> None:
    assert from_edges(3, [(1, 2), (1, 0)], name="mine").pairs[0].reduce.children == ((), (2, 0), ())
    assert from_parents([1, 1, 1]).pairs[0].reduce.children == ((), (0, 2), ())
    assert from_parents([1, 1, 1]).name == "custom"
    with pytest.raises(ConfigError, match="strategy 'mine': rank 1 has two parents"):
        from_edges(3, [(0, 1), (2, 1)], name="mine")
    with pytest.raises(ConfigError, match=r"strategy 'custom': .*exactly one root"):
        from_parents([0, 1])
    with pytest.raises(ConfigError, match="strategy 'custom'"):
        from_parents([0, "a"])  # type: ignore[list-item]


def test_build_takes_whatever_has_graphs() -> None:
    tree = Graph.from_parents([0, 0, 0, 0])
    star = build("star", FOUR)
    assert build(star, FOUR) is star
    assert build("auto", FOUR).digest == build(build("auto", FOUR), FOUR).digest
    assert build(tree, FOUR).digest == build(GraphPair.of(tree), FOUR).digest == star.digest


@pytest.mark.parametrize("spec", ["star", "auto", "graph"])
def test_build_checks_the_size(spec: str) -> None:
    ready = Graph.from_parents([0, 0, 0, 0]) if spec == "graph" else build(spec, FOUR)
    with pytest.raises(ConfigError, match=f"strategy '{spec.replace('graph', 'custom')}' is for 4 ranks, not for 3"):
        build(ready, Layout.even(3))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rign", "did you mean ring"),
        ("Binary-Tree", "did you mean binary_tree"),
        ("BINARY_TREE_STARS", "did you mean binary_tree_star"),
        ("zzz", "unknown strategy 'zzz'; .known are: star, ring"),
        ("", "known are: star"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        build(name, FOUR)


def test_build_refuses_other_things() -> None:
    with pytest.raises(ConfigError, match="not int"):
        build(3, FOUR)  # type: ignore[arg-type]
