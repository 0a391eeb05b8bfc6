"""Roles of ranks that pretend to have a device: what they tell of it, and what they are told."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import kfcomm
from kfcomm.devices import DeviceReport, cuda
from kfcomm.transports import nccl
from tests.stubs import StubDevice

if TYPE_CHECKING:
    from tests.processes.actor import Actor


async def join(me: Actor, *, device: dict[str, Any] | None = None, **settings: Any) -> str | None:
    """Join the world with a device of which this is known, or none; the route."""
    report = DeviceReport(**(device or {"lack": "it pretends to have none"}))
    me.kept["device"] = found = StubDevice(report) if device else None
    before = cuda.find, nccl.Nccl
    cuda.find, nccl.Nccl = lambda choice, local_rank: (found, report), lambda: None  # type: ignore[assignment, misc]
    try:
        me.comm = await kfcomm.init(**settings)
    finally:
        cuda.find, nccl.Nccl = before  # type: ignore[misc]
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
