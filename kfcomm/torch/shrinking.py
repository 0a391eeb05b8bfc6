"""Ranks that go on without others, which have died or are to take no further part.

Those that go on first make a group of their own, which nobody else is needed for. Where they are all that is left of a
world, and all of them know it, the next epoch follows: then nothing is kept for the others any more.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kfcomm.errors import PeerLost
from kfcomm.sync.communicator import Communicator

NAME = "shrunk"


def without_others(comm: Communicator, births: Collection[int], timeout_s: float) -> Communicator:
    """The communicator of those of these births, which call it; nobody else has to.

    Args:
        comm: of them and others, or of them alone, who have this already.
        births: of those that go on, this one among them.
        timeout_s: for which they wait for each other.

    Raises:
        CollectiveTimeout: not all have called it alike.
        PeerLost: one of them is lost.
    """
    if len(births) == comm.size:
        return comm
    excluded = {rank for rank, birth in enumerate(comm.births) if birth not in births}
    left = comm.group([rank for rank in range(comm.size) if rank not in excluded], NAME, timeout=timeout_s)
    if comm.size < comm._session.layout.size:  # a group: its world goes on
        return left
    knows = comm._session.engine.router.lost.keys() >= excluded
    if not left.all_reduce(np.array([knows], np.uint8), f"{NAME}/known", op="min")[0]:
        return left
    left.close()
    return comm.shrink(timeout=timeout_s)


def of_those_that_live(comm: Communicator, timeout_s: float) -> Communicator:
    """The communicator of the next epoch; the same one, if none of the ranks that live knows of a loss.

    Raises:
        ConfigError: it is not that of all ranks of an epoch.
        CollectiveError: see ``Communicator.shrink``.
    """
    is_whole = comm.agree(not comm._session.engine.router.lost, timeout=timeout_s)
    return comm if is_whole else comm.shrink(timeout=timeout_s)


def check_births(comm: Communicator, births: Collection[int]) -> None:
    """Refuse an epoch that has not all of these.

    Raises:
        PeerLost: ranks were lost meanwhile.
    """
    lost = [birth for birth in births if birth not in comm.births]
    if lost:
        raise PeerLost(f"more ranks were lost meanwhile: {lost}, by their first numbers; leave them out, too")
