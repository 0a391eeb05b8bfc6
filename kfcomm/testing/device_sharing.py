"""Exported memory of fake devices, which those of the same process map: see `kfcomm.arrays.devices.Sharing`.

Invariants: as between processes, the order between devices is known to hosts alone: a read counts as in order if the
host of the other device had been told of the end of what it did there before. Memory of a device that has *perished*
(``FakeDevice.perish``) must not be touched by work that is launched later; if it is, that is a violation.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kfcomm.arrays.devices import HANDLE_NBYTES, Array, CopyWork, FoldWork, Span
from kfcomm.arrays.reduce import kernel
from kfcomm.errors import TransportError
from kfcomm.testing.device_arrays import FakeArray
from kfcomm.testing.streams import Allocation, FakeMark, FakeStream, learn, poison
from kfcomm.types import Op, override

if TYPE_CHECKING:
    from kfcomm.testing.devices import FakeDevice

_EXPORTED: dict[bytes, FakeArray] = {}


class Exported(Allocation):
    """Memory that several devices touch."""

    is_gone = False  # its device has perished

    @override
    def touch(self, memory: Array, stream: FakeStream, *, writes: bool) -> str | None:
        for use in self._uses:
            if use.stream.device is not stream.device:
                learn(stream.known, use.stream.promises.told)
        return super().touch(memory, stream, writes=writes)


class FakeSharing:
    """Exported memory of one fake device. Implements ``Sharing``; folds are those of the host.

    Attributes:
        own: exported memory by handle.
        mapped: memory of others that is mapped, by handle.
    """

    def __init__(self, device: FakeDevice) -> None:
        self.own: dict[bytes, FakeArray] = {}
        self.mapped: dict[bytes, FakeArray] = {}
        self._device = device

    @property
    def nbytes(self) -> int:
        """Exported bytes."""
        return sum(one.nbytes for one in self.own.values())

    def allocate(self, nbytes: int) -> tuple[bytes, FakeArray]:
        """New exported memory; poisoned."""
        self._device.take("exported memory", nbytes)
        memory = np.empty(nbytes, np.uint8)
        poison(memory)
        handle = secrets.token_bytes(HANDLE_NBYTES)
        made = FakeArray(self._device, memory, Exported(memory, self._device.default_stream))
        _EXPORTED[handle] = self.own[handle] = made
        return handle, made

    def free(self, handle: bytes) -> None:
        """Forget it; where it is mapped it stays."""
        del self.own[handle]
        _EXPORTED.pop(handle, None)

    def open(self, handle: bytes, nbytes: int) -> FakeArray:
        """Memory of another device, as this one sees it."""
        found = _EXPORTED.get(handle)
        if found is None or found.nbytes != nbytes:
            given = f"handle {handle.hex()} with {nbytes} bytes"
            raise TransportError(f"{given} is not exported by a fake device: give the handle and size of an export")
        self.mapped[handle] = found
        return FakeArray(self._device, found.memory, found.allocation)

    def close(self, handle: bytes) -> None:
        """Forget it."""
        self.mapped.pop(handle, None)

    def perish(self) -> None:
        """Mark all exported memory as that of a process that has died."""
        for one in self.own.values():
            if isinstance(one.allocation, Exported):
                one.allocation.is_gone = True

    def run(
        self, folds: Sequence[FoldWork], copies: Sequence[CopyWork], stream: FakeStream, after: FakeMark | None = None
    ) -> FakeMark:
        """Put each fold and each copy on the stream."""
        device = self._device
        if after is not None:
            device.wait(stream, after)
        for op, dtype, sources, target, count in folds:
            nbytes = count * dtype.itemsize
            reads, written = [self._seen(one, nbytes) for one in sources], self._seen(target, nbytes)
            arrays = [one.memory.view(dtype) for one in reads]
            device.run(stream, partial(_fold, op, arrays, written.memory.view(dtype)), reads=reads, writes=[written])
        for source, target, nbytes in copies:
            read, written = self._seen(source, nbytes), self._seen(target, nbytes)
            device.run(stream, partial(np.copyto, written.memory, read.memory), reads=[read], writes=[written])
        return device.mark(stream)

    def _seen(self, span: Span, nbytes: int) -> FakeArray:
        """The bytes of a place."""
        memory: FakeArray = span.memory
        if memory.device is not self._device or memory.ndim != 1:
            raise ValueError(f"{memory!r} is not flat memory that {self._device} has mapped")
        if isinstance(memory.allocation, Exported) and memory.allocation.is_gone:
            self._device.violations.append("work is launched on memory of a process that has died")
        found = memory.view(np.uint8)[span.offset : span.offset + nbytes]
        if found.nbytes != nbytes:
            raise ValueError(f"{nbytes} bytes from {span.offset} on are not in {memory!r}")
        return found


def _fold(op: Op, sources: Sequence[Array], target: Array) -> None:
    """Fold in the order of the sources, as ranks of one host do."""
    folds, acc = kernel(op, target.dtype), sources[0]
    for one in sources[1:-1]:
        acc, before = np.empty(len(acc), folds.accumulate_dtype), acc
        folds.fold(before, one, acc)
    folds.last(acc, sources[-1], target, len(sources))
