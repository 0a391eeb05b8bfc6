"""Epoch that is prepared while the present one is in use: when it begins, its links and its joining ranks are there.

All ranks exchange the addresses of the next epoch, make its sessions, and invite the joining ranks, which do the same.
If they all have it when they agree to change, it begins at once. If any has lost it (a rank is dead, the plan is
another one by now), all drop it, and the epoch is made in the pause. So a preparation is never needed, and nothing is
decided by it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kfcomm.errors import KfcommError
from kfcomm.world.communicator import Communicator
from kfcomm.world.epochs import NUM_TELLERS, EpochPlan

logger = logging.getLogger("kfcomm")


@dataclass(eq=False)
class PreparedEpoch:
    """Next epoch on one rank, by a plan.

    Attributes:
        plan: by which it was prepared.
        former: communicator of the epoch before.
        comm: its communicator; None on a rank that leaves.
        is_refused: a joining rank could not be invited.
        is_ready: its links are there, on this rank.
    """

    plan: EpochPlan
    former: Communicator
    comm: Communicator | None
    digest: bytes  # of the former's strategy
    is_refused: bool = False
    is_ready: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether no rank of it is lost, as far as this rank knows."""
        if self.comm is None:
            return True
        session = self.comm._session
        return not (self.is_refused or session.engine.router.lost or session.is_closed)

    def fits(self, comm: Communicator) -> bool:
        """Whether it can follow an epoch now."""
        return self.is_ready and self.is_whole and self.former is comm and self.digest == comm.strategy.digest

    async def invite(self) -> None:
        """Tell the joining ranks of it, if that is this rank's task."""
        if self.comm is None or self.comm.rank >= NUM_TELLERS:
            return
        uids = [one.birth for one in self.plan.joiners]
        num_old = self.comm.size - len(uids)
        try:
            membership = self.comm._session.network.membership
            self.is_refused = not await membership.invite(num_old, uids, self.comm.strategy.name)
        except KfcommError as error:
            logger.info("rank %d cannot invite ranks: %s", self.comm.rank, error)
            self.is_refused = True

    def drop(self) -> None:
        """Close it, in the background."""
        if self.comm is not None:
            self.former._session.drop_prepared()


Exchange: TypeAlias = Callable[[Any], Awaitable[tuple[list[Any], tuple[int, ...]]]]
"""Gathers a value of each surviving rank, with their uids."""


async def prepare(comm: Communicator, plan: EpochPlan, attempt: int, exchange: Exchange) -> PreparedEpoch | None:
    """Prepare the epoch after that of ``comm``; all its ranks call it. None, on all, if that fails.

    ``attempt``: number from 1 on, the same on all ranks, and another one each time in an epoch.
    """
    session, entry = comm._session, None
    try:
        entry = await session.network.open_entry(session.epoch + 1, attempt)
    except KfcommError as error:
        logger.info("rank %d cannot prepare the next epoch: %s", comm.rank, error)
    mine, strategy, digest = comm.births[comm.rank], comm._strategy_below(), comm.strategy.digest
    rows, uids = await exchange([comm.epoch, None if entry is None else entry.part, digest])
    # The epoch may change meanwhile, on some ranks before this call and on others after it.
    is_shared = len({epoch for epoch, *_ in rows}) == 1 and all(part is not None for _, part, _ in rows)
    is_shared = is_shared and uids == comm.births
    if entry is None or not is_shared or mine in plan.leavers:
        if entry is not None:
            await entry.close()
        return PreparedEpoch(plan, comm, None, digest) if is_shared else None
    parts = {rank: part for rank, (_, part, _) in enumerate(rows) if comm.births[rank] not in plan.leavers}
    made = session.prepare(entry.enter(parts, plan.joiners))
    spec = strategy if len({one for *_, one in rows}) == 1 else "auto"
    return PreparedEpoch(plan, comm, Communicator(made, made.world, spec, comm.name), digest)
