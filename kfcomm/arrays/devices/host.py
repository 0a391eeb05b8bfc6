"""The host as a device: ordinary memory, where everything is done at once.

For arrays of the host in a group whose other ranks have theirs on devices. Streams and marks mean nothing here, since
whatever was asked for is done when the call returns; so ``notify`` calls back at once, on the thread that asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kfcomm.arrays.devices.base import Array, DeviceReport, Flat, Mark, Stream


class HostDevice:
    """Implements ``Device`` for flat NumPy arrays."""

    @property
    def report(self) -> DeviceReport:
        """See ``Device``: there is nothing to report."""
        return DeviceReport()

    @property
    def ordinal(self) -> int:
        """See ``Device``: there is one host."""
        return 0

    def stream(self, *, urgent: bool = False) -> Stream:
        """See ``Device``."""
        return None

    def mark(self, stream: Stream) -> Mark:
        """See ``Device``."""
        return None

    def wait(self, stream: Stream, mark: Mark) -> None:
        """See ``Device``: all that is before the mark is done."""

    def notify(self, stream: Stream, done: Callable[[BaseException | None], None]) -> None:
        """See ``Device``; called back at once, on this thread."""
        done(None)

    def empty(self, count: int, dtype: np.dtype[Any], stream: Stream) -> Flat:
        """See ``Device``."""
        return np.empty(count, dtype)

    def pinned(self, nbytes: int) -> Array:
        """See ``Device``: no memory needs to be pinned for a processor to reach it."""
        return np.empty(nbytes, np.uint8)

    def fetch(self, source: Flat, target: Array, stream: Stream) -> None:
        """See ``Device``."""
        self.copy(source, target, stream)

    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        """See ``Device``."""
        self.copy(source, target, stream)

    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        """See ``Device``."""
        target.view(np.uint8)[:] = source.view(np.uint8)

    def close(self) -> None:
        """See ``Device``."""


HOST = HostDevice()
"""The one there is."""
