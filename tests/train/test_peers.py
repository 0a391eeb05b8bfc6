"""Draws of peers: by the chi-squared test they are as likely as they should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.train import Peers

DRAWS = 100_000
CRITICAL = {3: 21.11, 4: 23.51, 7: 29.88}
"""Of the chi-squared distribution, by degrees of freedom: exceeded by chance once in 10,000 times."""


def chi_squared(peers: Peers, expected: Sequence[float]) -> float:
    counts = Counter(peers.draw() for _ in range(DRAWS))
    whole = sum(expected)
    return sum(
        (counts[rank] - DRAWS * one / whole) ** 2 / (DRAWS * one / whole) for rank, one in enumerate(expected) if one
    )


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_all_others_are_equally_likely(rank: int) -> None:
    expected = [float(peer != rank) for peer in range(5)]
    assert chi_squared(Peers(rank, 5, seed=7), expected) < CRITICAL[3]


def test_the_next_rank_is_not_drawn_twice_as_often() -> None:
    """A draw of all ranks that moves one's own to the next: the test finds it out."""
    moved = [0.0, 2.0, 1.0, 1.0, 1.0]
    assert chi_squared(Peers(0, 5, seed=7), moved) > 1000


def test_weights_are_probabilities() -> None:
    weights = [5.0, 100.0, 1.0, 2.0, 3.0]
    expected = [5.0, 0.0, 1.0, 2.0, 3.0]
    assert chi_squared(Peers(1, 5, seed=3, weights=weights), expected) < CRITICAL[3]
    without = Peers(0, 3, weights=[1.0, 0.0, 2.0])
    assert {without.draw() for _ in range(100)} == {2}


@given(st.integers(2, 20), st.integers(0, 1000), st.data())
def test_ranks_never_draw_themselves_and_a_seed_repeats_the_draws(size: int, seed: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    one, other = Peers(rank, size, seed=seed), Peers(rank, size, seed=seed)
    drawn = [one.draw() for _ in range(50)]
    assert drawn == [other.draw() for _ in range(50)]
    assert rank not in drawn
    assert all(0 <= peer < size for peer in drawn)


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="no peers"):
        Peers(0, 1)
    for weights in ([1.0, 1.0], [1.0, 0.0, 0.0], [0.0, -1.0, 2.0], [0.0, float("nan"), 1.0]):
        with pytest.raises(ConfigError, match="weights"):
            Peers(0, 3, weights=weights)
