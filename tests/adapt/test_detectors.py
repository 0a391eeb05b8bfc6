"""Detectors: what must hold for all inputs, and the figures that their texts promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.adapt import Interference, Stragglers
from kfcomm.errors import ConfigError

throughputs = st.floats(1e3, 1e12)
sizes = st.integers(1, 9)


def warm(size: int, level: float = 1e9, **options: Any) -> Interference:
    """A detector that has its references."""
    detector = Interference(size, **options)
    for _ in range(detector.warmup):
        assert not detector.update([level] * size).votes
    return detector


@given(sizes, throughputs, st.integers(1, 60))
def test_a_steady_network_is_none(size: int, level: float, steps: int) -> None:
    detector = warm(size, level)
    assert not any(detector.update([level] * size).votes for _ in range(steps))


@given(sizes, st.integers(0, 9), st.floats(0.01, 0.79))
def test_more_than_half_of_the_ranks_decide(size: int, slow: int, part: float) -> None:
    slow = min(slow, size)
    detector = warm(size, patience=1)
    verdict = detector.update([part * 1e9] * slow + [1e9] * (size - slow))
    assert verdict.votes == tuple(range(slow))
    assert verdict.is_majority == verdict.is_interference == (slow > size / 2)


@given(st.integers(1, 6), st.integers(0, 12))
def test_patience_is_for_so_many_steps_running(patience: int, steps: int) -> None:
    detector = warm(3, patience=patience)
    low = [2e8] * 3
    for number in range(1, patience):
        assert not detector.update(low).is_interference, number
    assert detector.update([1e9] * 3).votes == ()
    verdicts = [detector.update(low).is_interference for _ in range(steps)]
    assert verdicts == [number + 1 >= patience for number in range(steps)]


@given(st.integers(1, 40), st.floats(0.0, 0.79))
def test_a_burst_lowers_the_reference_by_no_more_than_promised(burst: int, part: float) -> None:
    detector = warm(2)
    for _ in range(burst):
        detector.update([part * 1e9] * 2)
    assert min(detector.references) >= 1e9 * (1 - detector.follow) ** burst * (1 - 1e-9)


def test_one_absurd_step_raises_the_reference_by_2_percent() -> None:
    detector = warm(1)
    detector.update([1e18])
    assert detector.references == pytest.approx((1.02e9,))


@pytest.mark.parametrize(("part", "promised"), [(0.25, 123), (0.5, 69)])
def test_a_lasting_state_becomes_the_reference(part: float, promised: int) -> None:
    detector = warm(1)
    steps = 0
    while detector.update([part * 1e9]).votes:
        steps += 1
    assert abs(steps - promised) <= 1
    formula = math.log((part / 0.8 - part) / (1 - part)) / math.log(1 - 0.02)
    assert abs(steps - formula) <= 1


@given(st.lists(st.lists(throughputs, min_size=3, max_size=3), max_size=30), st.integers(-10, 10))
def test_the_unit_does_not_matter(steps: list[list[float]], shift: int) -> None:
    one, other = Interference(3), Interference(3)
    for row in steps:
        assert one.update(row).votes == other.update([value * 2.0**shift for value in row]).votes


@given(st.lists(st.lists(throughputs, min_size=4, max_size=4), max_size=30), st.permutations(range(4)))
def test_ranks_are_alike(steps: list[list[float]], order: list[int]) -> None:
    one, other = Interference(4), Interference(4)
    for row in steps:
        first, second = one.update(row), other.update([row[rank] for rank in order])
        assert {order[rank] for rank in second.votes} == set(first.votes)
        assert first.is_interference == second.is_interference


def test_missing_measurements_neither_vote_nor_count() -> None:
    detector = warm(2, patience=2)
    detector.update([1e8, 1e8])
    nothing = detector.update([math.nan, math.nan])
    assert (nothing.votes, nothing.is_majority) == ((), False)
    assert detector.update([1e8, 1e8]).is_interference
    before = detector.references
    detector.update([math.nan, math.nan])
    assert detector.references == before


def test_the_warmup_is_judged_by_its_median_and_reset_begins_anew() -> None:
    detector = Interference(1, warmup=3)
    for value in (1.0, 100.0, 10.0):
        assert all(map(math.isnan, detector.references))
        detector.update([value])
    assert detector.references == (10.0,)
    detector.reset()
    assert all(map(math.isnan, detector.references))
    assert not detector.update([1.0]).votes


@given(st.integers(2, 9), st.data())
def test_a_straggler_is_found_in_its_third_step(size: int, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, size - 1))
    detector = Stragglers(size)
    assert detector.update([8.0] * size) == ()
    found = [detector.update([2.0 if rank == slow else 8.0 for rank in range(size)]) for _ in range(3)]
    if size > 2:  # of two, the median lies between them
        assert found == [(), (), (slow,)]
    else:
        assert found[:2] == [(), ()]


@given(sizes, throughputs, st.integers(1, 20))
def test_all_slow_is_no_straggler(size: int, level: float, steps: int) -> None:
    detector = Stragglers(size)
    detector.update([level] * size)
    assert not any(detector.update([level / 10] * size) for _ in range(steps))


@given(st.lists(st.lists(throughputs, min_size=5, max_size=5), min_size=1, max_size=20))
def test_stragglers_are_below_the_bound_and_never_most(steps: list[list[float]]) -> None:
    detector = Stragglers(5)
    for number, row in enumerate(steps):
        found = detector.update(row)
        assert len(found) <= 2
        middle = sorted(detector.smoothed)[2]
        low = tuple(rank for rank, one in enumerate(detector.smoothed) if one < 0.8 * middle)
        assert found == (low if number >= 2 else ())


def test_stragglers_follow_by_a_tenth_and_leave_out_what_was_not_measured() -> None:
    detector = Stragglers(3)
    assert detector.update([math.nan] * 3) == ()
    detector.update([10.0, 10.0, math.nan])
    detector.update([20.0, math.nan, 1.0])
    assert detector.smoothed == (11.0, 10.0, 1.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threshold": 1.0}, "threshold is between 0 and 1, not 1.0"),
        ({"follow": 0}, "follow is between 0 and 1, not 0"),
        ({"warmup": 0}, "warmup is at least 1, not 0"),
        ({"weight": 1}, "weight is between 0 and 1, not 1"),
        ({"patience": 0}, "patience is at least 1, not 0"),
        ({"size": 0}, "size is at least 1, not 0"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], says: str) -> None:
    kinds: list[Any] = [Interference] if options.keys() <= {"follow", "patience"} else [Interference, Stragglers]
    for kind in [Stragglers] if "weight" in options else kinds:
        with pytest.raises(ConfigError, match=says):
            kind(**{"size": 2, **options})


def test_another_number_of_ranks() -> None:
    for detector in (Interference(3), Stragglers(3)):
        with pytest.raises(ConfigError, match="for 3 ranks was given 2"):
            detector.update([1.0, 2.0])
