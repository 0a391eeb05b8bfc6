"""Shapes of ``out`` that accept a result of another shape."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.dtypes import check_out_shape, fits
from kfcomm.errors import ConfigError

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((4,), (1, 4)), ((1, 4), (4,)), ((4, 1), (4,)), ((), (1,)), ((1, 1), ()), ((12,), (4, 3)), ((4, 3), (12,)),
        ((4, 3), (2, 2, 3)), ((2, 6), (2, 2, 3)), ((4, 3, 10), (12, 2, 5)), ((0,), (3, 0)),
    ],
)  # fmt: skip
def test_out_may_join_and_split_axes(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    check_out_shape(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((3, 4), (4, 3)), ((2, 6), (3, 4)), ((3,), (4,)), ((4,), (4, 3)), ((0,), (1,)), ((2,), ()), ((), (0,)),
        ((5, 2, 6), (5, 3, 4)), ((2, 2), (2, 2, 2)), ((12, 2), (2, 12)),
    ],
)  # fmt: skip
def test_out_with_other_rows_is_refused(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigError, match=r"out has shape .* the result has .*; expected this shape, or one that joins"
    ):
        check_out_shape(given, wanted)


@given(SHAPES, SHAPES)
def test_fits_is_what_the_boundaries_of_axes_say(ours: tuple[int, ...], theirs: tuple[int, ...]) -> None:
    assert fits(ours, theirs) == fits(theirs, ours) == _by_boundaries(ours, theirs)


def _by_boundaries(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    if math.prod(ours) != math.prod(theirs):
        return False
    if 0 in ours:
        return True
    one, other = ({1, *accumulate(shape, mul)} for shape in (ours, theirs))
    between = [(low, high) for low, high in pairwise(sorted(one & other))]
    return all(not (any(low < n < high for n in one) and any(low < n < high for n in other)) for low, high in between)
