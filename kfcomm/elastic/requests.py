"""Requests to a running job: joining ranks, and proposals of another size.

The first rank reads them from the store and makes a plan of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.keyvalue import AGAIN_S, StoreClosed
from kfcomm.types import ANY_SIZE, Candidate, Wanted
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, EpochPlan


class SizeRequests:
    """Requests that are not carried out; read from the store while this rank is the first."""

    def __init__(self) -> None:
        self._candidates: dict[int, Candidate] = {}
        self._known: set[int] = set()
        self._wanted = Wanted()
        self._tasks: list[asyncio.Task[None]] = []

    def look(self, comm: Communicator) -> None:
        """Begin to read requests, until the epoch is over, if this rank is its first."""
        if comm.rank == 0 and not self._tasks:
            comm._session.engine.end_listeners.append(self.close)
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

    def plan(self, comm: Communicator) -> EpochPlan:
        """Plan the next change: waiting ranks join, as far as the size allows; replaced and surplus ranks leave."""
        size, leavers = self._wanted
        # The state would be lost with its last owner.
        staying = [uid for uid in comm.births if uid not in leavers] or [comm.births[0]]
        waiting = sorted(self._candidates.values())
        if size != ANY_SIZE:
            staying = staying[: max(1, size)]
            waiting = waiting[: max(0, size - len(staying))]
        return EpochPlan(tuple(waiting), tuple(uid for uid in comm.births if uid not in staying))

    def is_wanted(self, comm: Communicator) -> bool:
        """Whether this rank is the first, and has requests."""
        return comm.rank == 0 and self.plan(comm) != NO_PLAN

    def done(self, plan: EpochPlan) -> None:
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
