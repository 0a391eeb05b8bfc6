"""Memory of a CUDA device that processes of one host map (CUDA IPC), and work on memory of several of them.

Invariants: exported memory is allocated by ``cudaMalloc`` itself, 2 MiB at least: the driver puts several smaller
allocations into one, and a handle is one of the whole. No call waits for the device on the calling thread: memory is
freed and unmapped by a watcher, after the work that was on the device's streams before. An error of CUDA becomes a
`TransportError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Final

from kfcomm.arrays.devices import CopyWork, FoldWork, Mark, Stream
from kfcomm.arrays.devices.cuda import Watcher, load_cupy, working_on
from kfcomm.arrays.devices.kernels import Kernels
from kfcomm.errors import TransportError

GRAIN_NBYTES: Final = 2 << 20


class CudaMemory:
    """Exported or mapped memory, as long as an array's ``data`` is looked at."""

    __slots__ = ("nbytes", "ptr")

    def __init__(self, address: int, nbytes: int) -> None:
        self.ptr = address
        self.nbytes = nbytes

    @property
    def data(self) -> CudaMemory:
        """Its address, as an array of CuPy has it."""
        return self


class CudaSharing:
    """Exported memory of this process on one device, and that of others which it has mapped. Implements ``Sharing``."""

    def __init__(self, ordinal: int) -> None:
        cupy = load_cupy()
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._errors = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
        self._ordinal = ordinal
        self._kernels = Kernels(cupy)
        self._own: dict[bytes, Any] = {}
        self._mapped: dict[bytes, tuple[int, int]] = {}  # address, and how often it was opened
        self._lock = Lock()
        self._sweeper = Watcher(f"kfcomm-cuda-{ordinal}-unmap")
        with working_on(ordinal):
            self._kernels.prepare()

    def allocate(self, nbytes: int) -> tuple[bytes, CudaMemory]:
        """New exported memory, from the driver and not from CuPy's pool."""
        room = -(-max(nbytes, 1) // GRAIN_NBYTES) * GRAIN_NBYTES
        try:
            with working_on(self._ordinal):
                memory = self._cuda.Memory(room)
                handle = bytes(self._runtime.ipcGetMemHandle(memory.ptr))
        except (self._cuda.memory.OutOfMemoryError, TransportError) as error:
            raise MemoryError(f"cuda:{self._ordinal} has no {room} bytes to be exported: {error}") from error
        self._own[handle] = memory
        return handle, CudaMemory(memory.ptr, nbytes)

    def free(self, handle: bytes) -> None:
        """Free it on a thread, after the work of this process: that waits for the whole device."""
        memory = self._own.pop(handle, None)
        if memory is not None:
            kept = [memory]
            del memory
            self._sweep(kept.clear)

    def open(self, handle: bytes, nbytes: int) -> CudaMemory:
        """Memory of another process, mapped once however often it is opened."""
        with self._lock:
            address, uses = self._mapped.get(handle, (0, 0))
            if not uses:
                with working_on(self._ordinal):
                    address = self._runtime.ipcOpenMemHandle(handle)
            self._mapped[handle] = address, uses + 1
        return CudaMemory(address, nbytes)

    def close(self, handle: bytes) -> None:
        """Unmap it on a thread, after the work of this process."""
        with self._lock:
            address, uses = self._mapped.pop(handle, (0, 0))
            if uses > 1:
                self._mapped[handle] = address, uses - 1
            elif uses:
                self._sweep(partial(self._runtime.ipcCloseMemHandle, address))

    def run(
        self, folds: Sequence[FoldWork], copies: Sequence[CopyWork], stream: Stream, after: Mark | None = None
    ) -> Mark:
        """One kernel for each fold, and one for all copies, or the driver's if there is one copy."""
        if self._runtime.getDevice() != self._ordinal:
            with working_on(self._ordinal):
                return self.run(folds, copies, stream, after)
        try:
            return self._run(folds, copies, stream.ptr, after)
        except self._errors as error:
            raise TransportError(f"cuda:{self._ordinal}: {error}") from error

    def _run(self, folds: Sequence[FoldWork], copies: Sequence[CopyWork], stream: int, after: Mark | None) -> Mark:
        runtime = self._runtime
        mark = self._cuda.Event(disable_timing=True)  # also makes the device's context that of the thread
        if after is not None:
            runtime.streamWaitEvent(stream, after.ptr, 0)
        for op, dtype, sources, target, count in folds:
            addresses = [memory.data.ptr + offset for memory, offset in sources]
            self._kernels.fold(op, dtype, addresses, target.memory.data.ptr + target.offset, count, stream)
        pairs = [
            (source.memory.data.ptr + source.offset, target.memory.data.ptr + target.offset, nbytes)
            for source, target, nbytes in copies
            if nbytes
        ]
        if len(pairs) > 1:
            self._kernels.copy(pairs, stream)
        elif pairs:
            ((source, target, nbytes),) = pairs
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)
        runtime.eventRecord(mark.ptr, stream)
        return mark

    def end(self) -> None:
        """End the thread, after what it has to do."""
        self._sweeper.close()

    def _sweep(self, act: Callable[[], object]) -> None:
        def swept() -> None:
            with working_on(self._ordinal):
                self._runtime.deviceSynchronize()
                act()

        with suppress(TransportError):  # the device is closed: the process ends, or has no use for the memory
            self._sweeper.promise(swept, _ignored)


def _ignored(_: BaseException | None) -> None:
    """An error of the device: nothing on it can be used or freed any more."""
