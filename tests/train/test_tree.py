"""Trees of arrays, and the same arrays by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train.agreement import leaves, mapped, rebuilt


class Pair(NamedTuple):
    one: Any
    other: Any


trees = st.recursive(
    st.integers(),
    lambda children: (
        st.lists(children, min_size=1, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1), children, min_size=1, max_size=3)
        | st.tuples(children, children)
        | st.builds(Pair, children, children)
    ),
)


@given(trees)
def test_leaves_and_rebuilt_round_trip(tree: Any) -> None:
    found = leaves(tree)
    assert rebuilt(tree, found) == tree
    assert type(rebuilt(tree, found)) is type(tree)
    doubled = mapped(lambda x, y: x + y, tree, tree)
    assert leaves(doubled) == {name: 2 * x for name, x in found.items()}


def test_names_are_the_ways_to_the_arrays() -> None:
    assert leaves({"layer": [1, (2, 3)], 7: {"x": 4}}) == {"layer/0": 1, "layer/1/0": 2, "layer/1/1": 3, "7/x": 4}
    assert leaves(5) == {"x": 5}


def test_trees_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="without arrays"):
        leaves({"a": []})
    with pytest.raises(ConfigError, match="two arrays"):
        leaves({"a/b": 1, "a": {"b": 2}})
    with pytest.raises(ConfigError, match="different arrays: b"):
        mapped(lambda x, y: x, {"a": 1}, {"a": 1, "b": 2})
