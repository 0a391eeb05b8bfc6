"""Exported memory of fake devices, which those of the same process map: see `kfcomm.arrays.devices.Sharing`.

Invariants: as between processes, the order between devices is known to hosts alone: a read counts as in order if the
host of the other device had been told of the end of what it did there before. Memory of a device that has *perished*
(``FakeDevice.perish``) must not be touched by work that is launched later; if it is, that is a violation.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kfcomm.arrays.devices import HANDLE_NBYTES, Array
from kfcomm.arrays.reduce import kernel
from kfcomm.errors import TransportError
from kfcomm.testing.device_arrays import FakeArray, Uses
from kfcomm.testing.streams import Allocation, FakeStream, learn, poison, work
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
            raise TransportError("there is no such exported memory")
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

    def fold(self, op: Op, sources: Sequence[FakeArray], target: FakeArray, stream: FakeStream) -> None:
        """Fold in the order of the sources, as ranks of one host do."""
        arrays, out = [one.memory for one in sources], target.memory
        folds = kernel(op, target.dtype)

        def run() -> None:
            acc = arrays[0]
            for one in arrays[1:-1]:
                acc, before = np.empty(len(acc), folds.accumulate_dtype), acc
                folds.fold(before, one, acc)
            if len(arrays) > 1:
                folds.last(acc, arrays[-1], out, len(arrays))
            else:
                out[:] = acc

        self._run(run, sources, [target], stream)

    def copy(self, pairs: Sequence[tuple[FakeArray, FakeArray]], stream: FakeStream) -> None:
        """Copy bytes."""
        memory = [(source.memory.view(np.uint8), target.memory.view(np.uint8)) for source, target in pairs]

        def run() -> None:
            for source, target in memory:
                target[:] = source

        self._run(run, [source for source, _ in pairs], [target for _, target in pairs], stream)

    def _run(
        self, run: Callable[[], None], reads: Sequence[FakeArray], writes: Sequence[FakeArray], stream: FakeStream
    ) -> None:
        for one in (*reads, *writes):
            if one.device is not self._device or one.ndim != 1:
                raise ValueError(f"{one!r} is not flat memory that {self._device} has mapped")
            if isinstance(one.allocation, Exported) and one.allocation.is_gone:
                self._device.violations.append(f"{stream} is given memory of a process that has died")
        uses = Uses(reads, writes)

        def item() -> None:
            uses.happen(stream)
            run()

        stream.add(work(item))
