"""Sufficient factors: the byte formula against the paper's layers, and equal means whichever way a layer goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm import Communicator
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import Factors, HybridGradients, all_reduce_numbers, factor_numbers, most_samples, takes_factors


@pytest.mark.parametrize(("rows", "columns", "samples"), [(25088, 4096, 880), (4096, 4096, 512), (4096, 1000, 201)])
def test_break_even_of_factors_with_eight_ranks(rows: int, columns: int, samples: int) -> None:
    """The dense layers of VGG-16."""
    assert round(most_samples(rows, columns, 8)) == samples
    assert takes_factors(rows, columns, 32, 8)
    assert not takes_factors(rows, columns, samples + 1, 8)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 1000), st.integers(2, 64))
def test_the_smaller_of_two_is_chosen(rows: int, columns: int, samples: int, size: int) -> None:
    by_factors, whole = factor_numbers(rows, columns, samples, size), all_reduce_numbers(rows, columns, size)
    if by_factors != pytest.approx(whole):
        assert takes_factors(rows, columns, samples, size) == (by_factors < whole)


def test_one_rank_sends_nothing() -> None:
    assert not takes_factors(100, 100, 1, 1)


def gradients(rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(rank)

    def factors(samples: int, rows: int, columns: int) -> Factors:
        return Factors(rng.standard_normal((samples, rows)), rng.standard_normal((samples, columns)))

    return {"large": factors(4, 60, 40), "small": factors(30, 8, 6), "bias": rng.standard_normal(8)}


def expected(size: int) -> dict[str, Any]:
    all_ = [gradients(rank) for rank in range(size)]
    dense = [
        {name: one.outer.T @ one.inner if isinstance(one, Factors) else one for name, one in of.items()} for of in all_
    ]
    return {name: sum(one[name] for one in dense) / size for name in dense[0]}


@pytest.mark.asyncio
async def test_means_are_the_same_whichever_way_a_layer_goes() -> None:
    async def main(comm: Communicator) -> tuple[Any, list[str]]:
        found = await HybridGradients(comm).average(gradients(comm.rank))
        return found, [one.name for one in comm.statistics().keys]

    async with world(3) as comms:
        for found, names in await run_ranks(comms, main):
            assert list(found) == ["large", "small", "bias"]
            for name, truth in expected(3).items():
                np.testing.assert_allclose(found[name], truth, rtol=1e-12, atol=1e-12)
            assert "hybrid/factors/large" in names
            assert "hybrid/factors/small" not in names

    def blocking() -> list[Any]:
        with sync_world(2) as comms:
            return run_threads(comms, lambda comm: HybridGradients(comm).average(gradients(comm.rank)).wait())

    import asyncio

    for found in await asyncio.to_thread(blocking):
        np.testing.assert_allclose(found["large"], expected(2)["large"], rtol=1e-12, atol=1e-12)


@pytest.mark.asyncio
async def test_without_factors_it_is_an_all_reduce() -> None:
    async with world(2) as comms:
        found = await run_ranks(comms, lambda comm: HybridGradients(comm).average({"x": np.full(3, comm.rank * 2.0)}))
        assert found[0]["x"].tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(ConfigError, match="a row for each sample"):
            HybridGradients(comms[0]).average({"x": Factors(np.ones((3, 2)), np.ones((4, 2)))})


@pytest.mark.asyncio
async def test_sent_bytes_follow_the_formula() -> None:
    """On a ring each rank passes on every other rank's factors once."""
    size, samples, rows, columns = 4, 8, 600, 400

    async def main(comm: Communicator) -> int:
        rng = np.random.default_rng(comm.rank)
        factors = Factors(rng.standard_normal((samples, rows)), rng.standard_normal((samples, columns)))
        await HybridGradients(comm).average({"dense": factors})
        return sum(peer.sent_nbytes for peer in comm.statistics().peers)

    async with world(size, strategy="ring") as comms:
        sent = await run_ranks(comms, main)
    assert sum(sent) / size == pytest.approx(8 * factor_numbers(rows, columns, samples, size), rel=0.02)


