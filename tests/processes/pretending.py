"""Roles of ranks that pretend to have a device: their report, and the route that results."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np

import kfcomm
from kfcomm.arrays.devices import DeviceReport, routes
from kfcomm.testing import FakeDevice
from kfcomm.transports import nccl
from tests.stubs import StubDevice

if TYPE_CHECKING:
    from tests.processes.actor import Actor


async def join(me: Actor, *, device: dict[str, Any] | None = None, **settings: Any) -> str | None:
    """Join the world with a stub of a device that reports ``device``, or without one; return the route."""
    report = DeviceReport(**(device or {"lack": "it pretends to have none"}))
    me.kept["device"] = found = StubDevice(report) if device else None
    before = routes.find, nccl.Nccl
    routes.find, nccl.Nccl = lambda choice, local_rank: (found, report), lambda: None  # type: ignore[assignment, misc]
    try:
        me.comm = await kfcomm.init(**settings)
    finally:
        routes.find, nccl.Nccl = before  # type: ignore[misc]
    return None if me.comm.route is None else str(me.comm.route)


async def closed(me: Actor) -> int:
    """How often the device has been closed."""
    return len(me.kept["device"].closed_by)


async def in_a_child(me: Actor) -> int:
    """How many devices the session of a forked child still has."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, bytes([me.comm._session.devices.device is not None]))
        os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    os.close(write)
    (count,) = os.read(read, 1)
    os.close(read)
    return count


async def blocking(me: Actor, *, count: int, **settings: Any) -> dict[str, list[float]]:
    """Join with the blocking API and a fake device, use it in every way, and leave; what came of it."""
    return await asyncio.to_thread(_blocking, count, settings)


async def slots_of(me: Actor, *, count: int, **settings: Any) -> int:
    """Join with the blocking API and a fake device, use a name some times, and leave; slots that were taken by then."""
    return await asyncio.to_thread(_slots_of, count, settings)


def _slots_of(count: int, settings: dict[str, Any]) -> int:
    device, world = _joined(settings)
    with world as comm:
        before = comm.statistics().slots
        for use in range(5):
            y = comm.all_reduce(device.array(np.full(count, comm.rank + use)), "k")
            assert (y.get() == 2 * use + 1).all()
        return int(comm.statistics().slots - before)


def _joined(settings: dict[str, Any]) -> tuple[FakeDevice, kfcomm.sync.Communicator]:
    device = FakeDevice(0, "one", backend="")
    before = routes.find
    routes.find = lambda choice, local_rank: (device, device.report)  # type: ignore[assignment]
    try:
        return device, kfcomm.sync.init(**settings)
    finally:
        routes.find = before


def _blocking(count: int, settings: dict[str, Any]) -> dict[str, list[float]]:
    device, world = _joined(settings)
    with world as comm:
        x = device.array(np.full(count, comm.rank + 1, np.float32))
        for step in range(3):
            comm.all_reduce(x, f"warm {step}")
        sent = comm.send_async(x[:2], 1, "message") if comm.rank == 0 else None
        found = {
            "sum": comm.all_reduce(x, "sum"),
            "many": comm.all_reduce_many({"many": x})["many"],
            "later": comm.all_reduce_async(x, "later").wait(),
            "joined": comm.all_gather(x[: comm.rank + 1], "joined", concat=True),
            "message": comm.recv(0, "message", out=device.array(np.zeros(2, np.float32))) if comm.rank == 1 else x[:2],
        }
        if sent is not None:
            sent.wait()
        comm.synchronize()
        assert not device.violations
        return {name: [float(array.get()[0]), float(array.get().sum())] for name, array in found.items()}
