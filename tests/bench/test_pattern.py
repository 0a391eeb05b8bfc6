"""The oracle: exact for every op and dtype, and blind to nothing."""

from __future__ import annotations

import functools
import operator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of
from kfcomm.bench.load import PERIOD, contributions, first_wrong, reduced, tiled
from kfcomm.bench.memory import spoil
from kfcomm.types import Op

EXACT = {
    Op.SUM: sum,
    Op.AVG: lambda values: Fraction(sum(values), len(values)),
    Op.MIN: min,
    Op.MAX: max,
    Op.PROD: lambda values: functools.reduce(operator.mul, values),
    Op.AND: lambda values: functools.reduce(operator.and_, values),
    Op.OR: lambda values: functools.reduce(operator.or_, values),
    Op.XOR: lambda values: functools.reduce(operator.xor, values),
}
BITWISE = (Op.AND, Op.OR, Op.XOR)


def makes_sense(op: Op, name: str) -> bool:
    kind = "f" if name == "bfloat16" else dtype_of(name).kind
    if op in BITWISE:
        return kind in "iu"
    return kind == "f" or (kind in "iu" and op is not Op.AVG)


@pytest.mark.parametrize("size", [2, 3, 8, 100])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in Op for name in SUPPORTED_NAMES if makes_sense(op, name)])
def test_the_reduction_is_what_whole_numbers_give(op: Op, name: str, size: int) -> None:
    values = contributions(dtype_of(name), op, size)
    found = reduced(values, op)
    assert found.dtype == values.dtype
    for place in (*range(0, PERIOD, 700), PERIOD - 1):
        due = EXACT[op]([int(value) for value in values[:, place]])
        assert float(found[place]) == float(due)


def test_complex_numbers_are_added_in_both_parts() -> None:
    values = contributions(np.dtype(np.complex64), Op.SUM, 3)
    found = reduced(values, Op.SUM)
    assert (found.real == reduced(values.real, Op.SUM)).all()
    assert (found.imag == reduced(values.imag, Op.SUM)).all()
    assert (found.imag != 0).any()


def test_ranks_and_places_differ() -> None:
    values = contributions(np.dtype(np.float32), Op.SUM, 4)
    assert len({row.tobytes() for row in values}) == 4
    assert all(len(np.unique(row)) > 4 for row in values)


@given(count=st.integers(0, 3 * PERIOD), start=st.integers(0, 3 * PERIOD))
def test_a_tiling_is_the_endless_repetition_from_a_place_on(count: int, start: int) -> None:
    values = np.arange(PERIOD)
    found = tiled(values, start, count)
    assert (found == (np.arange(count) + start) % PERIOD).all()
    assert first_wrong(found, values, start) is None


@given(count=st.integers(1, 40 * PERIOD), start=st.integers(0, 2 * PERIOD), where=st.floats(0, 1, exclude_max=True))
def test_one_wrong_element_is_found_wherever_it_is(count: int, start: int, where: float) -> None:
    values = np.arange(PERIOD, dtype=np.int16)
    found, index = tiled(values, start, count), int(where * count)
    found[index] = -1
    assert first_wrong(found, values, start) == (index, -1, (index + start) % PERIOD)


@pytest.mark.parametrize("name", [name for name in SUPPORTED_NAMES if name != "bool"])
def test_unwritten_result_is_wrong(name: str) -> None:
    values = reduced(contributions(dtype_of(name), Op.SUM, 3), Op.SUM)
    found = tiled(values, 0, PERIOD)
    spoil(found)
    assert not (found == values).any()
