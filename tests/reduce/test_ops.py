"""Names and functions by which callers choose an op."""

from __future__ import annotations

import enum
import operator
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.reduce.ops import op_of
from kfcomm.errors import ConfigError
from kfcomm.types import Op

INTEGERS, BOOL = np.dtype(np.int32), np.dtype(bool)


@pytest.mark.parametrize("op", Op)
def test_our_own_names_in_any_case(op: Op) -> None:
    assert {op_of(op), op_of(str(op)), op_of(op.upper()), op_of(f" {op.title()} ")} == {op}


@pytest.mark.parametrize(
    ("said", "op"),
    [
        ("mean", Op.AVG),
        ("Average", Op.AVG),
        ("add", Op.SUM),
        ("product", Op.PROD),
        ("MPI_BAND", Op.AND),
        (np.add, Op.SUM),
        (np.maximum, Op.MAX),
        (np.mean, Op.AVG),
        (np.bitwise_xor, Op.XOR),
        (sum, Op.SUM),
        (min, Op.MIN),
        (operator.mul, Op.PROD),
        (operator.or_, Op.OR),
    ],
)
def test_names_and_functions_of_other_libraries(said: Any, op: Op) -> None:
    assert op_of(said, INTEGERS) is op


def test_logical_ops_are_for_bool() -> None:
    assert op_of(np.logical_and, BOOL) is Op.AND
    assert op_of("LOR", BOOL) is Op.OR
    with pytest.raises(ConfigError, match="is for bool, not for int32"):
        op_of(np.logical_or, INTEGERS)


class Mine(enum.Enum):
    """An enumeration of the caller's own."""

    SUM = 0


def add(a: Any, b: Any) -> Any:
    """A function of the caller, which is not an op."""
    return a + b + 1


@pytest.mark.parametrize("bad", [None, "", "total", 0, ["sum"], np.subtract, add, Mine.SUM, np.zeros(2), {}])
def test_unknown_ops_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; known are sum.*, and of all_reduce adasum"):
        op_of(bad)
