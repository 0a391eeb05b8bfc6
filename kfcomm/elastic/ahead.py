"""Preparation of the next epoch on one rank, while an ``Elastic`` is open.

It lies between the boundary at which all ranks hear of joining ranks and the one at which these are admitted: meanwhile
training continues.
"""

from __future__ import annotations

import asyncio
from enum import IntEnum

from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.entering import set_up
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import EpochPlan
from kfcomm.world.prepared import PreparedEpoch, prepare

READY_WITHIN_S = 5.0
"""For joining ranks that set up the epoch; then it is made without, in the pause."""
SET_UP_WITHIN_S = 1.0
"""For this rank, when another one is ready."""


class PlanStage(IntEnum):
    """How a plan is carried out; decided by the first rank, since others may know of other epochs by now."""

    PREPARE = 0  # its epoch is prepared now, and begins later
    PREPARED = 1  # its epoch was prepared
    UNPREPARED = 2  # its epoch is made now, while all ranks wait


class Preparation:
    """At most one prepared epoch. All ranks begin and end it at the same boundaries."""

    def __init__(self, calls: Dispatcher) -> None:
        self._calls = calls
        self._epoch: PreparedEpoch | None = None
        self._task: asyncio.Task[None] | None = None
        self._until_s = 0.0

    def _present(self, comm: Communicator) -> PreparedEpoch | None:
        """Epoch that is prepared to follow that of ``comm``; one for an earlier epoch was dropped with it."""
        return self._epoch if self._epoch is not None and self._epoch.former is comm else None

    def is_due(self, comm: Communicator) -> bool:
        """Whether a request can be carried out at the next boundary: it is prepared, or is not going to be."""
        epoch = self._present(comm)
        return epoch is None or epoch.is_ready or not epoch.is_whole or self._loop.time() > self._until_s

    def plan(self, comm: Communicator, wanted: EpochPlan) -> tuple[EpochPlan, PlanStage]:
        """Plan for the next change, given the requests, and how to carry it out; decided by the first rank."""
        epoch = self._present(comm)
        if epoch is None:
            return wanted, PlanStage.PREPARE if wanted.joiners else PlanStage.UNPREPARED
        # Ranks that have come since are admitted after those for which it was prepared.
        if epoch.plan.leavers == wanted.leavers and set(epoch.plan.joiners) <= set(wanted.joiners):
            return epoch.plan, PlanStage.PREPARED if epoch.is_ready else PlanStage.UNPREPARED
        return wanted, PlanStage.UNPREPARED

    async def begin(self, comm: Communicator, plan: EpochPlan) -> bool:
        """Begin to prepare a plan; all ranks call it. False, on all, if that fails: it is to be carried out now."""
        self.drop()
        attempt = self._calls.log.step  # of this boundary
        self._epoch = await prepare(comm, plan, attempt, lambda value: self._calls.gather(value, "addresses"))
        if self._epoch is None:
            return False
        self._until_s = self._loop.time() + READY_WITHIN_S
        self._task = self._loop.create_task(self._set_up(self._epoch), name="kfcomm prepares an epoch")
        return True

    async def _set_up(self, epoch: PreparedEpoch) -> None:
        await epoch.invite()
        num_old = 0 if epoch.comm is None else epoch.comm.size - len(epoch.plan.joiners)
        epoch.is_ready = epoch.comm is None or await set_up(epoch.comm, num_old)

    async def taken(self, comm: Communicator, stage: PlanStage) -> PreparedEpoch | None:
        """Return the epoch that was prepared, to be carried out; None without one."""
        epoch = self._present(comm)
        if epoch is None or stage is not PlanStage.PREPARED:
            self.drop()
            return None
        if self._task is not None:
            await asyncio.wait([self._task], timeout=SET_UP_WITHIN_S)
        self._epoch = None
        return epoch

    def drop(self) -> None:
        """Prepare nothing any more."""
        epoch, self._epoch, task, self._task = self._epoch, None, self._task, None
        if task is not None:
            task.cancel()
        if epoch is not None:
            epoch.drop()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return self._calls.log.comm._session.engine.loop
