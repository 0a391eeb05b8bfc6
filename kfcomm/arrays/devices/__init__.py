"""Interface of an accelerator: memory, streams of work on it, and copies from and to the host.

A *stream* is a queue of work of one device, done in order; a *mark* is a place in one. *Flat* memory is a
one-dimensional, contiguous array of the device's own library, whose slices are views.

Invariants: no method waits for the device on the calling thread, except ``close``. The caller keeps memory alive
until the work on it is done.

Implemented by `kfcomm.arrays.devices.cuda` over CuPy, and in host memory by `kfcomm.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from kfcomm.types import Op

__all__ = [
    "CopyWork",
    "Device",
    "DeviceReport",
    "Flat",
    "FoldWork",
    "Mark",
    "Sharing",
    "SharingDevice",
    "Span",
    "Stream",
]


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Stream: TypeAlias = Any
Mark: TypeAlias = Any
Flat: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Description of a rank's device for the other ranks, sent at join; empty fields mean no device."""

    kind: str = ""  # ``cuda``; empty without a device
    uuid: str = ""  # of the physical device; equal for two ranks exactly if they share it
    model: str = ""  # for messages
    driver: int = 0  # version of the driver, as CUDA counts: 12040 is 12.4
    backend: str = ""  # that runs whole collectives on it: ``nccl``; empty without one
    backend_version: int = 0  # as the backend counts: 22803 is NCCL 2.28.3
    lack: str = ""  # the reason why device or backend is missing, and a remedy; empty with both
    shares: int = 0  # 1 if the backend takes several ranks on this device
    exports: int = 0  # 1 if it is a `SharingDevice`, whose memory other processes of its host may map


class Device(Protocol):
    """The device of one rank."""

    @property
    def report(self) -> DeviceReport:
        """The description for the other ranks."""
        ...

    @property
    def ordinal(self) -> int:
        """Its number in this process, as its library counts; arrays on other devices are refused."""
        ...

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream, without implicit waits for other streams."""
        ...

    def mark(self, stream: Stream) -> Mark:
        """The place after all work that is on the stream now."""
        ...

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Make later work on the stream begin after the mark, which may be of another stream."""

    def passed(self, mark: Mark) -> bool:
        """Whether its stream has passed a mark. Costs a few microseconds.

        Raises:
            Exception: the stream has failed before it; which kind depends on the device.
        """
        ...

    def is_capturing(self, stream: Stream) -> bool:
        """Whether what is put on the stream now goes into a graph instead."""
        ...

    def notify(self, stream: Stream, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done``, on a thread of the device, once all work that is on the stream now is done, or has failed.

        Calls for one stream come in order. ``done`` must return soon, and must not raise.
        """

    def empty(self, count: int, dtype: np.dtype[Any], stream: Stream) -> Flat:
        """New memory, to be used on this stream, or after a mark on it.

        Raises:
            MemoryError: the device has too little.
        """
        ...

    def pinned(self, nbytes: int) -> Array:
        """New pinned host memory, as bytes, which the device reads and writes by itself.

        Raises:
            MemoryError: the host has too little.
        """
        ...

    def fetch(self, source: Flat, target: Array, stream: Stream) -> None:
        """Copy from the device to the host: both flat, of the same number of bytes."""

    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        """Copy from the host to the device: both flat, of the same number of bytes."""

    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        """Copy on the device: both flat, of the same number of bytes."""

    def close(self) -> None:
        """Wait for pending calls of ``notify``, and end the device's threads. May be called again."""


HANDLE_NBYTES: Final = 64
"""Length of a handle of exported memory, as CUDA has it."""


class Span(NamedTuple):
    """A place in memory of a device."""

    memory: Flat
    offset: int  # in bytes


class FoldWork(NamedTuple):
    """Fold of elements at several places, in their order, with the bits of `kfcomm.arrays.reduce`."""

    op: Op
    dtype: np.dtype[Any]
    sources: Sequence[Span]
    target: Span  # may be one of the sources
    num_elements: int


class CopyWork(NamedTuple):
    """Copy of bytes."""

    source: Span
    target: Span
    nbytes: int


class Sharing(Protocol):
    """Memory of a device that the processes of one host map, and work on memory of several of them.

    Work runs on the caller's own device. Nothing of it waits for another process.
    """

    def allocate(self, nbytes: int) -> tuple[bytes, Flat]:
        """New exported memory, and its handle of `HANDLE_NBYTES`; other processes map it by that.

        It lives until ``free``, even if it is not referenced any more.

        Raises:
            MemoryError: the device has too little.
        """
        ...

    def free(self, handle: bytes) -> None:
        """Give exported memory back, once the present work of this process is done. Does not wait for that."""

    def open(self, handle: bytes, nbytes: int) -> Flat:
        """The memory that another process has exported; it stays mapped until ``close``.

        Raises:
            TransportError: it cannot be mapped.
        """
        ...

    def close(self, handle: bytes) -> None:
        """Unmap such memory, once the present work of this process is done. Does not wait for that."""

    def run(
        self, folds: Sequence[FoldWork], copies: Sequence[CopyWork], stream: Stream, after: Mark | None = None
    ) -> Mark:
        """Put work on a stream of this device; return the mark behind it.

        Args:
            folds: to be put there first.
            copies: in as few pieces of work as possible: each may cost a time slice where processes share the device.
            stream: made by this device.
            after: the work begins behind this mark.

        Raises:
            ConfigError: a kernel cannot be compiled here.
            TransportError: the device has failed.
        """
        ...


class SharingDevice(Device, Protocol):
    """Device whose memory other processes of its host may map."""

    def sharing(self) -> Sharing:
        """Its exported memory, and that of others.

        Raises:
            ConfigError, TransportError: this process cannot share it; says why.
        """
        ...
