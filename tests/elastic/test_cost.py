"""Cost of an ``Elastic`` without losses: no memory for another copy of inputs or results.

What comes from the other rank before a call is kept until it is made; the least of several steps is that of one in
which nothing was.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.testing import run_ranks, run_threads, sync_world, world

COUNT = 1 << 20
SIZE = 2
WARM, MEASURED = 2, 10


class Peak:
    """Bytes that were in use at once beyond those at the beginning."""

    nbytes = 0


@contextmanager
def peak() -> Iterator[Peak]:
    found = Peak()
    tracemalloc.start(1)
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield found
        found.nbytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.asyncio
async def test_no_copy_out_of_place() -> None:
    async with world(SIZE, elastic=True) as comms:
        x = np.ones(COUNT)

        async def plainly(comm: Any) -> None:
            await comm.all_reduce(x, "g")

        async def steps(comm: Any) -> int:
            nbytes = []
            async with Elastic(comm, State(step=0)) as elastic:
                async for step in elastic.steps(ElasticSampler(WARM + MEASURED, 1, seed=None)):
                    if comm.rank == 0 and step.number >= WARM:
                        tracemalloc.start(1)
                    await comm.barrier("begun")
                    await comm.all_reduce(x, "g")
                    await comm.barrier("ended")
                    if comm.rank == 0 and step.number >= WARM:
                        nbytes.append(tracemalloc.get_traced_memory()[1])
                        tracemalloc.stop()
            return min(nbytes, default=0)

        for _ in range(WARM):
            await run_ranks(comms, plainly)
        bare = []
        for _ in range(MEASURED):
            with peak() as found:
                await run_ranks(comms, plainly)
            bare.append(found.nbytes)
        nbytes, _ = await run_ranks(comms, steps)
    assert min(bare) >= SIZE * x.nbytes  # the results themselves
    assert nbytes < min(bare) + x.nbytes // 4


def test_no_copy_out_of_place_in_a_blocking_call() -> None:
    with sync_world(SIZE, elastic=True) as comms:
        x = np.ones(COUNT)

        def steps(comm: Any) -> int:
            nbytes = []
            with Elastic(comm, State(step=0)) as elastic:
                for step in elastic.steps(ElasticSampler(WARM + MEASURED, 1, seed=None)):
                    if comm.rank == 0 and step.number >= WARM:
                        tracemalloc.start(1)
                    comm.barrier("begun")
                    comm.all_reduce(x, name="g")
                    comm.barrier("ended")
                    if comm.rank == 0 and step.number >= WARM:
                        nbytes.append(tracemalloc.get_traced_memory()[1])
                        tracemalloc.stop()
            return min(nbytes, default=0)

        for _ in range(WARM):
            run_threads(comms, lambda comm: comm.all_reduce(x, name="g"))
        bare = []
        for _ in range(MEASURED):
            with peak() as found:
                run_threads(comms, lambda comm: comm.all_reduce(x, name="g"))
            bare.append(found.nbytes)
        nbytes, _ = run_threads(comms, steps)
    assert min(bare) >= SIZE * x.nbytes
    assert nbytes < min(bare) + x.nbytes // 4
