"""Devices that only say what they are, for tests of what is told of them."""

from __future__ import annotations

import threading

from kfcomm.devices import DeviceReport


class StubDevice:
    """A device on which nothing can be done.

    Attributes:
        closed_by: the threads that have closed it.
    """

    ordinal = 0

    def __init__(self, report: DeviceReport) -> None:
        self.report = report
        self.closed_by: list[threading.Thread] = []

    def close(self) -> None:
        self.closed_by.append(threading.current_thread())


def stub(number: int, *, version: int = 23207, backend: str = "nccl", driver: int = 13010) -> StubDevice:
    """The device with this number, of several alike."""
    return StubDevice(DeviceReport("cuda", f"GPU-{number}", "a model", driver, backend, version))
