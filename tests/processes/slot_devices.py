"""A fake device whose memory other processes map, as they do that of a GPU by CUDA IPC; and its ranks."""

from __future__ import annotations

import mmap
import os
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

import kfcomm
from kfcomm.arrays.devices import HANDLE_NBYTES, routes
from kfcomm.testing import FakeArray, FakeDevice
from kfcomm.testing.device_sharing import Exported, FakeSharing
from kfcomm.types import override

if TYPE_CHECKING:
    from tests.processes.actor import Actor


class MappedSharing(FakeSharing):
    """Exported memory in files, each mapped by its handle; a file lives as long as its owner has it open."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(device)
        self._files: dict[bytes, int] = {}

    @override
    def allocate(self, nbytes: int) -> tuple[bytes, FakeArray]:
        number = os.memfd_create(f"exported {secrets.token_hex(4)}")
        os.ftruncate(number, nbytes)
        handle = f"/proc/{os.getpid()}/fd/{number}".encode().ljust(HANDLE_NBYTES, b"\0")
        self._files[handle] = number
        self.own[handle] = made = self._array(number, nbytes)
        return handle, made

    @override
    def free(self, handle: bytes) -> None:
        del self.own[handle]
        os.close(self._files.pop(handle))

    @override
    def open(self, handle: bytes, nbytes: int) -> FakeArray:
        number = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        try:
            self.mapped[handle] = made = self._array(number, nbytes)
        finally:
            os.close(number)
        return made

    def _array(self, number: int, nbytes: int) -> FakeArray:
        memory = np.frombuffer(mmap.mmap(number, nbytes), np.uint8)
        return FakeArray(self._device, memory, Exported(memory, self._device.default_stream))


class MappedDevice(FakeDevice):
    """A fake of one device that all processes share."""

    def __init__(self) -> None:
        super().__init__(0, "one", backend="", exports=True)
        self._mapped = MappedSharing(self)

    @override
    def sharing(self) -> FakeSharing:
        return self._mapped


async def join(me: Actor, **settings: Any) -> str:
    """Join the world with such a device; the route."""
    device = me.kept["device"] = MappedDevice()
    before = routes.find
    routes.find = lambda choice, local_rank: (device, device.report)  # type: ignore[assignment]
    try:
        me.comm = await kfcomm.init(**settings)
    finally:
        routes.find = before
    choice = me.comm.route
    assert choice is not None
    return str(choice.route)


async def violations(me: Actor) -> list[str]:
    """Uses of memory that a real device might answer with wrong numbers."""
    return list(me.kept["device"].violations)
