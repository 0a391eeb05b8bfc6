"""Fakes for the tests of programs that use kfcomm: whole worlds in one process.

::

    async with kfcomm.testing.world(4) as comms:
        results = await asyncio.gather(*(comm.all_reduce(x) for comm in comms))

    with kfcomm.testing.sync_world(4) as comms:
        results = kfcomm.testing.run_threads(comms, lambda comm: comm.all_reduce(x))
"""

from kfcomm.testing.sync_world import SyncWorld, run_threads, sync_world
from kfcomm.testing.world import MemoryWorld, run_ranks, world

__all__ = ["MemoryWorld", "SyncWorld", "run_ranks", "run_threads", "sync_world", "world"]
