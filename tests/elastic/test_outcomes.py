"""Outcomes of calls after the death of a rank, from their standings."""

from __future__ import annotations

from kfcomm.elastic.call_log import CallOutcome, Standing, decide

ALL = (0, 1, 2)
DONE, HELD, FAILED = Standing.DONE, Standing.HELD, Standing.FAILED


def row(name: str, standing: Standing, number: int = 0, step: int = 5, contributors: tuple[int, ...] = ALL):
    return (name, number, standing, contributors if standing == DONE else (), step, "")


def test_call_done_on_one_rank_is_sent_by_the_lowest() -> None:
    said = [(5, []), (5, [row("a", DONE)]), (5, [row("a", DONE)])]
    assert decide(said, (4, 6, 9)) == {("a", 0): CallOutcome(5, 6, ALL)}


def test_equal_standings_need_no_outcome() -> None:
    assert decide([(5, [row("a", DONE), row("b", FAILED)])] * 3, ALL) == {}
    assert decide([(5, []), (5, [row("a", HELD)])], (0, 1)) == {}


def test_call_failed_on_one_rank_fails_on_all_unless_done_on_another() -> None:
    assert decide([(5, [row("a", FAILED)]), (5, [])], (0, 1)) == {("a", 0): CallOutcome(5, -1, (), "")}
    assert decide([(5, [row("a", FAILED)]), (5, [row("a", DONE)])], (0, 1)) == {("a", 0): CallOutcome(5, 1, ALL)}


def test_steps_that_are_over_are_over_for_all() -> None:
    boundary = row("boundary", DONE, number=6, step=6)
    said = [(5, [row("a", DONE), row("b", FAILED)]), (6, [boundary, row("a", HELD, number=1, step=6)])]
    assert decide(said, (0, 1)) == {("boundary", 6): CallOutcome(6, 1, ALL)}
