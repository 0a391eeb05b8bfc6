"""What others ask of a running world: to be let in, or another size. The first rank hears it and makes a plan of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kfcomm.communicator import Communicator
from kfcomm.epochs import NO_PLAN, Plan
from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.folders import AGAIN_S, StoreClosed
from kfcomm.types import Candidate

logger = logging.getLogger("kfcomm")

ANY = -1
"""Nobody has asked for a size."""


class Asked:
    """What was asked and is not done; it is listened to while this rank is the first."""

    def __init__(self) -> None:
        self._candidates: dict[int, Candidate] = {}
        self._known: set[int] = set()
        self._size = ANY
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

            async def hear_sizes() -> None:
                self._size = await network.wanted_size(self._size)

            for hear in (hear_candidates, hear_sizes):
                self._tasks.append(loop.create_task(_until_over(hear), name="kfcomm hears what is asked"))

    def plan(self, comm: Communicator) -> Plan:
        """What is to be done about it: who waits is let in, as long as the size allows it; the last ones go."""
        room = len(self._candidates) if self._size == ANY else max(0, self._size - comm.size)
        joiners = tuple(sorted(self._candidates.values())[:room])
        excess = 0 if self._size == ANY else max(0, comm.size - self._size)
        return Plan(joiners, comm.births[comm.size - excess :])

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
