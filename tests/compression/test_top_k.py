"""Top-k: what travels, what is left, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kfcomm.sync
from kfcomm import testing
from kfcomm.compression import TopK, largest
from kfcomm.errors import ConfigError

SIZE, STEPS = 3, 6


def given(rank: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {
        "w": random.standard_normal((7, 11)),
        "b": random.standard_normal(5).astype(np.float32),
        "s": random.standard_normal(()),
    }


def each(main: Any, size: int = SIZE) -> list[Any]:
    with testing.sync_world(size) as comms:
        return testing.run_threads(comms, main)


def test_the_largest() -> None:
    x = np.array([0.1, -5.0, 3.0, 0.0, 4.0])
    assert largest(x, 2).tolist() == [1, 4]
    assert largest(x, 3).tolist() == [1, 2, 4]
    assert largest(x, 5).tolist() == largest(x, 9).tolist() == [0, 1, 2, 3, 4]


def test_against_a_plain_computation() -> None:
    def rank(comm: Any) -> list[dict[str, Any]]:
        compressed = TopK(0.2)
        return [compressed.average(comm, given(comm.rank, step)) for step in range(STEPS)]

    found = each(rank)
    errors: list[dict[str, Any]] = [{} for _ in range(SIZE)]
    for step in range(STEPS):
        for name, shape in (("w", (7, 11)), ("b", (5,)), ("s", ())):
            total = np.zeros(shape, given(0, 0)[name].dtype)
            for number in range(SIZE):
                whole = given(number, step)[name] + errors[number].get(name, 0)
                bound = np.sort(np.abs(whole), axis=None)[-int(np.ceil(0.2 * whole.size))]
                kept = np.where(np.abs(whole) >= bound, whole, 0).astype(total.dtype)
                errors[number][name] = whole - kept
                total = total + kept
            for of_rank in found:
                assert of_rank[step][name].dtype == total.dtype
                np.testing.assert_allclose(of_rank[step][name], total / SIZE, rtol=1e-6, atol=1e-12)
                assert of_rank[step][name].tobytes() == found[0][step][name].tobytes()


def test_sums_and_errors_add_up_at_every_step() -> None:
    """Σg = Σcompressed + error, to 1e-14."""
    with kfcomm.sync.init() as alone:
        compressed, sums, sent = TopK(0.05), np.zeros((7, 11)), np.zeros((7, 11))
        for step in range(20):
            one = given(0, step)
            one["w"] = np.asfortranarray(one["w"])  # as a transposed gradient comes
            sums += one["w"]
            sent += compressed.average(alone, one)["w"]
            error = compressed.errors.of("w")
            assert error is not None
            np.testing.assert_allclose(sums, sent + error, rtol=0, atol=1e-14)


def test_all_of_it_is_the_mean() -> None:
    def rank(comm: Any) -> Any:
        return TopK(1).average(comm, given(comm.rank, 0))

    for found in each(rank):
        for name in found:
            np.testing.assert_allclose(found[name], sum(given(one, 0)[name] for one in range(SIZE)) / SIZE, rtol=1e-6)


def test_bad_input() -> None:
    for share in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="is more than 0 and at most 1"):
            TopK(share)
    with kfcomm.sync.init() as alone:
        with pytest.raises(ConfigError, match=r"gradient 'n' is of int64: float16, float32 and float64 can be"):
            TopK().average(alone, {"n": np.arange(3)})
        assert TopK().average(alone, {}) == {}
