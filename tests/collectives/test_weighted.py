"""Averages by weight: of every dtype and kind, the same bits everywhere, and what is refused or disagrees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.arrays import dtype_of
from kfcomm.collectives.averages import WEIGHT
from kfcomm.errors import CollectiveAborted, CollectiveError, ConfigError
from kfcomm.testing import run_threads, sync_world
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, works, world

WEIGHTS = (3, 0.5, 0)
DTYPES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14, "complex64": 1e-6}


def xs(dtype: str, *shape: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(dtype_of(dtype)) for _ in WEIGHTS]


def expected(arrays: list[Any]) -> Any:
    wide = [one.astype(np.complex128 if one.dtype.kind == "c" else np.float64) for one in arrays]
    return sum(weight * one for weight, one in zip(WEIGHTS, wide, strict=True)) / sum(WEIGHTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 4), (0,), (30_001,)])
@pytest.mark.asyncio
async def test_each_counts_by_its_weight(dtype: str, shape: tuple[int, ...]) -> None:
    async with world(3) as comms:
        arrays = xs(dtype, *shape)
        before = [one.copy() for one in arrays]
        for _ in range(2):
            found = await everywhere(
                comms,
                lambda comm: comm.all_reduce(arrays[comm.rank], "x", op="mean", weight=WEIGHTS[comm.rank]),
            )
            assert all(same_bits(one, found[0]) for one in found)
            assert (found[0].shape, found[0].dtype) == (shape, arrays[0].dtype)
            np.testing.assert_allclose(found[0].astype(complex), expected(arrays), rtol=0, atol=DTYPES[dtype])
        assert all(same_bits(one, other) for one, other in zip(arrays, before, strict=True))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=4).filter(any), st.sampled_from(["ring", "star", "auto"]))
@settings(max_examples=20, deadline=None)
def test_whole_numbers_are_exact(weights: list[int], strategy: str) -> None:
    with sync_world(len(weights), strategy=strategy) as comms:
        found = run_threads(
            list(comms),
            lambda comm: comm.all_reduce(np.full(5, comm.rank * 8.0), "x", op="avg", weight=weights[comm.rank]),
        )
    mean = sum(8.0 * rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    assert all((one == mean).all() for one in found)


@pytest.mark.asyncio
async def test_a_rank_of_weight_nothing_gives_nothing() -> None:
    async with world(2) as comms:
        given = [np.ones(3), np.array([np.nan, np.inf, 5.0])]
        found = await everywhere(comms, lambda c: c.all_reduce(given[c.rank], op="avg", weight=1 - c.rank))
        assert all((one == 1).all() for one in found)
        for call in (
            lambda c: c.all_reduce(np.ones(3), "x", op="avg", weight=0),
            lambda c: c.all_reduce_many({"x": np.ones(3)}, op="avg", weight=0.0),
        ):
            failed = await ends(comms, call)
            assert_kinds(failed, CollectiveError, CollectiveError)
            assert "the weights of all ranks are 0" in str(failed[0])
        await works(comms)


@pytest.mark.asyncio
async def test_it_goes_where_it_is_wanted() -> None:
    async with world(2) as comms:
        arrays = [np.full((2, 6), comm.rank + 1.0, np.float32) for comm in comms]
        strided = [np.zeros((2, 12), np.float32)[:, ::2] for _ in comms]
        assert [
            one is out
            for one, out in zip(
                await everywhere(
                    comms,
                    lambda c: c.all_reduce(arrays[c.rank], op="avg", weight=c.rank + 1, out=strided[c.rank]),
                ),
                strided,
                strict=True,
            )
        ] == [True, True]
        await everywhere(comms, lambda c: c.all_reduce(arrays[c.rank], op="avg", weight=c.rank + 1, out=arrays[c.rank]))
        assert all((one == np.float32(5 / 3)).all() for one in (*arrays, *strided))


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.asyncio
async def test_mappings(with_out: bool) -> None:
    async with world(3) as comms:
        forms: dict[str, tuple[int, ...]] = dict.fromkeys(DTYPES, (4, 3)) | {"float32": (20_000,)}
        arrays = {name: xs(name, *shape) for name, shape in forms.items()}
        given = [{name: arrays[name][rank] for name in forms} for rank in range(3)]
        outs = [{name: np.empty_like(one) for name, one in mine.items()} for mine in given]

        def call(comm: Any) -> Any:
            out = outs[comm.rank] if with_out else None
            return comm.all_reduce_many(given[comm.rank], op="avg", weight=WEIGHTS[comm.rank], out=out)

        found = await everywhere(comms, call)
        assert all(not with_out or one is out for one, out in zip(found, outs, strict=True))
        for name, atol in DTYPES.items():
            assert list(found[0]) == list(given[0])
            assert all(same_bits(one[name], found[0][name]) for one in found)
            assert (found[0][name].shape, found[0][name].dtype) == (forms[name], arrays[name][0].dtype)
            np.testing.assert_allclose(found[0][name].astype(complex), expected(arrays[name]), rtol=0, atol=atol)
        assert await everywhere(comms, lambda c: c.all_reduce_many({}, op="avg", weight=1)) == [{}] * 3


X = np.ones(6, np.float32)
REFUSED: dict[str, tuple[Any, str]] = {
    "op": (lambda c, x: c.all_reduce(x, "k", weight=2), "weight expects op avg, got sum"),
    "negative": (lambda c, x: c.all_reduce(x, "k", op="avg", weight=-1), "finite weight of at least 0"),
    "no number": (lambda c, x: c.all_reduce(x, "k", op="avg", weight=float("nan")), "finite weight of at least 0"),
    "text": (lambda c, x: c.all_reduce(x, "k", op="avg", weight="1"), "finite weight of at least 0"),
    "flag": (lambda c, x: c.all_reduce(x, "k", op="avg", weight=True), "finite weight of at least 0"),
    "integers": (lambda c, x: c.all_reduce(x.astype(int), "k", op="avg", weight=1), "op avg of int64"),
    "list": (lambda c, x: c.all_reduce([x], "k", op="avg", weight=1), "got a list"),
    "wire": (
        lambda c, x: c.all_reduce(x, "k", op="avg", weight=1, wire_dtype="bfloat16"),
        "wire_dtype cannot be combined with weight",
    ),
    "shared": (
        lambda c, x: c.all_reduce(x, "k", op="avg", weight=1, shared=True),
        "shared cannot be combined with weight",
    ),
    "out": (lambda c, x: c.all_reduce(x, "k", op="avg", weight=1, out=x[:1]), "out has shape"),
    "timeout": (lambda c, x: c.all_reduce(x, "k", op="avg", weight=1, timeout=-1), "timeout"),
    "mapping": (lambda c, x: c.all_reduce_many({"k": x}, op="sum", weight=1), "weight expects op avg, got sum"),
    "mapping on the wire": (
        lambda c, x: c.all_reduce_many({"k": x}, op="avg", weight=1, wire_dtype="bfloat16"),
        "wire_dtype cannot be combined with weight",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.asyncio
async def test_refused_calls_fail_on_all_ranks(what: str) -> None:
    call, why = REFUSED[what]
    async with world(2, aborted="mapping" in what) as comms:

        def one(comm: Any) -> Any:
            if comm.rank == 0:
                return call(comm, X)
            if "mapping" in what:
                return comm.all_reduce_many({"k": X}, op="avg", weight=1)
            return comm.all_reduce(X, "k", op="avg", weight=1)

        failed = await ends(comms, one)
        assert_kinds(failed, ConfigError, CollectiveAborted)
        assert why in str(failed[0])
        await works(comms)


@pytest.mark.asyncio
async def test_prepared_ones_meet_calls_and_cancelled_ones_end() -> None:
    async with world(2) as comms:
        x = np.full(4, 2.0)
        prepared = comms[0].all_reduce_init(x, "k", op="avg", weight=3)
        for value in (2.0, 6.0):
            x[:] = value
            other = comms[1].all_reduce(np.zeros(4), "k", op="avg", weight=1)
            assert (await prepared.start() == 0.75 * value).all()
            assert (await other == 0.75 * value).all()
        handle = comms[0].all_reduce(x, "k", op="avg", weight=1)
        assert handle.cancel()
        (failed,) = await ends(comms[1:], lambda c: c.all_reduce(x, "k", op="avg", weight=1))
        assert isinstance(failed, CollectiveAborted)
        await works(comms)


def test_without_a_loop() -> None:
    with sync_world(2) as comms:

        def main(comm: Any) -> Any:
            y = comm.all_reduce(np.full(2, float(comm.rank)), "x", op="avg", weight=comm.rank + 1)
            z = comm.all_reduce_many({"x": np.full(2, float(comm.rank))}, op="avg", weight=comm.rank + 1)
            return y.tolist(), z["x"].tolist(), WEIGHT in z

        assert run_threads(list(comms), main) == [([2 / 3] * 2, [2 / 3] * 2, False)] * 2
