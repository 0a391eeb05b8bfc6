"""Ways into a running job: the entrance to an ``Elastic``, and requests to join or to change the size.

At the entrance each rank first reports whether it sees the checkpoint. Then the lowest rank that sees it reads it, and
sends it to the others. If that rank is lost, another one reads it; if no other rank sees it, all survivors end with an
error: a job with a checkpoint never starts from step 0.

Joining ranks, and proposals of another size, are requests: the first rank reads them from the store and makes a plan of
them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from kfcomm.elastic.call_log import Uids
from kfcomm.elastic.checkpoint import Checkpoint, Found
from kfcomm.elastic.handover import Handover, check_options
from kfcomm.elastic.sampler import Position
from kfcomm.errors import ConfigError, PeerLost, RendezvousError
from kfcomm.rendezvous.keyvalue import AGAIN_S, StoreClosed
from kfcomm.types import ANY_SIZE, Candidate, Wanted
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NO_PLAN, Plan


class Entrance:
    """Entrance of one rank to an ``Elastic``.

    Args:
        comm: communicator of the ranks that enter.
        handover: handover of its state.
        checkpoint: its checkpoint, if it has one.
        options: see `Handover`.
    """

    def __init__(
        self, comm: Communicator, handover: Handover, checkpoint: Checkpoint | None, options: dict[str, Any]
    ) -> None:
        self._me = comm.births[comm.rank]
        self._births = comm.births
        self._hosts = dict(zip(comm.births, comm.layout.hosts, strict=True))
        self._handover = handover
        self._checkpoint = checkpoint
        self._options = options
        self._told: tuple[Found, int] | None = None

    async def join(self, num_old: int) -> Position:
        """Receive the state, and the position, of the first ``num_old`` ranks, which train already."""
        return self._begun(await self._handover.carry_out(None, self._births[:num_old]))

    async def begin(self) -> Position:
        """Agree with the other ranks on the position from which all begin.

        Raises:
            ConfigError: see ``Elastic``.
        """
        while True:
            holders = await self._holders()
            if not holders:
                place = Position(lineage=[secrets.token_hex(8)])
                return self._begun(await self._handover.carry_out(list(place)))
            is_reader = holders[0] == self._me
            place, wrong = await self._read() if is_reader else (Position(), None)
            try:
                told = await self._handover.carry_out(list(place), holders[:1], wrong=wrong, are_new=True)
            # Its memory may hold a state that no other rank has; another rank that sees the file reads it.
            except PeerLost:  # the rank that read the checkpoint: another one reads it
                continue
            return self._begun(told)

    async def _holders(self) -> Uids:
        """The ranks that see the checkpoint; empty without a checkpoint."""
        found, wrong = await self._find()
        said = [self._options, None if found is None else list(found), wrong]
        rows, uids = await self._handover.gathered(said, "begin")
        for rank, (_, _, fault) in enumerate(rows):
            if fault is not None:
                raise ConfigError(f"rank {rank}: {fault}")
        check_options({rank: options for rank, (options, _, _) in enumerate(rows)})
        seen = {uid: Found(*one) for uid, (_, one, _) in zip(uids, rows, strict=True) if one is not None}
        self._check(seen, uids)
        if seen:
            self._told = next(iter(seen.values())), min(seen)
        return tuple(uid for uid in uids if uid in seen)

    def _check(self, seen: dict[int, Found], uids: Uids) -> None:
        """Check that all ranks see the same checkpoint."""
        if self._checkpoint is None:
            return
        name, other = self._checkpoint.name, {one: uid for uid, one in reversed(seen.items())}
        if len(other) > 1:
            steps = ", ".join(f"of step {one.number} on rank {uids.index(uid)}" for one, uid in other.items())
            raise ConfigError(f"checkpoint {name!r} is not the same file on all ranks: it is one {steps}; keep one")
        if seen:
            return
        if self._told is not None:
            found, uid = self._told
            raise ConfigError(
                f"rank {uid} is lost, which saw checkpoint {name!r} of step {found.number}, and no other rank sees"
                " it: start the job again, with a path that leads to the same file on all hosts"
            )
        # A rank that sees no file cannot tell "no checkpoint" from "not on this host". Only the first rank's
        # path counts for that, or another rank on its host.
        first = self._births[0]
        if first not in uids and self._hosts[first] not in {self._hosts[one] for one in uids}:
            raise ConfigError(
                f"rank {first} was lost before it reported whether it sees a checkpoint {name!r}, and no rank is left "
                "on its host that could: start the job again"
            )

    async def _find(self) -> tuple[Found | None, str | None]:
        """This rank's view of the checkpoint, and its fault."""
        try:
            return (None if self._checkpoint is None else await self._checkpoint.find()), None
        except ConfigError as error:
            return None, str(error)

    async def _read(self) -> tuple[Position, str | None]:
        """Load the checkpoint; returns its position, and its fault."""
        if self._checkpoint is None:
            return Position(), None
        try:
            told = await self._checkpoint.read()
            if told is None:
                return Position(), f"checkpoint {self._checkpoint.name!r} was removed while it was read"
            return Position.of(told)._replace(lineage=[*self._checkpoint.lineage, secrets.token_hex(8)]), None
        except ConfigError as error:
            return Position(), str(error)
        except (TypeError, ValueError):
            return Position(), f"{self._checkpoint.name} has no position from which an Elastic can resume"

    def _begun(self, told: Any) -> Position:
        place = Position.of(told)
        if self._checkpoint is not None:
            self._checkpoint.lineage = place.lineage
        return place


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
