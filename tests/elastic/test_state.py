"""States: attributes, places in words, and values that come from another rank."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm.elastic.state import State, arrays_of, difference, load, make_ready, plan_of, small_of
from kfcomm.errors import ConfigError


def state(**more: Any) -> State:
    layers = [{"w": np.zeros((2, 3)), "b": np.zeros(3, np.float32)}, {"w": np.ones(1)}]
    return State(layers=layers, step=3, log=["begun"], deep={"x": {"y": np.arange(4)}, "z": None}, **more)


def test_values_are_attributes() -> None:
    one = state()
    one.step += 1
    one.layers[0]["w"] += 1
    assert (one.step, one.layers[0]["w"].sum()) == (4, 6.0)
    assert repr(one) == "State(layers, step, log, deep)"
    with pytest.raises(AttributeError, match="no 'steps'; it has layers, step, log, deep"):
        one.steps  # noqa: B018
    with pytest.raises(ConfigError, match="not 'steps'"):
        one.steps = 1
    with pytest.raises(ConfigError, match="underscore"):
        State(_hidden=1)


def test_arrays_have_places_in_an_order_of_names() -> None:
    assert [place for place, _ in arrays_of(state())] == [
        "deep['x']['y']", "layers[0]['b']", "layers[0]['w']", "layers[1]['w']",
    ]  # fmt: skip
    assert plan_of(state())[1] == ["layers[0]['b']", [3], "float32"]


def test_another_ranks_values_are_taken_over_in_place() -> None:
    mine, theirs = state(), state()
    theirs.layers[0]["w"][:] = 7
    theirs.deep["x"]["y"][:] = 9
    theirs.step, theirs.log = 12, ["begun", "goes on"]
    kept = mine.layers[0]["w"]
    load(mine, [np.array(array).reshape(-1) for _, array in arrays_of(theirs)], small_of(theirs))
    assert kept is mine.layers[0]["w"]
    assert (kept == 7).all()
    assert (mine.deep["x"]["y"] == 9).all()
    assert (mine.step, mine.log, mine.deep["z"]) == (12, ["begun", "goes on"], None)


def test_read_only_arrays_are_replaced() -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    one = State(a=frozen, pair=(np.zeros(1), "text"))
    load(one, [np.full(3, 5.0), np.full(1, 6.0)], {"a": None, "pair": [None, "other"]})
    assert one.a.tolist() == [5, 5, 5]
    assert frozen.tolist() == [0, 0, 0]
    assert (one.pair[0].tolist(), one.pair[1]) == ([6.0], "other")


class Moments(NamedTuple):
    count: int
    mu: Any


class Nothing(NamedTuple):
    """As optax has it where there is nothing to keep."""


def test_tuples_are_tuples_again_named_ones_too() -> None:
    one = State(
        opt=(Moments(1, np.zeros(2)), Nothing()), few={"betas": (0.9, 0.99), "log": [1]}, pair=(Nothing(), (1, 2))
    )
    small = {
        "opt": [[5, None], []], "few": {"betas": [0.8, 0.98], "log": [1, 2], "more": [3]}, "pair": [[], [3, 4]],
    }  # fmt: skip
    load(one, [np.full(2, 7.0)], small)
    assert isinstance(one.opt[0], Moments)
    assert (one.opt[0].count, one.opt[0].mu.tolist(), one.opt[1]) == (5, [7.0, 7.0], Nothing())
    assert one.few == {"betas": (0.8, 0.98), "log": [1, 2], "more": [3]}
    assert one.pair == (Nothing(), (3, 4))


def test_differences_are_told_with_names_and_shapes() -> None:
    assert difference(plan_of(state()), plan_of(state()), "rank 3") is None
    longer = plan_of(state(zz=np.zeros(1)))
    assert difference(longer, plan_of(state()), "rank 3") == "zz is in the state of this rank alone"
    assert difference(plan_of(state()), longer, "rank 3") == "zz is in the state of rank 3 alone"
    assert difference(plan_of(State(a=np.zeros(2))), plan_of(State(a=np.zeros((3, 1)))), "rank 1") == (
        "a is float64(2,) here and float64(3, 1) on rank 1"
    )
    assert "this rank's state has a where that of rank 1 has b" in str(
        difference(plan_of(State(a=np.zeros(2))), plan_of(State(b=np.zeros(2))), "rank 1")
    )


def test_the_memory_of_a_joining_rank_exists_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("kfcomm.elastic.state.populate", lambda x: asked.append(x.__array_interface__["data"][0]))
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    one = State(a=np.zeros(4), deep={"b": np.zeros((2, 2))}, turned=np.zeros((2, 3)).T, frozen=frozen, step=1)
    make_ready()
    for array, is_asked in ((one.a, True), (one.deep["b"], True), (one.turned, False), (one.frozen, False)):
        assert (array.__array_interface__["data"][0] in asked) == is_asked
    del one
    gc.collect()
    asked.clear()
    make_ready()
    assert not asked
