"""Reports of epochs to the store: which ranks have joined, and which are lost."""

from __future__ import annotations

import asyncio
from functools import partial

from kfcomm.elastic.call_log import Uids
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NUM_TELLERS, EpochPlan, tell_store

LOOK_S = 2.0
"""So often a leaving rank, whose report is under way, looks whether the store answers."""


class EpochReports:
    """Reports of one rank's epochs to the store, in the background: which ranks have joined, and which are lost."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: tuple[Uids, EpochPlan] | None = None  # of this epoch, until this rank has sent it
        self._comm: Communicator | None = None

    def begin(self, comm: Communicator, former: Uids, plan: EpochPlan) -> None:
        """Report an epoch that has begun by this plan; ``former`` are the uids of the ranks of the one before."""
        self._news, self._comm = (former, plan), comm
        # Joining ranks wait for a report, and the next change does not end without them: so this rank reports as soon
        # as those that should have are lost, also during a change.
        comm._session.engine.loss_listeners.append(partial(self._tell, comm))
        self._tell(comm)

    def _tell(self, comm: Communicator) -> None:
        """Send the report of the epoch of ``comm``, if that is this rank's task by now."""
        if self._news is None or comm is not self._comm:
            return
        telling = tell_store(comm._session, *self._news, comm.strategy.name)
        # Several ranks report the same, so that one death does not leave joining ranks waiting.
        if comm.rank < NUM_TELLERS:
            self._news = None
        task = comm._session.engine.loop.create_task(telling, name="kfcomm tells the store")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for reports that are being sent, unless the store does not answer, and send no more."""
        # The launcher would wait for ever for a stopped rank of which it does not hear that the others gave it up.
        self._news = None
        while self._tasks and self._comm is not None:
            await asyncio.wait(self._tasks, timeout=LOOK_S)
            if self._comm._session.network.membership.trouble:
                break
        for task in self._tasks:
            task.cancel()
