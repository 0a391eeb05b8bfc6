"""The noise scale: values by hand, and gradients whose true noise scale is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import NoiseScale, noise_estimate


def test_a_step_by_hand() -> None:
    """Four ranks of 32 samples; |G|² comes out negative, as it can."""
    found = noise_estimate(float(np.mean([63, 72, 42, 72])), 6.1875, 32, 128)
    assert found == pytest.approx((-12.5, 2392.0), rel=1e-12)


def test_it_is_unknown_until_the_signal_is_above_zero() -> None:
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


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("batch", [8, 64, 512])
def test_within_a_tenth_of_the_truth_on_a_quadratic_after_200_steps(ranks: int, batch: int) -> None:
    """½‖θ − x‖², x normal around 0: the gradient of a sample is θ − x, so tr(Σ) is the dimension, |G|² is |θ|²."""
    rng = np.random.default_rng(ranks * 1000 + batch)
    dimension = 1000
    parameters = rng.standard_normal(dimension)
    parameters *= np.sqrt(10.0) / np.linalg.norm(parameters)
    truths, scale = [], NoiseScale()
    for _ in range(200):
        # a mean of `batch` samples is drawn at once
        gradients = parameters - rng.standard_normal((ranks, dimension)) / np.sqrt(batch)
        mean = gradients.mean(axis=0)
        truths.append(dimension / float(parameters @ parameters))
        scale.update(float((gradients**2).sum() / ranks), float(mean @ mean), batch, batch * ranks)
        parameters = parameters - 1e-5 * mean
    assert scale.value == pytest.approx(np.mean(truths), rel=0.1)
