"""Random training in which ranks die, join and are released: one story for all, on both kinds of links."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.elastic import programs


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("first", range(0, 60, 10))
@pytest.mark.asyncio
async def test_one_story(transport: Any, grows: bool, first: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(first, first + 10):
        await programs.run(seed, transport, grows=grows)


@pytest.mark.parametrize("on_loss", ["raise", "restart_step"])
@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.asyncio
@pytest.mark.slow
async def test_one_story_of_steps_that_come_to_nothing(
    on_loss: str, transport: Any, grows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    void = 0
    for seed in range(10, 30):
        living = await programs.run(seed, transport, deaths=2, grows=grows, on_loss=on_loss)
        void += sum(len(one.void) for one in living)
    assert void or transport == "shm"  # whose turns are not the same each time


@pytest.mark.parametrize("seed", [9002785])
@pytest.mark.asyncio
async def test_defects_found_by_the_search_stay_fixed(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """A rank dies while a joining rank receives the state, which it has whole and another has not."""
    caplog.set_level(logging.CRITICAL)
    await programs.run(seed, deaths=3, grows=True)


def test_programs_have_deaths_and_joiners() -> None:
    plans = [programs.plan_of(seed, grows=True) for seed in range(60)]
    assert sum(len(plan.deaths) for plan in plans) > 20
    assert sum(len(plan.joins) for plan in plans) > 20
    assert {verb for plan in plans for step in plan.steps for verb, _, _ in step} == set(programs.VERBS)
