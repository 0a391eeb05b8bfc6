"""Fakes for the tests of programs that use kfcomm: whole worlds in one process.

::

    async with kfcomm.testing.world(4) as comms:
        results = await asyncio.gather(*(comm.all_reduce(x) for comm in comms))

    with kfcomm.testing.sync_world(4) as comms:
        results = kfcomm.testing.run_threads(comms, lambda comm: comm.all_reduce(x))

Devices and their collectives in host memory, for tests of what is done with arrays on a GPU where there is none: see
`FakeDevice` and `FakeFabric`.
"""

from kfcomm.testing.backends import FakeBackend, FakeFabric
from kfcomm.testing.device_arrays import FakeArray
from kfcomm.testing.devices import FakeDevice
from kfcomm.testing.streams import FakeMark, FakeStream
from kfcomm.testing.sync_world import SyncWorld, run_threads, sync_world
from kfcomm.testing.world import MemoryWorld, run_ranks, world

__all__ = [
    "FakeArray",
    "FakeBackend",
    "FakeDevice",
    "FakeFabric",
    "FakeMark",
    "FakeStream",
    "MemoryWorld",
    "SyncWorld",
    "run_ranks",
    "run_threads",
    "sync_world",
    "world",
]
