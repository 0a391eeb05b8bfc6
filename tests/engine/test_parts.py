"""Operations that are parts of something else: announced when they wait, and neither reported nor ended by time."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kfcomm.collectives.handle import Handle
from kfcomm.core.collective import Post
from kfcomm.errors import CollectiveMismatch
from kfcomm.types import Op
from tests.conformance.worlds import ends, until, works, world


def part(comm, root):
    """A reduce whose key was not given by a user; ranks that mean different roots exchange no chunk."""
    group = comm._group
    x = np.ones(3)
    plan = group.plans.plan(type(group.plans.planner).reduce, x.dtype, x.shape, Op.SUM, root)
    handle = Handle(loop=group.engine.loop)
    operation = plan.operation(handle, x, x, plan.work)
    group.engine.post(Post(group.view, "part", plan.signature, plan.program, plan.sizes), operation, None)
    handle.operation = operation
    return handle


@pytest.mark.asyncio
async def test_a_part_that_waits_is_not_reported(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "kfcomm"):
        async with world(2, stall_after=0.0) as comms:
            waiting = part(comms[0], 0)
            deadlines = comms[0]._session.engine.deadlines
            await until(lambda: deadlines.next_s == float("inf"))  # all that was due has been
            assert not waiting.done()
            await part(comms[1], 0)
            await waiting
            await works(comms)
    assert not caplog.records


@pytest.mark.asyncio
async def test_parts_that_wait_for_each_other_are_announced():
    async with world(2) as comms:
        outcomes = await ends(comms, lambda comm: part(comm, comm.rank))
        assert [type(one) for one in outcomes] == [CollectiveMismatch] * 2
        await works(comms)


@pytest.mark.asyncio
async def test_numbers_that_are_left_out_owe_nothing():
    async with world(2) as comms:
        early = part(comms[0], 1)
        engine, view = comms[1]._session.engine, comms[1]._group.view
        await until(lambda: engine.router.expected(view.id, "part") is not None)
        engine.leave_out(view, "part", 5)
        assert engine.router.num_uses(view.id, "part") == 5
        early.cancel()
