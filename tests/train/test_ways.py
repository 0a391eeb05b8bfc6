"""Algorithms of agreement against values made by hand, with ranks in lockstep without a network; and their trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import (
    SMA,
    AdaSGD,
    Agreement,
    DiLoCo,
    ElasticAveraging,
    GradientMonitor,
    LocalAdaAlter,
    LocalSGD,
    SynchronousSGD,
)
from kfcomm.train.agreement import leaves, mapped, rebuilt
from tests.train.scripted import Alone, model, raw, together


def ways(make: Callable[[Any], Agreement], size: int) -> list[Any]:
    return [make(Alone(rank, size)) for rank in range(size)]


def parameters(ranks: list[Any], models: list[Any]) -> list[Any]:
    return together([raw(way.parameters)(one) for way, one in zip(ranks, models, strict=True)])


def gradients(ranks: list[Any], given_: list[Any]) -> list[Any]:
    return together([raw(way.gradients)(one) for way, one in zip(ranks, given_, strict=True)])


FOUR = [model(1), model(3), model(5), model(7)]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(0.01, 1.0))
def test_sma_keeps_the_mean_and_shrinks_distances(values: list[float], alpha: float) -> None:
    found = np.concatenate(parameters(ways(lambda comm: SMA(comm, alpha), len(values)), [model(x) for x in values]))
    assert found.mean() == pytest.approx(np.mean(values), abs=1e-9)
    assert np.ptp(found) == pytest.approx((1 - alpha) * np.ptp(values), abs=1e-9)


def test_kept_copies_do_not_follow_in_place_updates() -> None:
    given_ = [model(0), model(0)]
    elastic = [ElasticAveraging(Alone(rank, 2), given_[rank], alpha=0.1) for rank in range(2)]
    diloco = [DiLoCo(Alone(rank, 2), given_[rank], every=1) for rank in range(2)]
    for x in given_:
        x -= 1.0
    assert all(float(way.center[0]) == 0.0 for way in elastic)
    found = parameters(diloco, given_)
    assert float(diloco[0].model[0]) == pytest.approx(-1.33)
    for x in found:
        x -= 1.0
    assert float(diloco[0].model[0]) == pytest.approx(-1.33)


@pytest.mark.parametrize("is_told", [False, True])
def test_adasgd_changes_at_one_step_on_all_ranks(is_told: bool) -> None:
    ranks = ways(lambda comm: AdaSGD(comm, 0.1, after=None if is_told else 2), 4)
    assert np.concatenate(parameters(ranks, FOUR)) == pytest.approx([1.3, 3.1, 4.9, 6.7])
    assert gradients(ranks, FOUR) == FOUR
    if is_told:
        ranks[2].change()
    assert np.concatenate(parameters(ranks, FOUR)) == pytest.approx([1.3, 3.1, 4.9, 6.7])
    assert gradients(ranks, FOUR) == FOUR, "what was agreed holds from the next step on"
    assert np.concatenate(parameters(ranks, FOUR)) == pytest.approx([4.0] * 4)
    assert all(way.is_synchronous for way in ranks)
    assert np.concatenate(gradients(ranks, FOUR)) == pytest.approx([4.0] * 4)
    assert parameters(ranks, FOUR) == FOUR, "models are equal from here on, and stay a rank's own"


@pytest.mark.parametrize(
    "make",
    [
        lambda comm: SMA(comm, 0),
        lambda comm: SMA(comm, 1.5),
        lambda comm: SMA(comm, True),
        lambda comm: SMA(comm, float("nan")),
        lambda comm: AdaSGD(comm, 0.1, after=0),
        lambda comm: ElasticAveraging(comm, model(0), 0.3),
        lambda comm: ElasticAveraging(comm, model(0), 0.2, every=0),
        lambda comm: LocalSGD(comm, 0),
        lambda comm: LocalSGD(comm, 2.0),
        lambda comm: DiLoCo(comm, model(0), lr=0),
        lambda comm: DiLoCo(comm, model(0), momentum=1.0),
        lambda comm: LocalAdaAlter(comm, model(0), 2, epsilon=0),
        lambda comm: LocalAdaAlter(comm, model(0), 2, initial=-1),
        lambda comm: SynchronousSGD(comm, op="max"),
        lambda comm: SynchronousSGD(comm, wire_dtype="float32"),
        lambda comm: SynchronousSGD(comm, op="adasum", wire_dtype="float16"),
        lambda comm: SynchronousSGD(comm, monitor=GradientMonitor(comm, 8), wire_dtype="float16"),
    ],
)
def test_numbers_out_of_their_range(make: Callable[[Any], Agreement]) -> None:
    told: list[Any] = []

    class Telling(Alone):
        def all_gather_object(self, value: Any, name: str) -> Any:
            told.append((value, name))
            return Future()

    class Future:
        def add_done_callback(self, _: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"\w+\(.*\): "):
        make(Telling(0, 4))
    assert [name.rpartition(" ")[2] for _, name in told] == ["gradients", "parameters"]
    assert all(problem for (_, problem), _ in told)


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
