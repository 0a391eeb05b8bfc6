"""float16 widened and narrowed as NumPy does it, to the bit: every one of them, and what lies between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.reduce import float16

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16)
SPECIAL = np.array([np.inf, -np.inf, np.nan, -np.nan, 3e38, -3e38, 65520, -65520, 65536, 65519.996], np.float32)


def widened(halves: np.ndarray) -> np.ndarray:
    out = np.empty(len(halves), np.float32)
    float16.widen(halves, out, finite=len(halves) > 0 and float16.is_finite(halves))
    return out


def narrowed(singles: np.ndarray) -> np.ndarray:
    count = len(singles)
    out = np.empty(count, np.float16)
    before = singles.tobytes()
    smallest = np.full(count, float16.SMALLEST_NORMAL)
    with np.errstate(all="ignore"):
        float16.narrow(singles, out, np.empty(count, np.float32), np.empty(count, np.float32), smallest)
    assert singles.tobytes() == before
    return out


def assert_narrows_as_numpy(singles: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = singles.astype(np.float16)
    got = narrowed(singles)
    wrong = np.flatnonzero(got.view(np.uint16) != expected.view(np.uint16))
    assert not wrong.size, f"{singles[wrong[0]]!r} became {got[wrong[0]]!r}, not {expected[wrong[0]]!r}"


@pytest.mark.parametrize("parts", [1, 7, 100])
@pytest.mark.parametrize("halves", [EVERY, EVERY[np.isfinite(EVERY)]], ids=["every", "finite"])
def test_widening_is_numpys_to_the_bit(halves: np.ndarray, parts: int) -> None:
    for part in np.array_split(halves, parts):
        assert widened(part).tobytes() == part.astype(np.float32).tobytes()


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, -np.nan])
def test_one_that_is_not_finite_among_many(special: float) -> None:
    halves = np.full(2 * float16.SHORT, -1.5, np.float16)
    assert float16.is_finite(halves)
    halves[-1] = special
    assert not float16.is_finite(halves)
    assert widened(halves).tobytes() == halves.astype(np.float32).tobytes()


def test_every_half_is_narrowed_to_itself() -> None:
    assert_narrows_as_numpy(EVERY.astype(np.float32))
    assert narrowed(EVERY.astype(np.float32)).tobytes() == EVERY.tobytes()


def test_halfway_between_and_next_to_it() -> None:
    """Every tie between two neighbours, subnormal and zero included, and the float32 on either side of it."""
    positive = EVERY[:0x7C00].astype(np.float32)
    ties = np.append((positive[:-1] + positive[1:]) / 2, np.float32(65520))
    for nudged in (ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))):
        assert_narrows_as_numpy(nudged)
        assert_narrows_as_numpy(-nudged)


@pytest.mark.parametrize("exponent", range(256))
def test_every_exponent(exponent: int) -> None:
    fractions = np.random.default_rng(exponent).integers(0, 2**23, 2 * float16.SHORT, dtype=np.uint32)
    bits = fractions | np.uint32(exponent << 23)
    bits[0] &= 0xFF800000
    bits[1] |= 0x007FFFFF
    bits[::2] |= 0x80000000
    assert_narrows_as_numpy(bits.view(np.float32))


@pytest.mark.parametrize("special", SPECIAL.tolist())
def test_narrowing_numbers_out_of_range_among_others(special: float) -> None:
    singles = np.linspace(-70, 70, float16.SHORT + 3, dtype=np.float32)
    singles[17] = special
    assert_narrows_as_numpy(singles)


@given(st.integers(0, 2**32), st.integers(0, float16.SHORT + 9))
def test_any_bits(seed: int, count: int) -> None:
    assert_narrows_as_numpy(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(np.float32))


def test_empty_and_short_buffers() -> None:
    for count in (0, 1, float16.SHORT - 1, float16.SHORT):
        halves = np.resize(EVERY[:1000], count)
        assert np.array_equal(widened(halves), halves.astype(np.float32))
        assert_narrows_as_numpy(np.resize(SPECIAL, count))
