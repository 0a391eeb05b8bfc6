"""A monitor that is kept while ranks join and die in a running job: the same averages on all ranks, and none lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kfcomm.testing import world
from kfcomm.train import GradientMonitor, SynchronousSGD
from tests.train.test_kept_algorithms import Run, Way


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("handed", ["monitor", "way", ""])
@pytest.mark.parametrize("dies_at", [None, 9])
@pytest.mark.asyncio
async def test_averages_are_equal_after_ranks_joined_and_died(
    handed: str, every: int, dies_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monitors: dict[int, GradientMonitor] = {}

    def make(comm: Any) -> tuple[dict[str, Any], Way]:
        monitor = GradientMonitor(comm, 8, every=every)
        way = SynchronousSGD(comm, monitor=monitor)
        monitors[comm.births[comm.rank]] = monitor
        given = {"monitor": monitor, "way": way}
        return {handed: given[handed]} if handed else {}, lambda _: way

    async with world(3, elastic=True, timeout=20) as comms:
        run = Run(comms, make, on_loss="restart_step")
        run.dies_at = dies_at
        await run.all()
        assert run.states.keys() == ({0, 1, 2, 9} if dies_at is None else {0, 2, 9})
    left = [monitors[uid] for uid in run.states]
    first = left[0].noise_scale.state_dict()
    assert [one.noise_scale.state_dict() for one in left] == [first] * len(left)
    assert [(one.is_due, one.values.get("noise_scale")) for one in left[1:]] == [
        (left[0].is_due, left[0].values.get("noise_scale"))
    ] * (len(left) - 1)
    if handed == "way":
        measured = -(-run.states[0].number // every)
        assert measured - 3 <= first["num_updates"] <= measured, "one is not known yet, one died with a rank"
