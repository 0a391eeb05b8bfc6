"""Worlds in memory whose measurements are scripted: no clock has a say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kfcomm.adapt import Adaptation, Decision, Policy, Reading
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import works, world

NBYTES = 4_000_000

Cost = Callable[[int, int, str], tuple[float, float]]
"""``cost(rank, step, strategy)``: the rank's own seconds in a step, and those of its collectives."""


class ScriptedMeter:
    """Says of the n-th step what the script says; a step is what lies between two readings."""

    def __init__(self, comm: Communicator, cost: Cost) -> None:
        self.comm = comm
        self.cost = cost
        self.num_reads = 0
        self.total = Reading.nothing(comm.size)

    def read(self) -> Reading:
        step, is_end = divmod(self.num_reads, 2)
        self.num_reads += 1
        if is_end:
            own_s, busy_s = self.cost(self.comm.rank, step, self.comm.strategy.name)
            waited_s = tuple(float(rank == 0) for rank in range(self.comm.size))
            self.total = self.total.plus(Reading(own_s + busy_s, busy_s, NBYTES, 1, waited_s))
        return self.total


def steady(rank: int, step: int, strategy: str) -> tuple[float, float]:
    """Every step alike."""
    return 1.0, 1.0


Make = Callable[[Communicator], Sequence[Policy]]


async def adapted(
    make: Make, *, size: int = 4, steps: int = 10, cost: Cost = steady, strategy: str = "star", **options: Any
) -> tuple[list[Decision], list[str]]:
    """Run steps with the policies that ``make(comm)`` gives; the decisions, and the strategy after each step.

    Both are the same on every rank, and the world works afterwards.
    """
    async with world(size, hosts=size, strategy=strategy) as comms:

        async def main(comm: Communicator) -> tuple[list[Decision], list[str]]:
            in_force = []
            async with Adaptation(comm, make(comm), meter=ScriptedMeter(comm, cost), **options) as adaptation:
                for _ in range(steps):
                    async with adaptation.step():
                        await comm.barrier()
                    in_force.append(comm.strategy.name)
            return adaptation.decisions, in_force

        outcomes = await asyncio.gather(*map(main, comms))
        await works(comms)
    assert all(one == outcomes[0] for one in outcomes)
    return outcomes[0]


def words(decisions: Sequence[Decision]) -> list[tuple[int, str, str]]:
    """Decisions without their evidence."""
    return [(one.step, one.policy, one.what) for one in decisions]
