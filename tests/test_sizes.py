"""Sizes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.errors import ConfigError
from kfcomm.sizes import parse_sizes, show_size


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
    ],
)
def test_lists_and_ranges(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", ",", "0", "0:4B", "1KB", "1.5MiB", "-4", "2KiB:1KiB", "1:2:4", "ten", "9999999GiB", "9" * 99]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
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