@pytest.mark.asyncio
async def test_results_go_where_they_are_wanted() -> None:
    async def main(comm: Communicator) -> None:
        room = {name: np.zeros_like(one) for name, one in expected(3).items()}
        found = await HybridGradients(comm).average(gradients(comm.rank), out=room)
        for name, truth in expected(3).items():
            assert found[name] is room[name]
            np.testing.assert_allclose(room[name], truth, rtol=1e-12, atol=1e-12)

    async with world(3) as comms:
        await run_ranks(comms, main)
        hybrid, given = HybridGradients(comms[0]), gradients(0)
        for out, said in (
            ({"large": np.zeros((60, 40))}, "has the names of the gradients"),
            ({**expected(1), "large": np.zeros((40, 60))}, r"float64 \(60, 40\), not float64 \(40, 60\)"),
            ({**expected(1), "small": np.zeros((8, 6), np.float32)}, r"float64 \(8, 6\), not float32 \(8, 6\)"),
        ):
            with pytest.raises(ConfigError, match=said):
                hybrid.average(given, out=out)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("is_weighted", [False, True])
async def test_ranks_with_unlike_numbers_of_samples(dtype: Any, is_weighted: bool) -> None:
    """The last batch of a sampler: steps of 6, 6, 5 and 0 samples on some rank, with the forms agreed at the first."""
    steps = [(6, 6, 6), (6, 5, 5), (1, 0, 0), (40, 1, 7)]

    def of(step: int, rank: int) -> dict[str, Any]:
        rng = np.random.default_rng((step, rank))
        count = steps[step][rank]
        outer, inner = (rng.standard_normal((count, n)).astype(dtype) for n in (60, 40))
        mean = outer / max(count, 1) if is_weighted else outer
        bias = mean.sum(axis=0)
        return {"dense": Factors(mean, inner), "bias": bias}

    def truth(step: int) -> dict[str, Any]:
        weights = steps[step] if is_weighted else (1, 1, 1)
        ranks = [of(step, rank) for rank in range(3)]
        dense = sum(w * (one["dense"].outer.T @ one["dense"].inner) for w, one in zip(weights, ranks, strict=True))
        bias = sum(w * one["bias"] for w, one in zip(weights, ranks, strict=True))
        return {"dense": dense / sum(weights), "bias": bias / sum(weights)}

    async def main(comm: Communicator) -> tuple[list[dict[str, Any]], list[str]]:
        hybrid = HybridGradients(comm)
        found = []
        for step, counts in enumerate(steps):
            weight = counts[comm.rank] if is_weighted else None
            found.append(await hybrid.average(of(step, comm.rank), weight=weight))
        return found, [one.name for one in comm.statistics().keys]

    close = {"rtol": 1e-12, "atol": 1e-12} if dtype is np.float64 else {"rtol": 1e-4, "atol": 1e-5}
    async with world(3) as comms:
        ranks = await run_ranks(comms, main)
    for found, names in ranks:
        assert "hybrid/factors/dense" in names
        for step, one in enumerate(found):
            for name, wanted in truth(step).items():
                assert one[name].dtype == dtype
                np.testing.assert_allclose(one[name], wanted, **close)
                assert np.array_equal(one[name], ranks[0][0][step][name])


@pytest.mark.asyncio
async def test_form_follows_the_mean_number_of_samples() -> None:
    """A rank that has many would choose the gradient by itself, and one that has few the factors."""

    async def main(comm: Communicator) -> list[str]:
        count = (1, 60)[comm.rank]
        factors = Factors(np.ones((count, 20)), np.ones((count, 20)))
        found = await HybridGradients(comm).average({"dense": factors})
        assert found["dense"][0, 0] == 30.5
        return [one.name for one in comm.statistics().keys]

    async with world(2) as comms:
        for names in await run_ranks(comms, main):
            assert "hybrid/factors/dense" not in names  # 30.5 samples of 20 + 20 numbers; the gradient has 400


@pytest.mark.asyncio
async def test_negative_weight_is_refused() -> None:
    async with world(1) as comms:
        with pytest.raises(ConfigError, match="expected a finite weight of at least 0, got -1"):
            HybridGradients(comms[0]).average({"x": np.ones(3)}, weight=-1)
