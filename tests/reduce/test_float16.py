"""float16 widened as NumPy does it, every one of them."""

from __future__ import annotations

import numpy as np
import pytest

from kfcomm.reduce import float16

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("parts", [1, 7, 100])
@pytest.mark.parametrize("halves", [EVERY, EVERY[np.isfinite(EVERY)]], ids=["every", "finite"])
def test_widening_is_numpys_to_the_bit(halves: np.ndarray, parts: int) -> None:
    for part in np.array_split(halves, parts):
        out = np.empty(len(part), np.float32)
        float16.widen(part, out)
        assert out.tobytes() == part.astype(np.float32).tobytes()


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, -np.nan])
def test_one_that_is_not_finite_among_many(special: float) -> None:
    halves = np.full(2 * float16.SHORT, -1.5, np.float16)
    halves[-1] = special
    out = np.empty(len(halves), np.float32)
    float16.widen(halves, out)
    assert out.tobytes() == halves.astype(np.float32).tobytes()


def test_nothing_and_little() -> None:
    for count in (0, 1, float16.SHORT - 1, float16.SHORT):
        halves, out = np.resize(EVERY[:1000], count), np.empty(count, np.float32)
        float16.widen(halves, out)
        assert np.array_equal(out, halves.astype(np.float32))
