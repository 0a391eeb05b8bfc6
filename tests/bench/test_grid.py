"""From times to winners, and from winners to what is to be set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.bench.topologies import TOLERANCE, Advice, Grid, distinct
from kfcomm.errors import ConfigError
from kfcomm.types import Layout

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def grid(**seconds: tuple[float, ...]) -> Grid:
    return Grid.of(
        (strategy, nbytes, time_s)
        for strategy, times_s in seconds.items()
        for nbytes, time_s in zip(SIZES, times_s, strict=False)
    )


def test_the_winner_and_its_lead() -> None:
    found = grid(star=(1.0, 2.0), ring=(1.5, 1.0), tree=(3.0, 4.0))
    assert [found.winner(nbytes) for nbytes in found.sizes] == ["star", "ring"]
    assert found.ranking(SIZES[0]) == ["star", "ring", "tree"]
    assert found.slower("tree", SIZES[1]) == 4.0
    assert found.lead("star", SIZES[0]) == 1.5
    assert found.lead("star", SIZES[1]) == 0.5
    assert grid(star=(2.0,)).lead("star", SIZES[0]) == 1.0


def test_sizes_that_not_all_have_are_left_out() -> None:
    assert grid(star=(1.0, 2.0), ring=(1.0,)).sizes == (SIZES[0],)


def test_advice_in_words_and_as_a_setting() -> None:
    advice = Advice.of(grid(star=(1.0, 1.0, 9.0, 9.0), ring=(1.3, 1.3, 2.0, 3.0)))
    assert advice.in_words() == "up to 64 KiB: star (1.3× the next); above: ring (3.7× the next)"
    assert advice.as_setting() == "<=64KiB: star, else: ring"
    assert advice.as_json() == {
        "words": advice.in_words(),
        "setting": advice.as_setting(),
        "rules": [
            {"upto_nbytes": 1 << 16, "strategy": "star", "lead": 1.3},
            {"upto_nbytes": None, "strategy": "ring", "lead": 3.6742},
        ],
    }


def test_one_strategy_for_all_is_a_name() -> None:
    advice = Advice.of(grid(star=(1.0, 1.0), ring=(20.0, 20.0)))
    assert advice.in_words() == "at all sizes: star (20× the next)"
    assert advice.as_setting() == "star"


def test_equally_good_strategy_saves_a_rule() -> None:
    advice = Advice.of(grid(star=(1.0, 1.0, 1.0), ring=(0.97, 1.5, 0.99)))
    assert advice.as_setting() == "star"


def test_a_small_lead_is_called_so() -> None:
    assert "about as fast as the next" in Advice.of(grid(star=(1.0,), ring=(1.01,))).in_words()
    assert Advice.of(grid(star=(1.0,), ring=(1.0,))).in_words() == "at all sizes: star"


def test_a_bound_that_is_no_round_size_is_exact() -> None:
    cells = [("star", 1000, 1.0), ("ring", 1000, 2.0), ("star", 3 << 30, 2.0), ("ring", 3 << 30, 1.0)]
    assert Advice.of(Grid.of(cells)).as_setting() == "<=1000B: star, else: ring"
    cells = [(name, nbytes << 20, time_s) for name, nbytes, time_s in cells]
    assert Advice.of(Grid.of(cells)).as_setting() == "<=1000MiB: star, else: ring"


@given(st.lists(st.tuples(*[st.floats(0.1, 10.0)] * 3), min_size=1, max_size=12))
def test_no_advice_is_far_from_the_fastest(times: list[tuple[float, float, float]]) -> None:
    found = Grid.of(
        (name, 1 << bit, time_s)
        for bit, row in enumerate(times)
        for name, time_s in zip(("star", "ring", "tree"), row, strict=True)
    )
    advice = Advice.of(found)
    assert sum((rule.sizes for rule in advice.rules), ()) == found.sizes
    for rule in advice.rules:
        assert all(found.slower(rule.strategy, nbytes) <= TOLERANCE for nbytes in rule.sizes)
    assert [rule.upto for rule in advice.rules] == [rule.sizes[-1] for rule in advice.rules[:-1]] + [None]
    neighbours = zip(advice.rules, advice.rules[1:], strict=False)
    assert all(one.strategy != other.strategy for one, other in neighbours)


def test_strategies_with_the_same_graphs_are_one() -> None:
    assert distinct(("star", "tree", "ring", "binary_tree"), Layout.even(8, 8)) == {
        "star": ("tree",),
        "ring": (),
        "binary_tree": (),
    }
    assert distinct(("star", "binary_tree"), Layout.even(2)) == {"star": ("binary_tree",)}


def test_an_unknown_strategy() -> None:
    with pytest.raises(ConfigError, match="did you mean star"):
        distinct(("stra",), Layout.even(2))
