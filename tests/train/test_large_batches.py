"""LARS, LAMB and linear scaling: values by hand, and what the papers promise."""

from __future__ import annotations

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
