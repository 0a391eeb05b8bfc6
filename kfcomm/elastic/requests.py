"""Requests to a running job, and reports of epochs to its store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.keyvalue import AGAIN_S, StoreClosed
from kfcomm.types import ANY_SIZE, Candidate, Wanted
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, NUM_TELLERS, Plan, tell_store

logger = logging.getLogger("kfcomm")


class Requests:
    """What was asked and is not done; it is listened to while this rank is the first."""

    def __init__(self) -> None:
        self._candidates: dict[int, Candidate] = {}
        self._known: set[int] = set()
        self._wanted = Wanted()
        self._tasks: list[asyncio.Task[None]] = []

    def look(self, comm: Communicator) -> None:
        """Listen from now on, if this rank is the first of its epoch."""
        if comm.rank == 0 and not self._tasks:
            network = comm._session.network
            loop = comm._session.engine.loop

            async def hear_candidates() -> None:
                for one in await network.candidates(self._known):
                    self._known.add(one.birth)
                    self._candidates[one.birth] = one

            async def hear_wishes() -> None:
                self._wanted = await network.wanted(self._wanted)

            for hear in (hear_candidates, hear_wishes):
                self._tasks.append(loop.create_task(_until_over(hear), name="kfcomm hears what is asked"))

    def plan(self, comm: Communicator) -> Plan:
        """What is to be done about it: who waits is let in, as long as the size allows it; who is asked to goes.

        If there are too many besides, the last ones go. One rank that has the state stays in any case.
        """
        size, leavers = self._wanted
        staying = [birth for birth in comm.births if birth not in leavers] or [comm.births[0]]
        waiting = sorted(self._candidates.values())
        if size != ANY_SIZE:
            staying = staying[: max(1, size)]
            waiting = waiting[: max(0, size - len(staying))]
        return Plan(tuple(waiting), tuple(birth for birth in comm.births if birth not in staying))

    def is_wanted(self, comm: Communicator) -> bool:
        """Whether this rank is the first, and something is to be done."""
        return comm.rank == 0 and self.plan(comm) != NO_PLAN

    def done(self, plan: Plan) -> None:
        """It was carried out."""
        for one in plan.joiners:
            self._known.add(one.birth)
            self._candidates.pop(one.birth, None)

    def close(self) -> None:
        """Listen no more."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []


async def _until_over(hear: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Without a store nothing is asked, and training goes on; it may be back."""
    while True:
        try:
            await hear()
        except StoreClosed:
            return
        except RendezvousError:
            await asyncio.sleep(AGAIN_S)


TELL_WITHIN_S = 2.0
"""Whoever leaves waits so long for a store that does not answer."""


class EpochReports:
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
