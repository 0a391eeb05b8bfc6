"""What an accelerator is to the runtime: memory, streams of work on it, and copies from and to the host.

A *stream* is a queue of work of one device, done in order; a *mark* is a place in one. *Flat* memory is a
one-dimensional, contiguous array of the device's own library, of which slices are views.

Invariants: nothing here waits for the device on the thread that calls, except ``close``. Work is done with
memory that the caller keeps alive until it is done.

Implemented by `kfcomm.arrays.devices.cuda` over CuPy, and in host memory by `kfcomm.testing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Stream: TypeAlias = Any
Mark: TypeAlias = Any
Flat: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a rank tells the others of its device when it joins; all fields empty or 0 where it has none.

    Attributes:
        kind: ``cuda``; empty without a device.
        uuid: of the physical device: the same for two ranks exactly if they share it.
        model: for messages.
        driver: version of the driver, as CUDA counts: 12040 is 12.4.
        backend: what runs whole collectives on it: ``nccl``; empty if nothing does.
        backend_version: as the backend counts: 22803 is NCCL 2.28.3.
        lack: why there is no device, or no backend, and what would help; empty if there is both.
    """

    kind: str = ""
    uuid: str = ""
    model: str = ""
    driver: int = 0
    backend: str = ""
    backend_version: int = 0
    lack: str = ""


class Device(Protocol):
    """The device of one rank."""

    @property
    def report(self) -> DeviceReport:
        """What the other ranks are told."""
        ...

    @property
    def ordinal(self) -> int:
        """Its number in this process, as its library counts; arrays on another one are refused."""
        ...

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream, which waits for no other by itself."""
        ...

    def mark(self, stream: Stream) -> Mark:
        """The place behind all work that is on the stream by now."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """What is put on the stream from now on begins after the mark, which may be of another stream."""

    def notify(self, stream: Stream, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done``, on a thread of the device, once all work that is on the stream by now is done, or has failed.

        Calls for one stream come in order. ``done`` must return soon, and must not raise.
        """

    def empty(self, count: int, dtype: np.dtype[Any], stream: Stream) -> Flat:
        """New memory, to be used on this stream, or after a mark on it.

        Raises:
            MemoryError: the device has not so much.
        """
        ...

    def pinned(self, nbytes: int) -> Array:
        """New memory of the host, as bytes, that the device reads and writes without the help of a processor.

        Raises:
            MemoryError: there is not so much.
        """
        ...

    def fetch(self, source: Flat, target: Array, stream: Stream) -> None:
        """Copy from the device to the host: both flat, of the same number of bytes."""

    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        """Copy from the host to the device: both flat, of the same number of bytes."""

    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        """Copy on the device: both flat, of the same number of bytes."""

    def close(self) -> None:
        """Wait for what was promised to ``notify``, and end the device's threads. May be called again."""
