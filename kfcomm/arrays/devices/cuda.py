"""CUDA devices through CuPy: memory, streams, copies and notifications. `lookup` finds them.

Streams are CuPy's; those of callers come through ``cuda_calls.as_stream``. Marks are CuPy's events, without timing.
Flat memory is CuPy's arrays of one dimension.

Invariants: CuPy is imported when a device is made, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Final

import numpy as np

from kfcomm.arrays.devices.base import Array, DeviceReport, Flat, Mark, Stream
from kfcomm.arrays.devices.cuda_calls import INSTALL, as_stream, cuda_errors, load_cupy, working_on
from kfcomm.arrays.devices.watcher import Watcher
from kfcomm.errors import TransportError

_URGENT: Final = -100  # CUDA takes the nearest priority that it has


def nccl_version() -> int:
    """The version of NCCL that CuPy finds, as NCCL counts: 22803 is 2.28.3; 0 if it finds none."""
    load_cupy()
    try:
        from cupy.cuda import nccl

        return int(nccl.get_version()) if nccl.available else 0
    except (ImportError, RuntimeError, OSError):  # CuPy's error depends on the step that fails
        return 0


class CudaDevice:
    """One CUDA device of this process.

    Args:
        ordinal: as CUDA counts the devices that this process sees.

    Raises:
        ConfigError: CuPy is missing.
        TransportError: CUDA refuses: no such device, or it is broken or taken.
    """

    def __init__(self, ordinal: int) -> None:
        self._cupy = load_cupy()
        self._ordinal = ordinal
        self._lock = Lock()
        self._watchers: dict[int, Watcher] = {}
        self._is_closed = False
        self._report = self._look()

    @property
    def report(self) -> DeviceReport:
        """The description for the other ranks."""
        return self._report

    @property
    def ordinal(self) -> int:
        """Its number, as CUDA counts the devices that this process sees."""
        return self._ordinal

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream, without implicit waits for other streams, the default stream included."""
        with working_on(self._ordinal):
            return self._cupy.cuda.Stream(non_blocking=True, priority=_URGENT if urgent else None)

    def mark(self, stream: Stream) -> Mark:
        """The place after all work that is on the stream now."""
        with working_on(self._ordinal):
            return as_stream(stream).record(self._cupy.cuda.Event(disable_timing=True))

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Make later work on the stream begin after the mark."""
        with working_on(self._ordinal):
            as_stream(stream).wait_event(mark)

    def notify(self, stream: Stream, done: Callable[[BaseException | None], None]) -> None:
        """Call ``done``, on the thread that watches this stream, once all work that is on it now is done.

        That thread sleeps in the driver until then, without polling.
        """
        with working_on(self._ordinal):
            # ``block=True``: `synchronize` sleeps in the driver, where it would else spin on a core.
            event = as_stream(stream).record(self._cupy.cuda.Event(block=True, disable_timing=True))

        def wait() -> None:
            with working_on(self._ordinal):
                event.synchronize()

        self._watcher(as_stream(stream).ptr).promise(wait, done)

    def empty(self, count: int, dtype: np.dtype[Any], stream: Stream) -> Flat:
        """New memory of CuPy's pool, which reuses freed memory in the order of this stream."""
        with working_on(self._ordinal, as_stream(stream)):
            try:
                return self._cupy.empty(count, dtype)
            except MemoryError:
                free_nbytes = self._free_nbytes()
        model = self._report.model
        nbytes = count * dtype.itemsize
        raise MemoryError(f"cuda:{self._ordinal} ({model}) has {free_nbytes} bytes free, {nbytes} are needed")

    def pinned(self, nbytes: int) -> Array:
        """New pinned host memory, not from CuPy's pool, which never returns any to the system."""
        try:
            with working_on(self._ordinal):
                memory = self._cupy.cuda.PinnedMemory(max(nbytes, 1))
        except TransportError as error:
            raise MemoryError(f"{nbytes} bytes of memory of the host cannot be pinned: {error}") from error
        return np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def fetch(self, source: Flat, target: Array, stream: Stream) -> None:
        """Copy from the device to the host. Waits for the copy if the memory of the host is not pinned."""
        self._copy(target.ctypes.data, target.nbytes, source.data.ptr, source.nbytes, "memcpyDeviceToHost", stream)

    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        """Copy from the host to the device. Waits for the stream if the memory of the host is not pinned."""
        self._copy(target.data.ptr, target.nbytes, source.ctypes.data, source.nbytes, "memcpyHostToDevice", stream)

    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        """Copy on the device."""
        self._copy(target.data.ptr, target.nbytes, source.data.ptr, source.nbytes, "memcpyDeviceToDevice", stream)

    def close(self) -> None:
        """Wait for pending calls of ``notify``, and end the threads. May be called again."""
        with self._lock:
            self._is_closed = True
            watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.close()

    def _copy(
        self, target: int, target_nbytes: int, source: int, source_nbytes: int, direction: str, stream: Stream
    ) -> None:
        if target_nbytes != source_nbytes:
            raise ValueError(f"a copy of {source_nbytes} bytes into {target_nbytes}")
        if not source_nbytes:
            return  # memory of no bytes may have no address
        runtime = self._cupy.cuda.runtime
        with working_on(self._ordinal):
            runtime.memcpyAsync(target, source, source_nbytes, getattr(runtime, direction), as_stream(stream).ptr)

    def _watcher(self, pointer: int) -> Watcher:
        """The watcher of a stream; each stream has its own, since the work of another may take longer."""
        with self._lock:
            if self._is_closed:
                raise TransportError("the device is closed")
            if pointer not in self._watchers:
                self._watchers[pointer] = Watcher(f"kfcomm-cuda-{self._ordinal}-{len(self._watchers)}")
            return self._watchers[pointer]

    def _free_nbytes(self) -> int:
        free_nbytes, _ = self._cupy.cuda.runtime.memGetInfo()
        return int(free_nbytes) + int(self._cupy.get_default_memory_pool().free_bytes())

    def _look(self) -> DeviceReport:
        """The report, made without a context on the device, which costs time and some of its memory."""
        runtime = self._cupy.cuda.runtime
        version = nccl_version()
        with cuda_errors(f"cuda:{self._ordinal}"):
            properties = runtime.getDeviceProperties(self._ordinal)
            place = runtime.deviceGetPCIBusId(self._ordinal)
            driver = runtime.driverGetVersion()
        return DeviceReport(
            kind="cuda",
            # CuPy may cut a uuid at a zero byte: the bus id distinguishes two devices of one host even so.
            uuid=f"{properties.get('uuid', b'').hex()}@{place.lower()}",
            model=properties["name"].decode(errors="replace"),
            driver=driver,
            backend="nccl" if version else "",
            backend_version=version,
            lack="" if version else f"CuPy finds no NCCL: {INSTALL}",
        )
