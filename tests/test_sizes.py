"""Sizes as people write and read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.common.sizes import parse_sizes, ranks_in_words, seconds_of, show_size
from kfcomm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4B", (4,)),
        ("1024", (1024,)),
        ("1KiB:8KiB", (1024, 2048, 4096, 8192)),
        ("1k:3K", (1024, 2048)),
        ("4B, 1 KiB:2KiB ,1MiB", (4, 1024, 2048, 1 << 20)),
        ("1KiB,1KiB:2KiB", (1024, 2048)),
        ("1GiB:1GiB", (1 << 30,)),
        ("1kB,1MB,2GB", (10**3, 10**6, 2 * 10**9)),
    ],
)
def test_lists_and_ranges(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", ",", "0", "0:4B", "1TB", "1.5MiB", "-4", "2KiB:1KiB", "1:2:4", "ten", "9999999GiB", "9" * 99]
)
def test_malformed_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.50 KiB"), (40944, "40.0 KiB"), (64 << 20, "64 MiB")],
)
def test_sizes_are_shown_with_a_fitting_unit(nbytes: int, text: str) -> None:
    assert show_size(nbytes) == text


@given(st.integers(0, 40))
def test_a_power_of_two_is_read_as_it_is_shown(exponent: int) -> None:
    assert parse_sizes(show_size(1 << exponent)) == (1 << exponent,)


@pytest.mark.parametrize(
    ("given_", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (2.5, 2.5),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (timedelta(minutes=2), 120.0),
        (2**70, 2.0**70),
        (math.inf, math.inf),
    ],
)
def test_a_timeout_is_a_number_of_seconds_or_a_timedelta(given_: object, seconds: float | None) -> None:
    assert seconds_of(given_) == seconds


@pytest.mark.parametrize("bad", [-1, -0.5, timedelta(seconds=-1), math.nan, "3", b"3", [3], 10**400, 1j, object])
def test_malformed_timeout_is_refused_with_an_example(bad: object) -> None:
    with pytest.raises(ConfigError, match="from 0 on, a timedelta, or None"):
        seconds_of(bad)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "ranks none"),
        ([3], "rank 3"),
        ((7, 4), "ranks 4, 7"),
        ([0, 1, 2, 5], "ranks 0-2, 5"),
        (range(64), "ranks 0-63"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 4 more"),
    ],
)
def test_ranks_in_words(ranks: Sequence[int], text: str) -> None:
    assert ranks_in_words(ranks) == text
