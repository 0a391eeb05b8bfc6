"""Variance and cosine of gradients, against what all gradients together say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import gradient_variance, mean_cosine


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
