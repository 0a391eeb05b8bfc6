"""Fakes for the tests of programs that use kfcomm: whole worlds in one process.

::

    async with kfcomm.testing.world(4) as comms:
        results = await asyncio.gather(*(comm.all_reduce(x) for comm in comms))

    with kfcomm.testing.sync_world(4) as comms:
        results = kfcomm.testing.run_threads(comms, lambda comm: comm.all_reduce(x))

Worlds in virtual time, in which each event follows from a seed: see `run_in_virtual_time`.

Devices and their collectives in host memory, for tests of programs for GPUs on machines without one: see
`FakeDevice` and `FakeFabric`.
"""

from typing import TYPE_CHECKING

from kfcomm.common.imports import imported_when_used

if TYPE_CHECKING:
    from kfcomm.testing.backends import FakeBackend, FakeFabric
    from kfcomm.testing.device_arrays import FakeArray
    from kfcomm.testing.devices import FakeDevice
    from kfcomm.testing.directed import AwaitedProcesses, BlockingProcesses, TaskWorld, ThreadWorld
    from kfcomm.testing.faults import Fault, FaultPlan, Killed
    from kfcomm.testing.streams import FakeMark, FakeStream
    from kfcomm.testing.virtual.events import (
        Delay,
        Join,
        Kill,
        LostStore,
        Partition,
        Release,
        Resize,
        SlowLink,
        Stop,
        random_events,
    )
    from kfcomm.testing.virtual.network import Stuck
    from kfcomm.testing.virtual.run import VirtualRun, run_in_virtual_time, search_in_virtual_time
    from kfcomm.testing.worlds import MemoryWorld, SyncWorld, run_ranks, run_threads, sync_world, world
else:  # the pytest plugin is imported by every run of pytest
    _HOMES = {
        "backends": ("FakeBackend", "FakeFabric"),
        "device_arrays": ("FakeArray",),
        "devices": ("FakeDevice",),
        "directed": ("AwaitedProcesses", "BlockingProcesses", "TaskWorld", "ThreadWorld"),
        "faults": ("Fault", "FaultPlan", "Killed"),
        "streams": ("FakeMark", "FakeStream"),
        "virtual.events": (
            "Delay",
            "Join",
            "Kill",
            "LostStore",
            "Partition",
            "Release",
            "Resize",
            "SlowLink",
            "Stop",
            "random_events",
        ),
        "virtual.network": ("Stuck",),
        "virtual.run": ("VirtualRun", "run_in_virtual_time", "search_in_virtual_time"),
        "worlds": ("MemoryWorld", "SyncWorld", "run_ranks", "run_threads", "sync_world", "world"),
    }
    __getattr__ = imported_when_used(
        __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
    )

__all__ = [
    "AwaitedProcesses",
    "BlockingProcesses",
    "Delay",
    "FakeArray",
    "FakeBackend",
    "FakeDevice",
    "FakeFabric",
    "FakeMark",
    "FakeStream",
    "Fault",
    "FaultPlan",
    "Join",
    "Kill",
    "Killed",
    "LostStore",
    "MemoryWorld",
    "Partition",
    "Release",
    "Resize",
    "SlowLink",
    "Stop",
    "Stuck",
    "SyncWorld",
    "TaskWorld",
    "ThreadWorld",
    "VirtualRun",
    "random_events",
    "run_in_virtual_time",
    "run_ranks",
    "run_threads",
    "search_in_virtual_time",
    "sync_world",
    "world",
]
