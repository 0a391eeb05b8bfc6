"""Host memory behind the interface of a device, where all work is done at once.

For arrays of the host in a group whose other ranks have theirs on devices. Streams and marks are None, since all work
is done when its call returns; ``notify`` calls back at once, on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kfcomm.arrays.devices.base import Array, Device, DeviceReport, Flat, Mark, Stream
from kfcomm.types import override


class HostDevice(Device):
    """Device of flat NumPy arrays."""

    @property
    @override
    def report(self) -> DeviceReport:
        return DeviceReport()

    @property
    @override
    def ordinal(self) -> int:
        return 0

    @override
    def stream(self, *, urgent: bool = False) -> Stream:
        return None

    @override
    def mark(self, stream: Stream) -> Mark:
        return None

    @override
    def wait(self, stream: Stream, mark: Mark) -> None:
        pass

    @override
    def notify(self, stream: Stream, done: Callable[[BaseException | None], None]) -> None:
        done(None)

    @override
    def empty(self, count: int, dtype: np.dtype[Any], stream: Stream) -> Flat:
        return np.empty(count, dtype)

    @override
    def pinned(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    @override
    def fetch(self, source: Flat, target: Array, stream: Stream) -> None:
        self.copy(source, target, stream)

    @override
    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        self.copy(source, target, stream)

    @override
    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        target.view(np.uint8)[:] = source.view(np.uint8)

    @override
    def close(self) -> None:
        pass


HOST = HostDevice()
"""The only instance."""
