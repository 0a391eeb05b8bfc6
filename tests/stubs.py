"""Devices that only say what they are, and arrays that do not even do that."""

from __future__ import annotations

import threading
from typing import Any

from kfcomm.arrays.devices import DeviceReport


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


class Broken(Exception):
    """Error of a `broken` array: nothing that kfcomm knows."""


def broken(where: str) -> Any:
    """An array whose library fails in its own way: when this attribute of it is asked for, or any (``*``)."""

    class Array:
        def __getattr__(self, name: str) -> Any:
            if where in (name, "*"):
                raise Broken("the device is on fire")
            raise AttributeError(name)

    if where == "__array__":  # NumPy asks the type
        Array.__array__ = lambda self, *_, **__: self.__getattr__(where)
    return Array()
