"""PowerSGD against its identities, and against one rank that has the mean of all gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kfcomm.sync
from kfcomm import testing
from kfcomm.compression import PowerSGD, is_worth, orthogonal
from kfcomm.errors import ConfigError

SIZE, STEPS = 3, 4
SHAPES = {"matrix": (12, 20), "kernel": (16, 4, 3, 3), "vector": (20,), "small": (3, 3)}


def gradients(rank: int, step: int, dtype: Any = np.float64) -> dict[str, Any]:
    random = np.random.default_rng([rank, step])
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def each(main: Any, size: int = SIZE) -> list[Any]:
    with testing.sync_world(size) as comms:
        return testing.run_threads(comms, main)


def steps(comm: Any, given: Any, **options: Any) -> list[dict[str, Any]]:
    compressed = PowerSGD(**options)
    return [compressed.average(comm, given(comm.rank, step)) for step in range(STEPS)]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_many_ranks_get_what_one_gets_of_their_mean(rank: int) -> None:
    def mean(_: int, step: int) -> dict[str, Any]:
        all_of_them = [gradients(one, step) for one in range(SIZE)]
        return {name: sum(one[name] for one in all_of_them) / SIZE for name in SHAPES}

    found = each(lambda comm: steps(comm, gradients, rank=rank))
    with kfcomm.sync.init() as alone:
        wanted = steps(alone, mean, rank=rank)
    for of_rank in found:
        for one, other in zip(of_rank, wanted, strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(one[name], other[name], rtol=1e-9, atol=1e-11, err_msg=name)
    for step in range(STEPS):
        assert all(found[0][step][name].tobytes() == other[step][name].tobytes() for other in found for name in SHAPES)


def test_one_step_by_its_formula() -> None:
    m = np.random.default_rng(5).standard_normal((12, 20))
    q = np.random.default_rng(6).standard_normal((20, 2))
    with kfcomm.sync.init() as alone:
        compressed = PowerSGD(2, first={"m": q})
        (found,) = compressed.average(alone, {"m": m}).values()
        p = orthogonal(m @ orthogonal(q))
        np.testing.assert_allclose(found, p @ (p.T @ m), rtol=1e-12)  # the projection onto what P spans
        error = compressed.errors.of("m")
        assert error is not None
        np.testing.assert_allclose(error, m - found, rtol=1e-12)
        (again,) = compressed.average(alone, {"m": m}).values()
        total = m + (m - found)  # with the error
        p = orthogonal(total @ orthogonal(m.T @ p))  # and from where it has ended
        np.testing.assert_allclose(again, p @ (p.T @ total), rtol=1e-10)


def test_it_is_exact_for_a_matrix_of_its_rank() -> None:
    random = np.random.default_rng(1)
    m = random.standard_normal((30, 2)) @ random.standard_normal((2, 40))
    with kfcomm.sync.init() as alone:
        for given in (m, m.astype(np.float32), np.zeros((30, 40))):
            (found,) = PowerSGD(2).average(alone, {"m": given}).values()
            assert found.dtype == given.dtype
            np.testing.assert_allclose(found, given, rtol=0, atol=1e-12 if given.dtype == np.float64 else 1e-4)


def test_sum_of_averages_and_errors_is_the_sum_of_gradients() -> None:
    def rank(comm: Any) -> tuple[Any, Any]:
        compressed = PowerSGD(1)
        sums = [np.zeros(SHAPES["matrix"]), np.zeros(SHAPES["matrix"])]
        for step in range(STEPS):
            given = gradients(comm.rank, step)
            sums[0] += given["matrix"]
            sums[1] += compressed.average(comm, given)["matrix"]
        return sums[0] - compressed.errors.of("matrix"), sums[1]

    given, got = zip(*each(rank), strict=True)
    np.testing.assert_allclose(sum(given) / SIZE, got[0], rtol=0, atol=1e-13)


def test_compressed_shapes_and_sent_numbers() -> None:
    assert [is_worth(SHAPES[name], 1, 2.0) for name in SHAPES] == [True, True, False, False]
    assert not is_worth((12, 20), 4, 2.0)
    assert is_worth((8, 8), 1, 3.9)
    assert not is_worth((8, 8), 1, 4.0)

    def rank(comm: Any) -> dict[str, int]:
        compressed = PowerSGD(1, begin_after=1)
        whole = compressed.average(comm, gradients(comm.rank, 0), name="x")
        mean = sum(gradients(one, 0)["kernel"] for one in range(SIZE)) / SIZE
        np.testing.assert_allclose(whole["kernel"], mean, rtol=1e-12)
        found = compressed.average(comm, gradients(comm.rank, 1), name="y")
        np.testing.assert_allclose(found["small"], sum(gradients(one, 1)["small"] for one in range(SIZE)) / SIZE)
        return {key.name: key.nbytes for key in comm.statistics().keys}

    travelled = each(rank)[0]
    thin = sum(nbytes for name, nbytes in travelled.items() if name.startswith("y/"))
    assert 8 * (12 + 20 + 16 + 36 + 20 + 9) <= thin < 8 * (12 + 20 + 16 + 36 + 20 + 9) + 256


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"needs a rank of at least 1 and a positive rate, not 0 and 2.0"):
        PowerSGD(0)
    with kfcomm.sync.init() as alone:
        compressed = PowerSGD(1)
        with pytest.raises(ConfigError, match=r"gradient 'm' is of int64"):
            compressed.average(alone, {"m": np.ones((20, 20), np.int64)})
        compressed.average(alone, {"m": np.ones((20, 20))})
        with pytest.raises(ConfigError, match=r"gradient 'm' was float64 \(20, 20\), and is float64 \(20, 30\)"):
            compressed.average(alone, {"m": np.ones((20, 30))})
        assert compressed.average(alone, {}) == {}
