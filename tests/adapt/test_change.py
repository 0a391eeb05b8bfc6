"""ChangeTest: its rate of false alarms, how soon it finds a change, and what must hold for all inputs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.adapt import Change, ChangeTest
from kfcomm.errors import ConfigError

Noise = Callable[[random.Random], float]
"""Logarithm of a cost in calm."""


def gaussian(sigma: float) -> Noise:
    return lambda rng: rng.gauss(0, sigma)


def student(scale: float, degrees: int) -> Noise:
    return lambda rng: scale * rng.gauss(0, 1) / math.sqrt(rng.gammavariate(degrees / 2, 2 / degrees))


def stalls(sigma: float, part: float) -> Noise:
    """Some steps take three times as long."""
    return lambda rng: rng.gauss(0, sigma) + (math.log(3) if rng.random() < part else 0.0)


def waits(rng: random.Random) -> float:
    return math.log(1 + rng.expovariate(1))


CALM = [gaussian(0.02), gaussian(0.1), gaussian(0.3), student(0.1, 3), stalls(0.05, 0.01), waits]


def costs(noise: Noise, rng: random.Random, level: float = 1.0) -> Iterator[float]:
    while True:
        yield level * math.exp(noise(rng))


def warm(noise: Noise, rng: random.Random, steps: int = 100) -> ChangeTest:
    test = ChangeTest()
    for _, cost in zip(range(steps), costs(noise, rng), strict=False):
        test.update(cost)
    return test


@pytest.mark.parametrize("noise", CALM)
def test_false_alarms_are_as_rare_as_promised(noise: Noise) -> None:
    """20,000 calm steps may have two."""
    rng, test = random.Random(7), ChangeTest()
    alarms = [test.update(cost) for _, cost in zip(range(20_000), costs(noise, rng), strict=False)]
    assert sum(alarm is not None for alarm in alarms) <= 2


@pytest.mark.parametrize(("sigma", "factor", "steps"), [(0.05, 2.0, 3), (0.05, 1.5, 5), (0.05, 1.3, 6), (0.2, 2.0, 12)])
@pytest.mark.parametrize("turned", [Change.SLOWER, Change.FASTER])
def test_a_lasting_change_is_found_within_steps(sigma: float, factor: float, steps: int, turned: Change) -> None:
    delays = []
    for seed in range(20):
        rng = random.Random(seed)
        test = warm(gaussian(sigma), rng)
        level = factor if turned is Change.SLOWER else 1 / factor
        found = enumerate(map(test.update, costs(gaussian(sigma), rng, level)), 1)
        delay, what = next((number, what) for number, what in found if what is not None)
        assert what is turned
        delays.append(delay)
    assert sorted(delays)[14] <= steps
    assert min(delays) >= 3


@given(st.integers(0, 1 << 32), st.floats(1.0, 1e9))
def test_one_or_two_stalls_are_no_change(seed: int, factor: float) -> None:
    rng = random.Random(seed)
    test = warm(gaussian(0.05), rng)
    assert [test.update(factor) for _ in range(2)] == [None, None]


@given(st.lists(st.floats(1e-3, 1e3), max_size=60), st.integers(-10, 10))
def test_the_unit_does_not_matter(given_costs: list[float], shift: int) -> None:
    one, other = ChangeTest(), ChangeTest()
    assert [one.update(cost) for cost in given_costs] == [other.update(cost * 2.0**shift) for cost in given_costs]


@given(st.sampled_from([0.0, -1.0, math.nan, math.inf]), st.integers(0, 40))
def test_missing_measurements_are_left_out(missing: float, at: int) -> None:
    one, other = ChangeTest(), ChangeTest()
    found = []
    for step in range(60):
        cost = 1.0 if step < 50 else 3.0
        if step == at:
            assert one.update(missing) is None
        found.append(one.update(cost))
        assert found[-1] == other.update(cost)
    assert [one for one in found if one] == [Change.SLOWER]


def test_the_changed_costs_are_the_new_reference() -> None:
    test = warm(gaussian(0.01), random.Random(3))
    assert test.level == pytest.approx(1.0, rel=0.02)
    assert [test.update(4.0) for _ in range(3)] == [None, None, Change.SLOWER]
    assert (test.former, test.level) == (pytest.approx(1.0, rel=0.02), pytest.approx(4.0))
    assert test.former_noise == 0.05
    assert not any(test.update(4.0) for _ in range(100))
    assert [test.update(1.0) for _ in range(3)] == [None, None, Change.FASTER]


def test_known_costs_are_a_reference_at_once() -> None:
    test = ChangeTest()
    test.reset([1.0, 1.02, 0.98, 1.01, 1.0, 0.99, 1.0, 1.01])
    assert test.is_warm
    assert [test.update(8.0) for _ in range(3)] == [None, None, Change.SLOWER]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"false_alarms": 0.0}, "false_alarms is a rate above 0 and below 1, not 0.0"),
        ({"false_alarms": 1}, "false_alarms is a rate above 0 and below 1, not 1"),
        ({"false_alarms": math.nan}, "false_alarms is a rate above 0 and below 1, not nan"),
        ({"warmup": 4}, "warmup is at least 5 steps, not 4"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ChangeTest(**options)
