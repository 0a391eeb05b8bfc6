"""A function on every rank of a world of real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kfcomm.testing.faults import FaultPlan
from kfcomm.testing.processes import process_world

RANKS = 3


def in_processes(work: Callable[..., Any], *args: Any, transport: str) -> list[Any]:
    """Results of all ranks of ``work(comm, *args)``, blocking; the first error that one raised is raised here.

    Args:
        work: of a module as the ranks import it.
        args: beside the communicator.
        transport: between the ranks.
    """
    with process_world(RANKS, FaultPlan(), is_blocking=True, transport=transport) as world:
        for rank in range(RANKS):
            world.outcome(rank)  # it has joined
        world.begin(work, args)
        said = [world.outcome(rank) for rank in range(RANKS)]
    for found in said:
        if isinstance(found, BaseException):
            raise found
    return said
