"""Device memory over epochs: formations end with theirs, and others form in the next, on every route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import EpochChanged, KfcommError, PeerLost
from kfcomm.testing import FakeArray, FakeDevice, FakeFabric, world
from tests.collectives.on_device.worlds import DeviceWorld
from tests.conformance.worlds import everywhere, until

SIZE = 4
ROUTES: dict[str, dict[str, Any]] = {
    "backend": {},
    "shared": {"shared": True},
    "no backend": {"backend": ""},
    "hierarchy": {"hosts": 2},
    "links": {"device_transport": "tcp"},
}


@asynccontextmanager
async def mortal_world(*, backend: str = "fake", shared: bool = False, **options: Any) -> AsyncIterator[DeviceWorld]:
    """Ranks with devices, after some have died: survivors keep nothing of an earlier epoch."""
    fabric = FakeFabric()
    devices = [FakeDevice(0, "one" if shared else None, backend=backend) for _ in range(SIZE)]
    async with world(SIZE, devices=devices, maker=fabric, **options) as comms:
        yield DeviceWorld(comms, devices, fabric)
        dead = comms.dead
    await until(lambda: not fabric.num_open)
    assert fabric.violations == []
    for rank, device in enumerate(devices):
        assert device.violations == []
        if rank not in dead:
            assert device.num_waiting == device.num_promised == 0


async def sums(made: DeviceWorld, comms: list[Any]) -> None:
    """An all_reduce and an all_gather of device memory among these are right."""
    births = [birth(one) for one in comms]

    async def main(comm: Any) -> None:
        mine = made.devices[birth(comm)].array(np.array([birth(comm), 1.0], np.float32))
        total, gathered = await comm.all_reduce(mine, "total"), await comm.all_gather(mine, "all")
        await comm.synchronize()
        assert isinstance(total, FakeArray)
        assert total.get().tolist() == [sum(births), len(births)]
        assert gathered.get()[:, 0].tolist() == births

    await everywhere(comms, main)


def birth(comm: Any) -> int:
    found: int = comm.births[comm.rank]
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_survivors_continue(route: str) -> None:
    async with mortal_world(**ROUTES[route]) as made:
        comms = list(made.comms)
        await sums(made, comms)
        for dead in (2, 0):
            posted = [
                comm.all_reduce(made.devices[birth(comm)].array(np.ones(3, np.float32)), "never")
                for comm in comms
                if birth(comm) != dead
            ]
            made.comms.kill(dead)
            for one in posted:
                with pytest.raises((PeerLost, EpochChanged, KfcommError)):
                    await one
            comms = await asyncio.gather(*(comm.shrink() for comm in comms if birth(comm) != dead))
            await sums(made, comms)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_training_with_gradients_on_devices(route: str) -> None:
    """Calls with device arrays are not repeated: they fail, and the step runs again from its state."""
    async with mortal_world(elastic=True, **ROUTES[route]) as made:

        async def main(comm: Any) -> Any:
            me = birth(comm)
            state = State(used=np.zeros(24))
            async with Elastic(comm, state, on_loss="restart_step") as elastic:
                async for step in elastic.steps(ElasticSampler(24, 4)):
                    with step:
                        if me == 1 and step.number == 2:
                            made.comms.kill(1)
                        mask = np.zeros(24, np.float32)
                        mask[step.indices] = 1
                        total = await comm.all_reduce(made.devices[me].array(mask), "used")
                        await comm.synchronize()
                        state.used += total.get()
            return state.used.tolist(), comm.size

        ends = await asyncio.gather(*map(main, made.comms), return_exceptions=True)
        assert isinstance(ends[1], KfcommError)
        assert [ends[rank] for rank in (0, 2, 3)] == [([1.0] * 24, 3)] * 3
