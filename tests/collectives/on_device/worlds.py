"""Worlds in memory whose ranks have fake devices, and the look for what was left on those."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kfcomm.testing import FakeArray, FakeDevice, FakeFabric, MemoryWorld
from kfcomm.world.communicator import Communicator
from tests.conformance import worlds
from tests.conformance.worlds import ends, everywhere, until


class DeviceWorld:
    """A world, its devices by rank, and what joins them."""

    def __init__(self, comms: MemoryWorld, devices: list[FakeDevice], fabric: FakeFabric) -> None:
        self.comms = comms
        self.devices = devices
        self.fabric = fabric

    def array(self, comm: Communicator, values: Any) -> FakeArray:
        """An array on the device of a rank of the world."""
        return self.devices[comm.rank].array(np.asarray(values, np.float32))

    async def get(self, comm: Communicator, call: Awaitable[Any]) -> Any:
        """Result of a call in host memory, once the device has made it."""
        result = await call
        await comm.synchronize()
        return result.get() if isinstance(result, FakeArray) else result

    async def everywhere(self, call: Callable[[Communicator], Any]) -> list[Any]:
        """Results of ``call(comm)`` on every rank, in host memory."""
        return await everywhere(self.comms, lambda comm: self.get(comm, call(comm)))

    async def ends(self, call: Callable[[Communicator], Any]) -> list[Any]:
        """As `everywhere`, with errors in place of results."""
        return await ends(self.comms, lambda comm: self.get(comm, call(comm)))

    def uses_pinned_memory(self, comm: Communicator) -> bool:
        """Whether some pinned memory of a rank is in use."""
        slabs = comm._paths.pool_of(self.devices[comm.rank])._slabs
        return any(slab.memory.nbytes != sum(slab.holes.values()) for slab in slabs)

    async def works(self, name: str = "afterwards") -> None:
        """An all_reduce on the devices gives the sum."""
        size = len(self.comms)
        for result in await self.everywhere(lambda c: c.all_reduce(self.array(c, [c.rank, 1]), name)):
            assert result.tolist() == [size * (size - 1) / 2, size]


@asynccontextmanager
async def device_world(
    size: int, *, hosts: int = 1, backend: str = "fake", shared: bool = False, exports: bool = False,
    make: Any = FakeDevice, **options: Any,
) -> AsyncIterator[DeviceWorld]:  # fmt: skip
    """A world in which every rank has a device, of class ``make``; ``shared``: all have the same one."""
    fabric = FakeFabric()
    devices = [make(0, "one" if shared else None, backend=backend, exports=exports) for _ in range(size)]
    async with worlds.world(size, hosts=hosts, devices=devices, maker=fabric, **options) as comms:
        yield DeviceWorld(comms, devices, fabric)
    await until(lambda: not fabric.num_open)
    assert fabric.violations == []
    for device in devices:
        assert device.violations == []
        assert device.num_waiting == device.num_promised == 0
        assert not device.sharing().own
        assert not device.sharing().mapped
