"""``op="adasum"`` against a tree of pairs that is written out, as Horovod defines it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm import Communicator
from kfcomm.errors import CollectiveError, CollectiveMismatch, ConfigError
from kfcomm.reduce.adasum import adasum_weights
from kfcomm.testing import run_ranks, run_threads, sync_world, world


def pair(a: Any, b: Any) -> Any:
    together, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    least = float(np.sqrt(np.finfo(np.float64).tiny))
    one = 1.0 if aa < least else 1 - together / (2 * aa)
    other = 1.0 if bb < least else 1 - together / (2 * bb)
    return one * a + other * b


def tree(gradients: list[Any]) -> Any:
    while len(gradients) > 1:
        pairs = [pair(gradients[at], gradients[at + 1]) for at in range(0, len(gradients) - 1, 2)]
        gradients = pairs + gradients[2 * len(pairs) :]
    return gradients[0]


def by_products(gradients: Any) -> Any:
    return adasum_weights(gradients @ gradients.T) @ gradients


def test_values_of_two_ranks() -> None:
    found = by_products(np.array([[1.0, 2, 3], [4, -5, 6]]))
    assert found == pytest.approx([4.25974025974, -3.467532467532, 7.246753246753], rel=1e-12)


@given(st.integers(2, 8), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_the_products_tell_what_the_tree_does(size: int, count: int, seed: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((size, count))
    assert by_products(gradients) == pytest.approx(tree(list(gradients)), rel=1e-9, abs=1e-9)


@given(st.integers(2, 8), st.data())
def test_orthogonal_gradients_are_added(size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=size, max_size=size))
    assert by_products(np.diag(lengths)) == pytest.approx(lengths, rel=1e-15)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_equal_gradients_give_themselves(size: int, count: int, seed: int) -> None:
    gradient = np.random.default_rng(seed).standard_normal(count)
    assert by_products(np.tile(gradient, (size, 1))) == pytest.approx(gradient, rel=1e-14)


def test_parallel_gradients_give_their_mean() -> None:
    gradient = np.array([3.0, -4.0, 12.0])
    assert by_products(np.array([gradient, 3 * gradient])) == pytest.approx(2 * gradient, rel=1e-15)


def test_zero_and_opposite_gradients() -> None:
    gradient = np.array([1.0, 2.0])
    zero = np.zeros(2)
    assert by_products(np.array([gradient, zero])).tolist() == gradient.tolist()
    assert by_products(np.array([zero, zero])).tolist() == [0.0, 0.0]
    assert by_products(np.array([gradient, -gradient, gradient])) == pytest.approx(gradient, rel=1e-15)
    assert np.isnan(by_products(np.array([gradient, [np.nan, 1.0]]))).all()


def gradients_of(rank: int, dtype: Any) -> dict[str, Any]:
    rng = np.random.default_rng(rank)
    return {
        "a": rng.standard_normal((3, 5)).astype(dtype),
        "b": rng.standard_normal(1).astype(dtype),
        "c": rng.standard_normal(70_003).astype(dtype),
        "none": np.empty((0, 4), dtype),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("size", range(1, 9))
async def test_all_reduce_many_combines_each_tensor_by_itself(size: int) -> None:
    async with world(size) as comms:
        found = await run_ranks(
            comms, lambda comm: comm.all_reduce_many(gradients_of(comm.rank, np.float64), op="adasum")
        )
    given_ = [gradients_of(rank, np.float64) for rank in range(size)]
    for name in ("a", "b", "c"):
        expected = tree([one[name].ravel() for one in given_]).reshape(given_[0][name].shape)
        np.testing.assert_allclose(found[0][name], expected, rtol=1e-9, atol=1e-12)
        assert all(np.array_equal(one[name], found[0][name]) for one in found), "the same bits on all ranks"
    assert found[0]["none"].shape == (0, 4)


@pytest.mark.asyncio
async def test_never_on_a_fused_buffer() -> None:
    async with world(2) as comms:
        found = await asyncio.gather(
            comms[0].all_reduce([np.array([1.0, 2]), np.array([3.0, 4])], "g", op="adasum"),
            comms[1].all_reduce([np.array([4.0, 3]), np.array([-2.0, 1])], "g", op="adasum"),
        )
        assert np.concatenate(found[0]) == pytest.approx([3.2, 2.4, 0.72, 5.36], rel=1e-12)
        fused = await asyncio.gather(
            comms[0].all_reduce(np.array([1.0, 2, 3, 4]), "f", op="adasum"),
            comms[1].all_reduce(np.array([4.0, 3, -2, 1]), "f", op="adasum"),
        )
        assert fused[0] == pytest.approx([4.33, 4.33, 0.87, 4.33], abs=0.005)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_float_dtype_blocking_and_into_out(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)

    def main(comm: Any) -> Any:
        x = np.random.default_rng(comm.rank).standard_normal((4, 9)).astype(kind)
        out = np.empty_like(x)
        assert comm.all_reduce(x, "g", op="adasum", out=out) is out
        for _ in range(2):
            assert np.array_equal(comm.all_reduce_async(x, op="adasum").wait(), out)
        return x, out

    with sync_world(3) as comms:
        found = run_threads(comms, main)
    expected = tree([x.astype(np.float64).ravel() for x, _ in found]).reshape(4, 9)
    assert all(out.dtype == kind for _, out in found)
    eps = float(ml_dtypes.finfo(kind).eps)
    assert found[0][1].astype(np.float64) == pytest.approx(expected, rel=8 * eps, abs=8 * eps)


@pytest.mark.asyncio
async def test_mappings_with_out_and_a_name() -> None:
    async with world(2) as comms:
        outs = [{"x": np.empty(3), "y": np.empty(2)} for _ in comms]
        found = await asyncio.gather(
            *(
                comm.all_reduce_many({"y": np.ones(2), "x": np.ones(3)}, "many", op="adasum", out=out)
                for comm, out in zip(comms, outs, strict=True)
            )
        )
        assert found[1] is outs[1]
        assert outs[0]["x"] == pytest.approx([1.0, 1, 1])
        assert await comms[0].all_reduce_many({}, op="adasum") == {}


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["shape", "dtype", "op", "many"])
async def test_what_differs_is_an_error_on_all_ranks(call: str) -> None:
    async def main(comm: Communicator) -> None:
        odd, x = comm.rank == 1, np.ones(4)
        match call:
            case "shape":
                handle: Any = comm.all_reduce(np.ones((3, 4) if odd else (4, 3)), "g", op="adasum")
            case "dtype":
                handle = comm.all_reduce(np.ones(8, np.float32) if odd else x, "g", op="adasum")
            case "op":
                handle = comm.all_reduce(x, "g", op="sum" if odd else "adasum")
            case _:
                handle = comm.all_reduce_many({"g": x}, op="sum" if odd else "adasum")
        with pytest.raises(CollectiveMismatch, match=r"rank 0 has .*; rank 1 has "):
            await handle
        await comm.all_reduce(np.ones(4), "g", op="adasum")

    async with world(3) as comms:
        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_what_cannot_be_combined_is_refused_on_all_ranks() -> None:
    async def main(comm: Communicator) -> None:
        for bad, word in (({"x": np.ones(3, np.int32)}, "adasum is for"), ({"wire_dtype": "float16"}, "wire dtype")):
            x = bad.pop("x", np.ones(3)) if comm.rank == 0 else np.ones(3)
            with pytest.raises(ConfigError if comm.rank == 0 else CollectiveError, match=word):
                await comm.all_reduce(x, "g", op="adasum", **(bad if comm.rank == 0 else {}))
        assert (await comm.all_reduce(np.ones(3), "g", op="adasum")).tolist() == [1, 1, 1]

    async with world(2) as comms:
        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_cancelling_ends_it_on_every_rank_and_the_name_works_on() -> None:
    async with world(2) as comms:
        handle = comms[0].all_reduce(np.ones(3), "g", op="adasum")
        assert handle.cancel()
        with pytest.raises(CollectiveError, match="cancelled"):
            await comms[1].all_reduce(np.ones(3), "g", op="adasum")
        found = await asyncio.gather(*(comm.all_reduce(np.ones(3), "g", op="adasum") for comm in comms))
        assert found[1].tolist() == [1, 1, 1]
