"""Requests to a running job, and reports of epochs to its store.

Joining ranks, and proposals of another size, are requests: the first rank reads them from the store and makes a plan of
them. Reports tell the store which ranks have joined and which are lost. Joining ranks wait until a report admits them,
and the next change of the epoch does not end without them: so surviving ranks report as soon as the ranks that should
have reported are lost, also during a change.
"""

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
    """Requests that are not carried out; read from the store while this rank is the first."""

    def __init__(self) -> None:
        self._candidates: dict[int, Candidate] = {}
        self._known: set[int] = set()
        self._wanted = Wanted()
        self._tasks: list[asyncio.Task[None]] = []

    def look(self, comm: Communicator) -> None:
        """Begin to read requests, if this rank is the first of its epoch."""
        if comm.rank == 0 and not self._tasks:
            membership = comm._session.network.membership
            loop = comm._session.engine.loop

            async def hear_candidates() -> None:
                for one in await membership.candidates(self._known):
                    self._known.add(one.birth)
                    self._candidates[one.birth] = one

            async def hear_wishes() -> None:
                self._wanted = await membership.wanted(self._wanted)

            for hear in (hear_candidates, hear_wishes):
                self._tasks.append(loop.create_task(_until_over(hear), name="kfcomm hears what is asked"))

    def plan(self, comm: Communicator) -> Plan:
        """Plan the next change: waiting ranks join, as far as the size allows; ranks that are to be replaced leave.

        If too many ranks remain, the last ones leave. At least one rank that has the state stays.
        """
        size, leavers = self._wanted
        # The state would be lost with its last owner.
        staying = [uid for uid in comm.births if uid not in leavers] or [comm.births[0]]
        waiting = sorted(self._candidates.values())
        if size != ANY_SIZE:
            staying = staying[: max(1, size)]
            waiting = waiting[: max(0, size - len(staying))]
        return Plan(tuple(waiting), tuple(uid for uid in comm.births if uid not in staying))

    def is_wanted(self, comm: Communicator) -> bool:
        """Whether this rank is the first, and has requests."""
        return comm.rank == 0 and self.plan(comm) != NO_PLAN

    def done(self, plan: Plan) -> None:
        """Drop the requests of a plan that was carried out."""
        for one in plan.joiners:
            self._known.add(one.birth)
            self._candidates.pop(one.birth, None)

    def close(self) -> None:
        """Stop reading requests."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []


async def _until_over(hear: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Repeat until the store is closed. While it cannot be reached, training continues without requests."""
    while True:
        try:
            await hear()
        except StoreClosed:
            return
        except RendezvousError:
            await asyncio.sleep(AGAIN_S)


TELL_WITHIN_S = 2.0
"""Wait of a leaving rank for a store that does not answer."""


class EpochReports:
    """Reports of one rank's epochs to the store, in the background, from one change to the next."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: tuple[tuple[int, ...], Plan] | None = None
        """Report of this epoch, until this rank has sent it."""
        self._comm: Communicator | None = None

    def begin(self, comm: Communicator, former: tuple[int, ...], plan: Plan) -> None:
        """Report an epoch that has begun by this plan; ``former`` are the uids of the ranks of the one before."""
        self._news, self._comm = (former, plan), comm
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
        """Wait a moment for reports that are being sent, and send no more."""
        self._news = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TELL_WITHIN_S)
        for task in self._tasks:
            task.cancel()
