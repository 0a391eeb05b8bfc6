"""Statistics of gradients: moving averages, variance, cosine, noise scale, and AdaScale's gain as of fairscale."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import AdaScale, MovingAverage, NoiseScale, gradient_variance, mean_cosine, noise_estimate
from kfcomm.train.gradient_statistics import gain
from kfcomm.train.procedure import report


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 0.999))
def test_a_moving_average_is_the_weighted_mean_of_all_values(values: list[float], decay: float) -> None:
    average = MovingAverage(decay)
    for value in values:
        average.update(value)
    weights = [decay**age for age in reversed(range(len(values)))]
    truth = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert average.value == pytest.approx(truth, rel=1e-6, abs=1e-6)


def test_a_moving_average_begins_with_nothing_and_wants_a_decay_below_1() -> None:
    assert MovingAverage(0.9).value is None
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="decay"):
            MovingAverage(decay)


def test_figures_go_to_the_meter_and_to_the_timeline() -> None:
    told: list[Any] = []
    observer = SimpleNamespace(counter=lambda *args: told.append(args))
    engine = SimpleNamespace(meter=SimpleNamespace(gauges={"old": 1.0}), observers=(observer,))
    report(SimpleNamespace(_session=SimpleNamespace(engine=engine)), {"noise_scale": 5.0, "x": 2.0}, {"x": "s"})
    assert engine.meter.gauges == {"old": 1.0, "noise_scale": 5.0, "x": 2.0}
    assert told == [("noise_scale", "", 5.0), ("x", "s", 2.0)]
    report(SimpleNamespace(_session=SimpleNamespace(engine=SimpleNamespace(meter=None, observers=None))), {"x": 2.0})


def sums(gradients: np.ndarray) -> tuple[float, float]:
    return float((gradients**2).sum() / len(gradients)), float((gradients.mean(axis=0) ** 2).sum())


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 20))
def test_the_variance_is_the_squared_distance_from_the_mean(seed: int, size: int, dimension: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((size, dimension))
    truth = ((gradients - gradients.mean(axis=0)) ** 2).sum(axis=1).mean()
    assert gradient_variance(*sums(gradients)) == pytest.approx(truth, rel=1e-9, abs=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.integers(1, 20))
def test_the_cosine_is_the_mean_over_pairs_where_norms_are_equal(seed: int, size: int, dimension: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((size, dimension))
    gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
    cosines = gradients @ gradients.T
    truth = (cosines.sum() - size) / (size * (size - 1))
    assert mean_cosine(*sums(3.5 * gradients), size) == pytest.approx(truth, abs=1e-9)


def test_the_ends_of_the_cosine() -> None:
    assert mean_cosine(*sums(np.ones((3, 4))), 3) == pytest.approx(1.0)
    assert mean_cosine(*sums(np.eye(3)), 3) == pytest.approx(0.0)
    assert mean_cosine(*sums(np.array([[1.0], [-1.0]])), 2) == pytest.approx(-1.0)
    assert mean_cosine(1.0, 1.0, 1) is None
    assert mean_cosine(0.0, 0.0, 4) is None
    with pytest.raises(ConfigError, match="at least one rank"):
        mean_cosine(1.0, 1.0, 0)


def test_rounding_makes_no_negative_variance() -> None:
    assert gradient_variance(1.0, 1.0 + 1e-16) == 0.0
    assert gradient_variance(1.0, 1.5) == 0.0


def test_noise_estimate_by_hand() -> None:
    """Four ranks of 32 samples; |G|² comes out negative, as it can."""
    found = noise_estimate(float(np.mean([63, 72, 42, 72])), 6.1875, 32, 128)
    assert found == pytest.approx((-12.5, 2392.0), rel=1e-12)


def test_the_noise_scale_is_unknown_until_the_signal_is_above_zero() -> None:
    scale = NoiseScale(decay=0.5)
    assert scale.value is None
    scale.update(62.25, 6.1875, 32, 128)
    assert scale.signal == pytest.approx(-12.5)
    assert scale.value is None
    scale.update(62.25, 42.25, 32, 128)
    # signal: (128·42.25 − 32·62.25)/96 = 35.5833, noise: 20 / (3/128) = 853.333; averaged with weights 1/3 and 2/3
    signal, noise = (-12.5 + 2 * 35.583333333333336) / 3, (2392 + 2 * 853.3333333333334) / 3
    assert scale.value == pytest.approx(noise / signal, rel=1e-12)


@given(st.floats(0.1, 1e3), st.floats(0, 1e5), st.integers(1, 100), st.integers(2, 32))
def test_expected_norms_give_the_truth_at_once(signal: float, noise: float, small: int, ranks: int) -> None:
    scale = NoiseScale()
    big = small * ranks
    for _ in range(3):
        scale.update(signal + noise / small, signal + noise / big, small, big)
    assert scale.value == pytest.approx(noise / signal, rel=1e-9, abs=1e-9)


def test_a_step_that_overflowed_counts_for_nothing() -> None:
    scale = NoiseScale()
    scale.update(11.0, 10.5, 10, 20)
    before = scale.value
    for bad in (float("inf"), float("nan")):
        scale.update(bad, bad, 10, 20)
    assert scale.value == before
    assert (scale.num_updates, scale.num_left_out) == (1, 2)


def test_batches_of_one_rank_are_refused() -> None:
    for small, big in ((32, 32), (0, 8), (-1, 8), (8, 4)):
        with pytest.raises(ConfigError, match="two batch sizes"):
            NoiseScale().update(1.0, 1.0, small, big)
    with pytest.raises(ConfigError, match="decay"):
        NoiseScale(decay=1.0)


def norms_of(inputs: list[list[float]]) -> tuple[float, float]:
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
    assert scaler.update(*norms_of(inputs)) == pytest.approx(expected, rel=1e-11)
    assert scaler.gain() == pytest.approx(expected, rel=1e-11)
    assert scaler.gain(1) == 1.0


def test_averages_are_corrected_for_their_start_and_gains_add_up() -> None:
    scaler = AdaScale(2, decay=0.5)
    first = scaler.update(*norms_of([[1, 0], [0, 1]]))  # σ² = 2, μ² = 2
    second = scaler.update(*norms_of([[1, 4], [5, 0.5]]))  # σ² = 28.25, μ² = 16
    variance, signal = (2 + 2 * 28.25) / 3, (2 + 2 * 16) / 3
    assert scaler.variance == pytest.approx(variance)
    assert scaler.signal == pytest.approx(signal)
    assert second == pytest.approx((variance + signal) / (variance / 2 + signal))
    assert scaler.progress == pytest.approx(first + second)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e4))
def test_the_gain_lies_between_1_and_the_scale(variance: float, signal: float, scale: float) -> None:
    assert 1 - 1e-9 <= gain(variance, signal, scale) <= scale * (1 + 1e-9)


def test_adascale_skips_a_step_that_overflowed() -> None:
    scaler = AdaScale(2)
    found = scaler.update(*norms_of([[1, 0], [0, 1]]))
    assert scaler.update(float("inf"), float("nan")) == found
    assert scaler.progress == pytest.approx(2 * found)


def test_state_of_adascale_is_handed_over_to_more_ranks() -> None:
    scaler, other, more = AdaScale(2), AdaScale(2), AdaScale(4)
    scaler.update(*norms_of([[1, 0], [0, 1]]))
    scaler.scale = 8.0
    for one in (other, more):
        one.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.update(*norms_of([[1, 4], [5, 0.5]])) == scaler.update(*norms_of([[1, 4], [5, 0.5]]))
    assert other.state_dict() == scaler.state_dict()
    assert (other.scale, more.scale, more.progress) == (8.0, 4.0, pytest.approx(4 / 3))
    assert more.gain() == pytest.approx(gain(2.0, 2.0, 4))


def test_arguments_out_of_range_of_adascale() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        AdaScale(1)
    for scale in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="scale"):
            AdaScale(2, scale=scale)
    with pytest.raises(ConfigError, match="scale"):
        gain(1.0, 1.0, 0)
