from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.common.sizes import parse_size
from kfcomm.errors import ConfigError
from kfcomm.strategies import SizedStrategy, build, from_edges, names, show_exactly
from kfcomm.types import Layout

FOUR = Layout.even(4, 2)
KIB = 1 << 10


def test_a_message_belongs_to_the_lowest_bound_that_it_does_not_exceed() -> None:
    built = build({"else": "ring", "<=1MiB": "tree", "<=64KiB": "star"}, FOUR)
    want = {0: "star", 64 * KIB: "star", 64 * KIB + 1: "tree", 1 << 20: "tree", (1 << 20) + 1: "ring"}
    assert {nbytes: built.select(nbytes).name for nbytes in want} == want
    assert built.name == "<=64KiB: star, <=1MiB: tree, else: ring"


@given(st.dictionaries(st.integers(0, 1 << 40), st.sampled_from(names())), st.sampled_from(names()))
def test_the_name_of_rules_means_the_same_rules(bounds: dict[int, str], last: str) -> None:
    rules = {f"<={show_exactly(bound)}": name for bound, name in bounds.items()}
    built = build({**rules, "else": last}, FOUR)
    again = build(built.name, FOUR)
    assert (again.digest, again.name) == (built.digest, built.name)
    for nbytes in [edge for bound in bounds for edge in (bound, bound + 1)] + [0, 1 << 50]:
        held = [bound for bound in bounds if nbytes <= bound]
        name = bounds[min(held)] if held else last
        assert built.select(nbytes) == build(name, FOUR).select(nbytes)


def test_rules_take_strategies_and_graphs() -> None:
    mine = from_edges(4, [(3, 2), (2, 1), (1, 0)], name="mine")
    built = build({"<=1KiB": mine, "<= 8 KiB": {"<=2KiB": "star", "else": "tree"}, "else": mine.pairs[0]}, FOUR)
    assert isinstance(built, SizedStrategy)
    assert [(bound, one.name) for bound, one in built.rules] == [
        (1024, "mine"), (2048, "star"), (8192, "tree"), (None, "custom")
    ]  # fmt: skip


def test_a_rule_within_rules_ends_where_the_outer_one_does() -> None:
    inner = {"<=2KiB": "star", "<=8KiB": "tree", "else": "ring"}
    for bound in (8192, 8000):
        built = build({"<=1KiB": "clique", f"<={bound}": inner, "else": "auto"}, FOUR)
        assert isinstance(built, SizedStrategy)
        names_of = [(edge, one.name) for edge, one in built.rules[:3]]
        assert names_of == [(1024, "clique"), (2048, "star"), (bound, "tree")]


@given(st.integers(0, 1 << 40))
def test_sizes_are_read_as_they_are_shown(nbytes: int) -> None:
    assert parse_size(show_exactly(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("<=64KiB: star", "rules need an 'else'"),
        ({}, "rules need an 'else'"),
        ("<=64KiB: star, ring", "'ring' has no colon"),
        ("star, ring", "'star' has no colon"),
        ("<=64KiB", "'<=64KiB' has no colon"),
        ("<=1KiB: star, <=1KiB: tree, else: ring", "'<=1KiB' comes twice"),
        ("<=1KiB: star, <=1024: tree, else: ring", "'<=1KiB', '<=1024', 'else' are the same bound"),
        (">1KiB: star, else: ring", "expected a condition '<=SIZE' or 'else', got '>1KiB'"),
        ({1024: "star", "else": "ring"}, "expected a condition '<=SIZE' or 'else', got 1024"),
        ("<=64XB: star, else: ring", "expected a size, got '64XB'"),
        ("<=9999GiB: star, else: ring", "'9999GiB' is more than 1024 GiB"),
        ("<=64KiB: rign, else: ring", "unknown strategy 'rign'; did you mean ring"),
        ({"else": 5}, "a strategy is a name, rules by size, .* not int"),
        ({"else": from_edges(2, [(0, 1)])}, "strategy 'custom' is for 2 ranks, not for 4"),
    ],
)
def test_rules_that_cannot_be(rules: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(rules, FOUR)


def test_others_are_asked_for_names_that_are_not_its_own() -> None:
    asked: list[str] = []

    def others() -> dict[str, Any]:
        asked.append("asked")
        return {"theirs": lambda layout: "star" if layout.size == 4 else "ring", "star": lambda _: "ring"}

    assert build("star", FOUR, others).name == "star"
    assert not asked
    assert build({"<=1KiB": "theirs", "else": "ring"}, FOUR, others).select(1).name == "star"
    with pytest.raises(ConfigError, match="unknown strategy 'their'; did you mean theirs"):
        build("their", FOUR, others)
