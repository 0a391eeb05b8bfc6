"""LARS and LAMB on torch tensors, JAX arrays and narrow dtypes: the steps of float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kfcomm.train import Lamb, LambState, Lars

torch = pytest.importorskip("torch")
jnp = pytest.importorskip("jax.numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

W = np.array([1.0, -2, 2])
G = np.array([0.1, 0.2, -0.2])


def kinds(x: np.ndarray, dtype: str) -> list[Any]:
    """The array in every library, for tests of 16, 32 and 64 bits."""
    x = np.asarray(x)
    numpy = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    found = [numpy, torch.from_numpy(x.astype(np.float64)).to(getattr(torch, dtype))]
    return found if dtype == "float64" else [*found, jnp.asarray(numpy)]


def to_float64(x: Any) -> Any:
    return np.asarray(x.double() if hasattr(x, "double") else x, np.float64)


EPS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-12}


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3, 2)])
def test_steps_are_those_of_float64_in_every_library_and_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    w, *gs = rng.standard_normal((4, *shape))
    lars, lamb = Lars(0.5, weight_decay=0.01, trust=0.1), Lamb(0.1, weight_decay=0.01)
    for weights in kinds(w, dtype):
        place = [type(one) for one in kinds(w, dtype)].index(type(weights))
        start = to_float64(weights)
        a, b, exact_a, exact_b = weights, weights, start, start
        v, exact_v = 0 * a, 0 * start
        v = np.asarray(v) if isinstance(weights, np.ndarray) else v  # a number, if it has no dimensions
        state, exact_state = LambState.zeros_like(b), LambState.zeros_like(start)
        for g in gs:
            gradient = kinds(1e-2 * g, dtype)[place]
            exact = to_float64(gradient)
            a, v = lars.step(a, gradient, v)
            exact_a, exact_v = lars.step(exact_a, exact, exact_v)
            b, state = lamb.step(b, gradient, state)
            exact_b, exact_state = lamb.step(exact_b, exact, exact_state)
            for one in (a, v, b):
                assert (type(one), one.dtype, tuple(one.shape)) == (type(weights), weights.dtype, shape)
        assert to_float64(a) == pytest.approx(exact_a, rel=20 * EPS[dtype], abs=20 * EPS[dtype])
        assert to_float64(b) == pytest.approx(exact_b, rel=20 * EPS[dtype], abs=20 * EPS[dtype])
        assert to_float64(state.square) == pytest.approx(exact_state.square, rel=1e-2 if dtype != "float64" else 1e-12)


def test_tensors_that_require_gradients_and_plain_numbers() -> None:
    weights = torch.nn.Parameter(torch.tensor([1.0, -2, 2], dtype=torch.float64))
    found, velocity = Lars(0.5, weight_decay=0.01).step(
        weights, torch.from_numpy(G), torch.zeros(3, dtype=torch.float64)
    )
    exact, _ = Lars(0.5, weight_decay=0.01).step(W, G, np.zeros(3))
    assert not found.requires_grad
    assert found.numpy() == pytest.approx(exact, rel=1e-14)
    assert velocity.dtype == torch.float64
    after, _ = Lars(0.1).step(2.0, 0.5, 0.0)
    assert float(after) == pytest.approx(2 - 0.1 * 0.004 * 0.5)
