"""What the store is told of each epoch: who has come, and who is lost. In the background, by the first ranks.

Newcomers wait until they are let in by it, and take part in the next change, which does not end without them. So who is
left sees to it that this is done as soon as those that were to do it are lost, also in the midst of a change.
"""

from __future__ import annotations

import asyncio
from functools import partial

from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NUM_TELLERS, Plan, tell_store

TELL_WITHIN_S = 2.0
"""Whoever leaves waits so long for a store that does not answer."""


class Telling:
    """The news of one rank's epochs, from one change to the next."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: tuple[tuple[int, ...], Plan] | None = None
        """Of this epoch, unless this rank has told it."""
        self._comm: Communicator | None = None

    def begin(self, comm: Communicator, former: tuple[int, ...], plan: Plan) -> None:
        """An epoch has begun, after one of the ranks ``former``, by this plan."""
        self._news, self._comm = (former, plan), comm
        comm._session.engine.loss_listeners.append(partial(self._tell, comm))
        self._tell(comm)

    def _tell(self, comm: Communicator) -> None:
        """Tell what there is of the epoch of ``comm``, as far as it falls to this rank by now."""
        if self._news is None or comm is not self._comm:
            return
        telling = tell_store(comm._session, *self._news, comm.strategy.name)
        if comm.rank < NUM_TELLERS:
            self._news = None
        task = comm._session.engine.loop.create_task(telling, name="kfcomm tells the store")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait a moment for what is being told; nothing more is."""
        self._news = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TELL_WITHIN_S)
        for task in self._tasks:
            task.cancel()
