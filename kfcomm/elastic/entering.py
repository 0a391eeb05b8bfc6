"""Set-up of an epoch with joining ranks: what would take time in the pause in which it begins."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

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
        comm = await _admitted(comm, make)
    settle(comm._session, comm.barrier(ARRIVED))
    return comm


async def _admitted(comm: Communicator, make: Callable[[Network], Communicator]) -> Communicator:
    """Set up the epoch to which this rank is invited; returns its communicator, or that of the one that has begun."""
    session = comm._session
    setting_up = asyncio.create_task(set_up(comm, session.network.num_old), name="kfcomm sets up an epoch")
    try:
        following = await session.network.admission()
        if following is None:
            await setting_up  # the others have
            return comm
    except BaseException:
        await session.close()
        raise
    finally:
        setting_up.cancel()
        await asyncio.gather(setting_up, return_exceptions=True)
    await session.abandon("another epoch has begun than this one, which was prepared")
    return make(following)
