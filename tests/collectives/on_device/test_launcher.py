"""Launches that wait for other ranks do not hold up the loop that sends the order of launches."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices import Device, Stream
from kfcomm.testing import FakeDevice, FakeFabric
from kfcomm.transports.base import CollectiveBackend, Launch, Part
from kfcomm.types import Op, Verb
from tests.collectives.on_device.worlds import DeviceWorld
from tests.conformance import worlds
from tests.conformance.worlds import everywhere


class Lazy:
    """Joins the ranks at the first launch of each verb, as NCCL may: it waits there until all have come."""

    def __init__(self, inner: CollectiveBackend, meetings: dict[Verb, threading.Barrier], threads: list[Any]) -> None:
        self._inner = inner
        self._meetings = meetings
        self._threads = threads
        self._joined: set[Verb] = set()

    def launch(self, verb: Verb, parts: Sequence[Part], op: Op | None, root: int, stream: Stream) -> None:
        self._threads.append(threading.current_thread())
        if verb not in self._joined:
            self._joined.add(verb)
            self._meetings[verb].wait(worlds.HANG_S)
        self._inner.launch(verb, parts, op, root, stream)

    def prepared(self, verb: Verb, _: Any, __: Any, op: Op | None, root: int) -> Launch:
        return lambda source, target, stream: self.launch(verb, [Part(source, target)], op, root, stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LazyFabric(FakeFabric):
    """Makes `Lazy` backends."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.meetings = {verb: threading.Barrier(size) for verb in Verb}
        self.threads: list[Any] = []

    def connect(self, identity: bytes, rank: int, size: int, device: Device) -> Any:
        return Lazy(super().connect(identity, rank, size, device), self.meetings, self.threads)


@pytest.mark.asyncio
async def test_a_launch_that_waits_for_the_others() -> None:
    fabric = LazyFabric(3)
    devices = [FakeDevice(0) for _ in range(3)]
    async with worlds.world(3, devices=devices, maker=fabric) as comms:
        world = DeviceWorld(comms, devices, fabric)

        async def step(comm: Any) -> None:
            handles = [comm.all_reduce(world.array(comm, [number]), f"k{number}") for number in range(4)]
            handles.append(comm.all_gather(world.array(comm, [comm.rank]), "g"))
            results = [await handle for handle in handles]
            await comm.synchronize()
            assert [result.get().tolist() for result in results[:4]] == [[3 * number] for number in range(4)]
            assert results[4].get().tolist() == [[0], [1], [2]]

        for _ in range(3):
            await everywhere(comms, step)
        on_loop = sum(thread is threading.main_thread() for thread in fabric.threads)
        assert 0 < on_loop < len(fabric.threads) == 3 * 3 * 5
    assert fabric.violations == []


@pytest.mark.asyncio
async def test_alone_nothing_waits() -> None:
    fabric = LazyFabric(1)
    device = FakeDevice(0)
    async with worlds.world(1, devices=[device], maker=fabric) as comms:
        result = await comms[0].all_reduce(device.array(np.ones(2)), "k")
        await comms[0].synchronize()
        assert result.get().tolist() == [1, 1]
        assert fabric.threads == [threading.main_thread()]


@pytest.mark.asyncio
async def test_a_launch_keeps_no_memory_once_its_call_is_over() -> None:
    fabric = LazyFabric(2)
    devices = [FakeDevice(0) for _ in range(2)]
    async with worlds.world(2, devices=devices, maker=fabric) as comms:
        await everywhere(comms, lambda c: c.all_reduce(devices[c.rank].array(np.ones(2)), "k"))
        await everywhere(comms, lambda c: c.synchronize())
        gc.collect()
        await worlds.until(lambda: [device.used_nbytes for device in devices] == [0, 0])
