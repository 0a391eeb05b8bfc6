"""Trials: the cheapest stays, and what finding it costs has the bound that the text promises."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.adapt import Trials
from kfcomm.errors import ConfigError

costs = st.lists(st.floats(1.0, 50.0), min_size=1, max_size=8)


def run(trials: Trials, costs: list[float], *, limit: int = 10_000) -> list[int]:
    """Candidates of each step until the choice is in force: a wanted one runs from the step after next."""
    in_force = trials.wanted
    ran = []
    for _ in range(limit):
        if trials.is_over and in_force == trials.wanted:
            return ran
        asked = trials.wanted
        trials.add(in_force, costs[in_force])
        ran.append(in_force)
        in_force = asked
    raise AssertionError("the trials do not end")


def regret(costs: list[float], ran: list[int]) -> float:
    """Steps of the best that were lost."""
    return sum(costs[number] / min(costs) - 1 for number in ran)


@given(costs, st.integers(3, 6), st.integers(1, 3))
def test_the_cheapest_stays_and_the_regret_is_bounded(costs: list[float], steps: int, rounds: int) -> None:
    trials = Trials(len(costs), steps=steps, rounds=rounds)
    ran = run(trials, costs)
    assert costs[trials.best] == min(costs)
    for number in range(len(costs)):
        assert ran.count(number) <= rounds * steps + 1  # the first change is asked for in a step of its own
    bound = rounds * steps * sum(cost / min(costs) - 1 for cost in costs)
    assert regret(costs, ran) <= bound + max(costs) / min(costs)


@given(costs)
def test_the_hopeless_run_for_three_steps(costs: list[float]) -> None:
    costs = [1.0, *(2.01 + cost for cost in costs)]
    ran = run(Trials(len(costs), steps=6), costs)
    assert all(ran.count(number) == 3 for number in range(1, len(costs)))


@given(st.permutations([1.0, 1.02, 1.05]))
def test_equal_candidates_are_tried_in_every_round(costs: list[float]) -> None:
    trials = Trials(3, steps=4, rounds=3)
    ran = run(trials, costs)
    assert len(ran) >= 3 * 3 * 3
    assert trials.remaining == (0, 1, 2)
    assert costs[trials.best] == 1.0


def test_eliminated_candidate_is_not_tried_again() -> None:
    trials = Trials(3, steps=4, rounds=5)
    ran = run(trials, [1.0, 1.5, 1.05])
    assert ran.count(1) == 4
    assert trials.remaining == (0, 2)


def test_the_first_step_is_not_counted_and_noise_is_met_with_medians() -> None:
    noise = itertools.cycle([9.0, 1.0, 1.0, 1.0])  # every first step of a candidate is slow
    trials = Trials(2, steps=4, rounds=1)
    for number in (0, 0, 0, 0, 1, 1, 1):
        assert not trials.is_over
        trials.add(number, next(noise) * (1.3 if number == 0 else 1.0))
    assert trials.is_over
    assert trials.costs == (1.3, 1.0)
    assert trials.wanted == trials.best == 1


def test_one_candidate_is_measured_and_stays() -> None:
    trials = Trials(1, steps=3)
    assert run(trials, [7.0]) == [0, 0]
    assert trials.best == trials.wanted == 0
    assert trials.costs == (7.0,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_candidates": 0}, "at least 1 candidates, not 0"),
        ({"steps": 2}, "at least 3 steps, not 2"),
        ({"rounds": 0}, "at least 1 rounds, not 0"),
        ({"margin": 0.0}, "margin is above 0, not 0.0"),
        ({"give_up": 1.0}, "give_up is above 1, not 1.0"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trials(**{"num_candidates": 2, **options})
