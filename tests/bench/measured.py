"""A strategy that is made on the ranks, as one from measurements would be."""

from __future__ import annotations

import kfcomm
from kfcomm.strategies import Strategy, build
from kfcomm.types import Layout


async def star(comm: kfcomm.Communicator) -> Strategy:
    """One whose root is agreed upon first."""
    await comm.barrier("measured")
    built = build("star", Layout((0,) * comm.size))
    assert isinstance(built, Strategy)
    return built
