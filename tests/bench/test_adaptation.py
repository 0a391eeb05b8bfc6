"""The figure of a link that drops: what counts as detected, as the best, and as reached."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.netlab.adaptation import Case, Ran, judge, table
from bench.netlab.hosts import even
from bench.netlab.lab import Netlab
from bench.netlab.measure import conduct
from bench.netlab.steps import Step

CASE = Case(8, 200e6, 50e6, "h4", 8 << 20, 20, 4, "ring")
STATE = {"ring": [2.0, 2.2, 2.1], "packed": [1.0, 1.1, 0.9], "star": [4.0, 4.1, 4.2]}
FOUND = {"step": 5, "what": "the network is slower: measures the links"}


def ran(*after: float) -> list[Ran]:
    """A step takes 0.5 s at first, 2 s from the drop on, and then what is given, to the end."""
    spans = [0.5] * 4 + [2.0] * 3 + list(after)
    return [Ran("ring", span_s, 0.01) for span_s in spans + spans[-1:] * (CASE.steps - len(spans))]


def test_it_is_reached_with_nine_tenths_of_the_best_within_five_steps() -> None:
    verdict = judge(ran(1.5, 1.05), [FOUND], STATE, CASE)
    assert (verdict.detected, verdict.best, verdict.best_s) == (5, "packed", 1.0)
    assert verdict.reached == 8
    assert verdict.share == pytest.approx(1 / 1.05)
    assert verdict.is_reached


@pytest.mark.parametrize(
    ("steps", "decisions"),
    [
        (ran(1.05), []),
        (ran(1.05), [{**FOUND, "step": 2}]),  # before there was anything to detect
        (ran(1.5, 1.5, 1.5, 1.5, 1.05), [FOUND]),
        (ran(1.05, 1.05, 1.5), [FOUND]),
        (ran(1.5), [FOUND]),
    ],
    ids=["not detected", "a false alarm", "too late", "not for long", "never"],
)
def test_it_is_not(steps: list[Ran], decisions: list[dict[str, Any]]) -> None:
    assert not judge(steps, decisions, STATE, CASE).is_reached


def test_the_table_has_every_step_and_every_strategy() -> None:
    verdict = judge(ran(1.5, 1.05), [FOUND], STATE, CASE)
    text = table(ran(1.5, 1.05), STATE, verdict, replace(CASE, low_rate=50e6))
    assert text.count("\n") == CASE.steps + 2 + len(STATE)
    assert "h4 drops to 50 Mbit/s" in text


@pytest.mark.netns
@pytest.mark.slow
def test_the_program_adapts_across_hosts() -> None:
    """All ranks make the same decisions, and the results are right."""
    with Netlab(even(2, 400e6)) as lab:
        records = conduct(lab, "bench.netlab.adapting", [Step("adaptive", 1 << 16)] * 3)
    assert [len(record["times"]) for record in records] == [3, 3]
    assert records[0]["decisions"] == records[1]["decisions"]
