"""Conversion of values of many kinds, with all ranks that enter; and forms that do not fit together."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm.arrays import dtype_of
from kfcomm.elastic import Elastic, PerRank, State
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world


class Pair(NamedTuple):
    """Named tuple, as optax has them."""

    count: int
    mu: Any


class Holder:
    """Object with any state and any conversion."""

    def __init__(self, tree: Any, merging: Any) -> None:
        self.tree = tree
        self._merging = merging

    def state_dict(self) -> Any:
        return self.tree

    def load_state_dict(self, tree: Any) -> None:
        self.tree = tree

    def merging(self) -> Any:
        return self._merging


async def entered(states: list[State]) -> None:
    """Enter an ``Elastic`` with the states of all ranks, and leave it."""
    async with world(len(states), elastic=True) as comms:

        async def main(comm: Any) -> None:
            async with Elastic(comm, states[comm.rank]):
                pass

        await run_ranks(comms, main)


async def refused(states: list[State], text: str) -> None:
    """Enter with states that do not fit: the same error on all ranks."""
    async with world(len(states), elastic=True) as comms:

        async def main(comm: Any) -> str:
            with pytest.raises(ConfigError, match=text) as caught:
                async with Elastic(comm, states[comm.rank]):
                    raise AssertionError
            return str(caught.value)

        assert len(set(await run_ranks(comms, main))) == 1


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "complex64", "complex128", "bfloat16"])
@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.asyncio
async def test_arrays_keep_their_dtype_shape_and_memory(how: str, name: str) -> None:
    dtype = dtype_of(name)
    arrays = [np.full((2, 3), rank).astype(dtype) for rank in (1, 2, 6)]
    states = [State(x=PerRank(array, how)) for array in arrays]
    await entered(states)
    for state, array in zip(states, arrays, strict=True):
        assert state.x is array
        assert array.dtype == dtype
        assert array.tolist() == np.full((2, 3), 3).astype(dtype).tolist()


@pytest.mark.asyncio
async def test_large_values_of_small_types_do_not_overflow_in_the_sum() -> None:
    states = [State(x=PerRank(np.full(2, 6e4, np.float16), "mean"), y=PerRank(np.full(1, 3e38, np.float32), "sum"))
              for _ in range(4)]  # fmt: skip
    await entered(states)
    assert states[3].x.tolist() == [np.float16(6e4)] * 2
    assert states[3].y.tolist() == [np.float32(3e38)]


@pytest.mark.asyncio
async def test_other_values_are_those_of_the_lowest_rank() -> None:
    def tree(rank: int) -> Any:
        return {
            "n": rank, "name": f"{rank}", "ids": np.arange(rank, rank + 3), "pair": Pair(rank, np.full(2, float(rank))),
            "flag": rank > 1, "rate": rank + 0.5, 7: [(rank, float(rank))], "mask": np.array([rank > 1]),
        }  # fmt: skip

    states = [State(own=PerRank(tree(rank), "mean"), held=Holder({"k": tree(rank)}, {"k": "mean"})) for rank in (1, 3)]
    await entered(states)
    for state in states:
        for found in (state.own, state.held.tree["k"]):
            assert (found["n"], found["name"], found["flag"], found["rate"]) == (1, "1", False, 2.5)
            assert (found["ids"].tolist(), found["mask"].tolist()) == ([1, 2, 3], [False])
            assert found["ids"].dtype == np.arange(1).dtype
            assert type(found["pair"]) is Pair
            assert (found["pair"].count, found["pair"].mu.tolist()) == (1, [2.0, 2.0])
            assert found[7] == [(1, 2.0)]


@pytest.mark.asyncio
async def test_ranks_that_lack_a_value_get_it_and_do_not_count_for_the_mean() -> None:
    trees: list[Any] = [{"a": {}, "s": {}}, {"a": {"w": np.full(2, 3.0)}, "s": {"e": np.full(2, 6.0)}}, {"a": {}}]
    states = [State(held=Holder(tree, {"a": "mean", "s": "sum", "later": "sum"})) for tree in trees]
    await entered(states)
    for state in states:
        assert state.held.tree["a"]["w"].tolist() == [3.0, 3.0]
        assert state.held.tree["s"]["e"].tolist() == [2.0, 2.0]


@pytest.mark.asyncio
async def test_values_that_are_not_numbers_stay_so() -> None:
    states = [State(x=PerRank(np.array([1.0, value]), "mean")) for value in (2.0, np.nan, np.inf)]
    await entered(states)
    assert states[0].x[0] == 1.0
    assert all(np.isnan(state.x[1]) for state in states)


@pytest.mark.asyncio
async def test_forms_that_do_not_fit_are_refused_on_all_ranks() -> None:
    def held(x: Any, how: str = "mean") -> State:
        return State(held=Holder({"x": x}, {"x": how}))

    zeros = np.zeros(2)
    for other, text in (
        (held(np.zeros(3)), r"held\['x'\] is float64\(3,\) on rank 1 and float64\(2,\) on rank 0"),
        (held(np.zeros(2, "f4")), r"held\['x'\] is float32\(2,\) on rank 1 and float64\(2,\) on rank 0"),
        (held({"y": zeros}), r"held\['x'\]\['y'\] is float64\(2,\) on rank 1 and missing on rank 0"),
        (held(zeros, "sum"), r"held\['x'\] is converted by sum on rank 1, mean on rank 0"),
        (held(zeros, "max"), r"rank 1: held.merging\(\) gives 'max' for 'x': expected one of mean, sum"),
        (held(np.arange(2), "sum"), r"rank 1: held\['x'\] is to be divided among ranks, and is of int64"),
    ):
        await refused([held(zeros), other], text)


@pytest.mark.asyncio
async def test_object_that_all_ranks_convert_as_a_whole() -> None:
    class Model:
        def __init__(self, value: float) -> None:
            self.w, self.n = np.full(2, value), int(value)

        def state_dict(self) -> Any:
            return {"w": self.w, "n": self.n}

        def load_state_dict(self, tree: Any) -> None:
            self.w[:], self.n = tree["w"], tree["n"]

    models = [Model(1.0), Model(4.0)]
    await entered([State(model=PerRank(model, "mean")) for model in models])
    assert [(model.w.tolist(), model.n) for model in models] == [([2.5, 2.5], 1)] * 2


@pytest.mark.asyncio
async def test_own_state_has_no_marked_values() -> None:
    async with world(1, elastic=True) as comms:
        with pytest.raises(ConfigError, match="give values without PerRank"):
            Elastic(comms[0], State(), own=State(x=PerRank(1.0, "sum")))
