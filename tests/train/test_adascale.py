"""AdaScale's gain, against what fairscale's class gives for the same gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import AdaScale
from kfcomm.train.gradient_statistics import gain


def norms(inputs: list[list[float]]) -> tuple[float, float]:
    """Of the gradients of ``Linear(2, 2)(x).sum()``: each row of the weight's is x, the bias' is one."""
    gradients = np.array([[*x, *x, 1.0, 1.0] for x in inputs])
    return float((gradients**2).sum() / len(gradients)), float((gradients.mean(axis=0) ** 2).sum())


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [([[1, 0], [0, 1]], 4 / 3), ([[-1, 1], [1, -1]], 2.0), ([[1, 4], [5, 0.5]], 1.46887966805)],
)
def test_the_values_of_fairscale(inputs: list[list[float]], expected: float) -> None:
    scaler = AdaScale(2)
    assert scaler.gain() == 1.0
    assert scaler.update(*norms(inputs)) == pytest.approx(expected, rel=1e-11)
    assert scaler.gain() == pytest.approx(expected, rel=1e-11)
    assert scaler.gain(1) == 1.0


def test_averages_are_corrected_for_their_start_and_gains_add_up() -> None:
    scaler = AdaScale(2, decay=0.5)
    first = scaler.update(*norms([[1, 0], [0, 1]]))  # σ² = 2, μ² = 2
    second = scaler.update(*norms([[1, 4], [5, 0.5]]))  # σ² = 28.25, μ² = 16
    variance, signal = (2 + 2 * 28.25) / 3, (2 + 2 * 16) / 3
    assert scaler.variance == pytest.approx(variance)
    assert scaler.signal == pytest.approx(signal)
    assert second == pytest.approx((variance + signal) / (variance / 2 + signal))
    assert scaler.progress == pytest.approx(first + second)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e4))
def test_the_gain_lies_between_1_and_the_scale(variance: float, signal: float, scale: float) -> None:
    assert 1 - 1e-9 <= gain(variance, signal, scale) <= scale * (1 + 1e-9)


def test_gradients_that_are_all_alike_gain_nothing() -> None:
    scaler = AdaScale(8)
    assert scaler.update(5.0, 5.0) == pytest.approx(1.0, abs=1e-6)


def test_a_step_that_overflowed_changes_no_average() -> None:
    scaler = AdaScale(2)
    found = scaler.update(*norms([[1, 0], [0, 1]]))
    assert scaler.update(float("inf"), float("nan")) == found
    assert scaler.progress == pytest.approx(2 * found)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        AdaScale(1)
    for scale in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="scale"):
            AdaScale(2, scale=scale)
    with pytest.raises(ConfigError, match="scale"):
        gain(1.0, 1.0, 0)
