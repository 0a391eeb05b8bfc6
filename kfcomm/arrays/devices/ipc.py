"""Memory of a CUDA device that processes of one host map (CUDA IPC), and work on memory of several of them.

Invariants: exported memory is allocated by ``cudaMalloc`` itself, 2 MiB at least: the driver puts several smaller
allocations into one, and a handle is one of the whole. No call waits for the device on the calling thread: memory is
freed and unmapped by a watcher, after the work that was on the device's streams before. An error of CUDA becomes a
`TransportError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, Final

import numpy as np

from kfcomm.arrays.devices import Flat, Stream
from kfcomm.arrays.devices.cuda import Watcher, as_stream, load_cupy, working_on
from kfcomm.arrays.devices.kernels import Kernels
from kfcomm.errors import TransportError
from kfcomm.types import Op

GRAIN_NBYTES: Final = 2 << 20


class CudaSharing:
    """Exported memory of this process on one device, and that of others which it has mapped. Implements ``Sharing``."""

    def __init__(self, ordinal: int) -> None:
        self._cupy = load_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._ordinal = ordinal
        self._kernels = Kernels(self._cupy)
        self._own: dict[bytes, Any] = {}
        self._mapped: dict[bytes, tuple[int, int]] = {}  # address, and how often it was opened
        self._lock = Lock()
        self._sweeper = Watcher(f"kfcomm-cuda-{ordinal}-unmap")
        with working_on(ordinal):
            self._kernels.copy(())
            self._kernels.prepare()

    def allocate(self, nbytes: int) -> tuple[bytes, Flat]:
        """New exported memory, from the driver and not from CuPy's pool."""
        room = -(-max(nbytes, 1) // GRAIN_NBYTES) * GRAIN_NBYTES
        try:
            with working_on(self._ordinal):
                memory = self._cupy.cuda.Memory(room)
                handle = bytes(self._runtime.ipcGetMemHandle(memory.ptr))
        except (self._cupy.cuda.memory.OutOfMemoryError, TransportError) as error:
            raise MemoryError(f"cuda:{self._ordinal} has no {room} bytes to be exported: {error}") from error
        self._own[handle] = memory
        return handle, self._bytes(memory.ptr, nbytes)

    def free(self, handle: bytes) -> None:
        """Free it on a thread, after the work of this process: that waits for the whole device."""
        memory = self._own.pop(handle, None)
        if memory is not None:
            kept = [memory]
            del memory
            self._sweep(kept.clear)

    def open(self, handle: bytes, nbytes: int) -> Flat:
        """Memory of another process, mapped once however often it is opened."""
        with self._lock:
            address, uses = self._mapped.get(handle, (0, 0))
            if not uses:
                with working_on(self._ordinal):
                    address = self._runtime.ipcOpenMemHandle(handle)
            self._mapped[handle] = address, uses + 1
        return self._bytes(address, nbytes)

    def close(self, handle: bytes) -> None:
        """Unmap it on a thread, after the work of this process."""
        with self._lock:
            address, uses = self._mapped.pop(handle, (0, 0))
            if uses > 1:
                self._mapped[handle] = address, uses - 1
            elif uses:
                self._sweep(partial(self._runtime.ipcCloseMemHandle, address))

    def fold(self, op: Op, sources: Sequence[Flat], target: Flat, stream: Stream) -> None:
        """Fold by one kernel."""
        if target.size:
            with working_on(self._ordinal, as_stream(stream)):
                addresses = [source.data.ptr for source in sources]
                self._kernels.fold(op, target.dtype, addresses, target.data.ptr, target.size)

    def copy(self, pairs: Sequence[tuple[Flat, Flat]], stream: Stream) -> None:
        """Copy by one kernel, or one copy of the driver if there is one pair."""
        todo = [(source.data.ptr, target.data.ptr, target.nbytes) for source, target in pairs if target.nbytes]
        if not todo:
            return
        with working_on(self._ordinal, as_stream(stream)):
            if len(todo) > 1:
                self._kernels.copy(todo)
                return
            ((source, target, nbytes),) = todo
            self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDeviceToDevice, as_stream(stream).ptr)

    def end(self) -> None:
        """End the thread, after what it has to do."""
        self._sweeper.close()

    def _sweep(self, act: Callable[[], object]) -> None:
        def swept() -> None:
            with working_on(self._ordinal):
                self._runtime.deviceSynchronize()
                act()

        self._sweeper.promise(swept, _ignored)

    def _bytes(self, address: int, nbytes: int) -> Flat:
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, self, self._ordinal)
        return self._cupy.ndarray((nbytes,), np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))


def _ignored(_: BaseException | None) -> None:
    """An error of the device: nothing on it can be used or freed any more."""
