"""Fakes for the tests of programs that use kfcomm: whole worlds in one process.

::

    async with kfcomm.testing.world(4) as comms:
        results = await asyncio.gather(*(comm.all_reduce(x) for comm in comms))
"""

from kfcomm.testing.world import MemoryWorld, run_ranks, world

__all__ = ["MemoryWorld", "run_ranks", "world"]
