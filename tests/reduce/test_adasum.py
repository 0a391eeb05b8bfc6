"""Adasum's formula against a tree of pairs that is written out, as Horovod defines it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.collectives.adasum_arithmetic import adasum_weights


def pair(a: Any, b: Any) -> Any:
    together, aa, bb = float(a @ b), float(a @ a), float(b @ b)
    least = float(np.sqrt(np.finfo(np.float64).tiny))
    one = 1.0 if aa < least else 1 - together / (2 * aa)
    other = 1.0 if bb < least else 1 - together / (2 * bb)
    return one * a + other * b


def tree(gradients: list[Any]) -> Any:
    while len(gradients) > 1:
        pairs = [pair(gradients[at], gradients[at + 1]) for at in range(0, len(gradients) - 1, 2)]
        gradients = pairs + gradients[2 * len(pairs) :]
    return gradients[0]


def by_products(gradients: Any) -> Any:
    return adasum_weights(gradients @ gradients.T) @ gradients


def test_values_of_two_ranks() -> None:
    found = by_products(np.array([[1.0, 2, 3], [4, -5, 6]]))
    assert found == pytest.approx([4.25974025974, -3.467532467532, 7.246753246753], rel=1e-12)


@given(st.integers(2, 8), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_weights_from_products_equal_the_tree(size: int, count: int, seed: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((size, count))
    assert by_products(gradients) == pytest.approx(tree(list(gradients)), rel=1e-9, abs=1e-9)


@given(st.integers(2, 8), st.data())
def test_orthogonal_gradients_are_added(size: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=size, max_size=size))
    assert by_products(np.diag(lengths)) == pytest.approx(lengths, rel=1e-15)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_equal_gradients_give_themselves(size: int, count: int, seed: int) -> None:
    gradient = np.random.default_rng(seed).standard_normal(count)
    assert by_products(np.tile(gradient, (size, 1))) == pytest.approx(gradient, rel=1e-14)


def test_parallel_gradients_give_their_mean() -> None:
    gradient = np.array([3.0, -4.0, 12.0])
    assert by_products(np.array([gradient, 3 * gradient])) == pytest.approx(2 * gradient, rel=1e-15)


def test_zero_and_opposite_gradients() -> None:
    gradient = np.array([1.0, 2.0])
    zero = np.zeros(2)
    assert by_products(np.array([gradient, zero])).tolist() == gradient.tolist()
    assert by_products(np.array([zero, zero])).tolist() == [0.0, 0.0]
    assert by_products(np.array([gradient, -gradient, gradient])) == pytest.approx(gradient, rel=1e-15)
    assert np.isnan(by_products(np.array([gradient, [np.nan, 1.0]]))).all()
