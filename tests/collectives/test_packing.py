"""``all_reduce_many``: what is packed, that every rank packs alike, and what happens when one does not."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.arrays import adapt
from kfcomm.collectives import units as dividing
from kfcomm.collectives.units import PACK_NBYTES, Item, Unit, units_of
from kfcomm.errors import CollectiveMismatch
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, world

DTYPES = ("float32", "float64", "int8", "float16")
SHAPES = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=12)


def test_small_arrays_of_one_dtype_are_packed_and_large_ones_travel_uncopied() -> None:
    arrays = {
        "a": np.zeros(3, np.float32),
        "b": np.zeros(PACK_NBYTES + 1, np.int8),
        "c": np.zeros((2, 2)),
        "d": np.zeros(PACK_NBYTES // 4, np.float32),
        "e": np.zeros((), np.float32),
        "f": np.zeros(PACK_NBYTES, np.float32),
    }
    items = [Item(name, adapt(x)) for name, x in arrays.items()]

    def names(units: list[Unit]) -> list[tuple[str, ...]]:
        return [tuple(one.name for one in unit.items) for unit in units]

    units = units_of(items, lambda *_: False)
    assert names(units) == [("a", "d", "e"), ("c",), ("b",), ("f",)]
    assert all(np.shares_memory(unit.source(), arrays[name]) for unit, name in zip(units[1:], "cbf", strict=True))
    units = units_of(items, lambda *_: True)
    assert names(units) == [("a", "d", "e", "f"), ("c",), ("b",)]
    assert np.shares_memory(units[0].source()[PACK_NBYTES // 4 + 4 : PACK_NBYTES], arrays["f"])


@pytest.mark.asyncio
@settings(max_examples=8)
@given(SHAPES, st.randoms(use_true_random=False), st.booleans())
async def test_the_results_are_those_of_single_calls_whatever_the_order(shapes, random, all_large) -> None:
    names = [f"n/{number}" for number in range(len(shapes))]
    generator = np.random.default_rng(len(shapes))
    inputs = [
        {
            name: generator.integers(-8, 8, shape).astype(dtype)
            for name, (dtype, shape) in zip(names, shapes, strict=True)
        }
        for _ in range(3)
    ]
    orders = [random.sample(names, len(names)) for _ in range(3)]

    before = dividing.PACK_NBYTES
    dividing.PACK_NBYTES = -1 if all_large else before
    try:
        async with world(3) as comms:
            given_ = [{name: inputs[rank][name] for name in orders[rank]} for rank in range(3)]
            results = await everywhere(comms, lambda comm: comm.all_reduce_many(given_[comm.rank]))
            for rank, result in enumerate(results):
                assert list(result) == orders[rank]
                for name in names:
                    want = sum(one[name] for one in inputs).astype(inputs[0][name].dtype)
                    assert same_bits(result[name], want)
    finally:
        dividing.PACK_NBYTES = before


@pytest.mark.asyncio
async def test_ranks_that_pack_differently_are_told_on_every_rank() -> None:
    x, large = np.ones(3), np.ones(PACK_NBYTES)
    async with world(3) as comms:
        for odd in ({"a": x, "c": x}, {"a": x, "b": np.ones((3, 1))}, {"a": x}, {"a": large, "b": x}):
            same = {"a": x, "b": x}
            outcomes = await ends(
                comms, lambda comm, odd=odd, same=same: comm.all_reduce_many(odd if comm.rank == 1 else same)
            )
            assert_kinds(outcomes, CollectiveMismatch)
            assert {one.key for one in outcomes} == {"a"}
        assert await everywhere(comms, lambda comm: comm.all_reduce_many({})) == [{}] * 3
        results = await everywhere(comms, lambda comm: comm.all_reduce_many({"b": x, "a": large}))
        assert all(one["b"].tolist() == [3.0] * 3 for one in results)


@pytest.mark.asyncio
async def test_calls_that_failed_leave_all_ranks_in_step() -> None:
    """The ranks may have begun different numbers of units."""
    parts = {"a": np.ones(2), "b": np.ones(2, np.int16), "c": np.ones(PACK_NBYTES)}
    async with world(2) as comms:
        for count in range(4):
            calls = [comm.all_reduce_many(parts) for comm in comms]
            calls[count % 2].cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            results = await everywhere(comms, lambda comm: comm.all_reduce_many(parts))
            assert all(one["b"].tolist() == [2, 2] for one in results)
