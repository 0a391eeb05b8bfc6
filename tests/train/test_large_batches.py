"""LARS, LAMB and linear scaling: values by hand, and what the papers promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import Lamb, LambState, Lars, LinearScaling, lars_rate

W = np.array([1.0, -2, 2])
G = np.array([0.1, 0.2, -0.2])


def test_the_local_rate_of_lars() -> None:
    assert lars_rate(W, G, trust=0.001, weight_decay=0.01) == pytest.approx(0.00909090909, rel=1e-9)
    assert lars_rate(0 * W, G) == lars_rate(W, 0 * G) == 1.0


def test_two_steps_of_lars_by_hand() -> None:
    lars = Lars(0.5, momentum=0.9, weight_decay=0.01, trust=0.001)
    weights, velocity = lars.step(W, G, np.zeros(3))
    first = 0.5 * 0.00909090909090909 * (G + 0.01 * W)
    assert velocity == pytest.approx(first, rel=1e-12)
    assert weights == pytest.approx(W - first, rel=1e-12)
    again, velocity = lars.step(weights, G, velocity)
    local = 0.001 * np.linalg.norm(weights) / (0.3 + 0.01 * np.linalg.norm(weights))
    assert velocity == pytest.approx(0.9 * first + 0.5 * local * (G + 0.01 * weights), rel=1e-12)
    assert again == pytest.approx(weights - velocity)


def test_the_first_step_of_lamb_by_hand() -> None:
    """Corrected for their start the averages are the gradient and its square, so Adam's step is its sign."""
    lamb = Lamb(0.1, epsilon=1e-12, weight_decay=0.5)
    update = np.sign(G) + 0.5 * W
    weights, state = lamb.step(W, G, LambState.zeros_like(W))
    assert weights == pytest.approx(W - 0.1 * 3 / np.linalg.norm(update) * update, rel=1e-9)
    assert state.num_steps == 1
    assert state.mean == pytest.approx(0.1 * G)
    assert state.square == pytest.approx(0.001 * G**2)


@given(st.floats(1e-3, 1e3), st.integers(0, 1000))
def test_the_length_of_lambs_step_is_a_part_of_the_weights_whatever_the_gradient(factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, gradient = rng.standard_normal(10), factor * rng.standard_normal(10)
    after, _ = Lamb(0.01).step(weights, gradient, LambState.zeros_like(weights))
    assert np.linalg.norm(after - weights) == pytest.approx(0.01 * np.linalg.norm(weights), rel=1e-9)


def test_lamb_of_weights_that_are_zero_is_adam() -> None:
    after, _ = Lamb(0.1, epsilon=1e-12).step(np.zeros(3), G, LambState.zeros_like(G))
    assert after == pytest.approx(-0.1 * np.sign(G))


def test_arrays_keep_their_dtype() -> None:
    weights, gradient = W.astype(np.float32), G.astype(np.float32)
    assert Lars(0.1).step(weights, gradient, 0 * weights)[0].dtype == np.float32
    assert Lamb(0.1).step(weights, gradient, LambState.zeros_like(weights))[0].dtype == np.float32


def test_the_rate_grows_linearly_to_that_of_the_batch() -> None:
    scaling = LinearScaling(0.1, 256, warm_up=10)
    assert [scaling.rate(step, 2048) for step in (0, 5, 10, 99)] == pytest.approx([0.1, 0.45, 0.8, 0.8])
    assert LinearScaling(0.1, 256).rate(0, 512) == pytest.approx(0.2)


def test_bad_arguments() -> None:
    for make in (
        lambda: Lars(0),
        lambda: Lars(0.1, momentum=1.0),
        lambda: Lars(0.1, weight_decay=-1),
        lambda: Lamb(0.1, epsilon=0),
        lambda: Lamb(0.1, beta2=1.0),
        lambda: LinearScaling(0.1, 0),
        lambda: LinearScaling(0.1, 8, warm_up=-1),
        lambda: LinearScaling(0.1, 8).rate(0, 0),
    ):
        with pytest.raises(ConfigError):
            make()


def kinds(x: np.ndarray, dtype: str) -> list[Any]:
    """The array in every library, for tests of 16, 32 and 64 bits."""
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    import ml_dtypes

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
    torch = pytest.importorskip("torch")
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
