"""The numbers that follow from times."""

from __future__ import annotations

import pytest

from kfcomm.bench.suite import Case, Result, Suite
from kfcomm.types import Verb


def case(verb: Verb = Verb.ALL_REDUCE, nbytes: int = 1_000_000) -> Case:
    (made,) = Suite(collectives=(verb,), sizes=(nbytes,)).cases(4)
    return made


@pytest.mark.parametrize(
    ("times", "p50", "p99"),
    [
        ([3.0], 3, 3),
        ([4.0, 1.0], 2.5, 4),
        ([5.0, 1.0, 2.0], 2, 5),
        ([float(number) for number in range(1, 101)], 50.5, 99),
        ([float(number) for number in range(1, 201)], 100.5, 198),
    ],
)
def test_the_median_and_the_time_that_99_of_100_do_not_exceed(times: list[float], p50: float, p99: float) -> None:
    result = Result(case(), 4, tuple(times))
    assert (result.p50_s, result.p99_s) == (p50, p99)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    result = Result(case(), 4, (0.001, 0.002, 0.004))
    assert result.algbw == pytest.approx(0.5)  # 10⁶ bytes in 2 ms
    assert result.busbw == pytest.approx(0.75)
    assert result.bandwidth(result.p99_s) == pytest.approx(0.25)
    assert Result(case(Verb.BROADCAST), 4, (0.002,)).busbw == pytest.approx(0.5)
    assert Result(case(Verb.ALL_TO_ALL), 4, (0.002,)).busbw == pytest.approx(0.375)
