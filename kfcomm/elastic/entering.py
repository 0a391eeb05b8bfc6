"""Set-up of an epoch with joining ranks: what would take time in the pause in which it begins."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import numpy as np

from kfcomm.collectives.handle import Handle, looked_at
from kfcomm.elastic.replicas import share_stripe
from kfcomm.engine.interfaces import Network
from kfcomm.errors import KfcommError
from kfcomm.world.communicator import ARRIVED, Communicator
from kfcomm.world.epochs import settle

logger = logging.getLogger("kfcomm")


async def set_up(comm: Communicator, num_old: int) -> bool:
    """Make the links that a handover from the first ranks to the others uses; all ranks call it. Whether that worked.

    Cost: one gather, and a group with one byte for each of the first ranks.
    """
    try:
        await comm.all_gather_object(None, "kfcomm/prepared")
        for giver in range(num_old):
            members = [giver, *range(num_old, comm.size)]
            if comm.rank in members:
                await share_stripe(comm, members, [np.zeros(1, np.uint8)])
    except KfcommError as error:
        logger.info("rank %d: a prepared epoch is dropped: %s", comm.rank, error)
        return False
    return True


async def entered(network: Network, make: Callable[[Network], Communicator]) -> Communicator:
    """Return the communicator of a joining rank, when it is admitted; ``make`` makes one on a network."""
    comm = make(network)
    if network.is_invited:
        comm, arrived = await _admitted(comm, make)
    else:
        arrived = comm.barrier(ARRIVED)
    settle(comm._session, arrived)
    return comm


async def _admitted(
    comm: Communicator, make: Callable[[Network], Communicator]
) -> tuple[Communicator, Handle[None]]:  # fmt: skip
    """Set up the epoch to which this rank is invited; returns the communicator of the one that has begun.

    Also the barrier with which each rank begins an epoch. It is over when all others have begun this one, which this
    rank so learns of without the store: its answer may be late, and the others wait for a rank that lives.
    """
    session, arrived = comm._session, None
    setting_up = asyncio.create_task(set_up(comm, session.network.num_old), name="kfcomm sets up an epoch")
    asked = asyncio.create_task(session.network.admission(), name="kfcomm waits to be admitted")
    try:
        await asyncio.wait((asked, setting_up), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done() and setting_up.result():
            arrived = comm.barrier(ARRIVED, timeout=math.inf)
            arrived.add_done_callback(looked_at)
            await asyncio.wait((asked, arrived), return_when=asyncio.FIRST_COMPLETED)
        if arrived is not None and arrived.done() and not arrived.cancelled() and arrived.exception() is None:
            await session.network.begin()
            return comm, arrived
        following = await asked
        if following is None:
            await setting_up  # the others have
            return comm, comm.barrier(ARRIVED) if arrived is None else arrived
    except BaseException:
        await session.close()
        raise
    finally:
        for task in (setting_up, asked):
            task.cancel()
        await asyncio.gather(setting_up, asked, return_exceptions=True)
    await session.abandon("another epoch has begun than this one, which was prepared")
    made = make(following)
    return made, made.barrier(ARRIVED)
