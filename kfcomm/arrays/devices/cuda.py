"""CUDA devices through CuPy: memory, streams, copies, notifications and errors. `routes.find` finds them.

Streams are CuPy's; those of callers come through ``as_stream``. Marks are CuPy's events, without timing. Flat memory
is CuPy's arrays of one dimension.

Invariants: CuPy is imported when a device is made, or one of its arrays is met, and not before. During a call the
device is the thread's current one, which every thread has of its own. Errors of CUDA become `TransportError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kfcomm.arrays.devices import Array, DeviceReport, Flat, Mark, Sharing, Stream
from kfcomm.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from kfcomm.arrays.devices.ipc import CudaSharing

Done: TypeAlias = Callable[[BaseException | None], None]
Wait: TypeAlias = Callable[[], None]


class Watcher:
    """Waits, in order, on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._promised: SimpleQueue[tuple[Wait, Done] | None] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._is_closed = False

    def promise(self, wait: Wait, done: Done) -> None:
        """Call ``wait`` after those promised before, then ``done`` with the error that it raised, or None.

        Args:
            wait: returns when it is over; raises if it ended badly.
            done: returns soon, and does not raise.

        Raises:
            TransportError: the watcher is closed.
        """
        with self._lock:
            if self._is_closed:
                raise TransportError("the device is closed")
            self._promised.put((wait, done))
            if self._thread is None:
                self._thread = Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for all callbacks, and end the thread. May be called again, and by a ``done``."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                # Behind all requests, so that each is answered before the thread ends.
                self._promised.put(None)
            thread = self._thread
        if thread is not None and thread is not current_thread():
            thread.join()

    def _run(self) -> None:
        while (promised := self._promised.get()) is not None:
            wait, done = promised
            try:
                wait()
            except Exception as error:  # noqa: BLE001  of whatever kind: else no promise would be kept from here on
                done(error)
            else:
                done(None)
            del promised, wait, done  # what they hold must not live until the next promise comes


INSTALL: Final = 'pip install "kfcomm[cuda13]", or "kfcomm[cuda12]" where the driver is older than CUDA 13'

_PER_THREAD_STREAM: Final = 2
"""CUDA's number for the default stream of the calling thread."""


def load_cupy() -> Any:
    """The module ``cupy``.

    Raises:
        ConfigError: it is not installed, or cannot be loaded; the message says what to install.
    """
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"arrays in the memory of a GPU need CuPy ({error}): {INSTALL}") from error
    return cupy


@contextmanager
def cuda_errors(what: str) -> Iterator[None]:
    """Turn errors of CUDA in the block into a `TransportError` that begins with ``what``."""
    refused = load_cupy().cuda.runtime.CUDARuntimeError
    try:
        yield
    except refused as error:
        raise TransportError(f"{what}: {error}") from error


class working_on:  # noqa: N801
    """Make a device the thread's current one, and a stream CuPy's current one, in the block; map CUDA's errors.

    A class and not a generator, which saves about 1 µs per use.

    Args:
        ordinal: of the device.
        stream: CuPy's; if left out, the current one stays.

    Raises:
        TransportError: CUDA reports an error.
    """

    __slots__ = ("_device", "_refused", "_stream", "_what")

    def __init__(self, ordinal: int, stream: Stream | None = None) -> None:
        cuda = load_cupy().cuda
        self._what = f"cuda:{ordinal}"
        self._device = cuda.Device(ordinal)
        self._stream = stream
        self._refused = cuda.runtime.CUDARuntimeError

    def __enter__(self) -> None:
        try:
            self._device.__enter__()
        except self._refused as error:
            raise TransportError(f"{self._what}: {error}") from error
        # A block that was not entered is not left either: the device is restored here.
        try:
            if self._stream is not None:
                self._stream.__enter__()
        except BaseException:
            self._device.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.__exit__(kind, error, traceback)
        self._device.__exit__(kind, error, traceback)
        if isinstance(error, self._refused):
            raise TransportError(f"{self._what}: {error}") from error


def as_stream(given: Any) -> Stream:
    """A stream as CuPy's, which keeps alive what was given.

    Args:
        given: a stream of CuPy or torch, an object with ``__cuda_stream__``, or CUDA's own number of one, which its
            owner keeps alive.

    Raises:
        ConfigError: it is of another type, or the default stream of the calling thread.
    """
    cuda = load_cupy().cuda
    if isinstance(given, cuda.Stream):
        stream = given
    else:
        stream = cuda.Stream.from_external(_Foreign(given))
    if stream.ptr == _PER_THREAD_STREAM:
        raise ConfigError("the default stream of a thread cannot be used by another: pass stream= a stream of its own")
    return stream


class _Foreign:
    """A stream of another library, or of CUDA itself, as CuPy takes it."""

    __slots__ = ("_given", "_pointer")

    def __init__(self, given: Any) -> None:
        self._given = given
        self._pointer = _pointer_of(given)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def _pointer_of(given: Any) -> int:
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if hasattr(given, "__cuda_stream__"):
        protocol = given.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    if hasattr(given, "cuda_stream"):  # torch's, before it had the protocol
        return int(given.cuda_stream)
    raise ConfigError(
        f"stream= takes a stream of CuPy or torch, an object with __cuda_stream__, or a CUDA stream by its number; "
        f"not {given!r}"
    )


_NOT_READY: Final = 600  # cudaErrorNotReady

_URGENT: Final = -100  # CUDA takes the nearest priority that it has


SHARING_VERSION: Final = 23000
SHARING_VARIABLE: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL of at least this version, which reads this variable by itself, runs several ranks on one device if it is 1."""


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
        self._sharing: CudaSharing | None = None
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

    def passed(self, mark: Mark) -> bool:
        """Whether its stream has passed a mark.

        Raises:
            TransportError: the device has failed.
        """
        runtime = self._cupy.cuda.runtime
        status = runtime.eventQuery(mark.ptr)  # whatever device is the thread's current one
        if status not in (0, _NOT_READY):
            raise TransportError(f"cuda:{self._ordinal}: {runtime.CUDARuntimeError(status)}")
        return bool(status == 0)

    def is_capturing(self, stream: Stream) -> bool:
        """Whether a CUDA graph is being captured from it."""
        with working_on(self._ordinal):
            return bool(as_stream(stream).is_capturing())

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

    def sharing(self) -> Sharing:
        """Memory for other processes of this host, by CUDA IPC."""
        if self._sharing is None:
            from kfcomm.arrays.devices.ipc import CudaSharing

            self._sharing = CudaSharing(self._ordinal)
        return self._sharing

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
        self._copy((target.ctypes.data, target.nbytes), _span(source), "memcpyDeviceToHost", stream)

    def put(self, source: Array, target: Flat, stream: Stream) -> None:
        """Copy from the host to the device. Waits for the stream if the memory of the host is not pinned."""
        self._copy(_span(target), (source.ctypes.data, source.nbytes), "memcpyHostToDevice", stream)

    def copy(self, source: Flat, target: Flat, stream: Stream) -> None:
        """Copy on the device."""
        self._copy(_span(target), _span(source), "memcpyDeviceToDevice", stream)

    def close(self) -> None:
        """Wait for pending calls of ``notify``, and end the threads. May be called again."""
        with self._lock:
            self._is_closed = True
            watchers = list(self._watchers.values())
        for watcher in watchers:
            watcher.close()
        if self._sharing is not None:
            self._sharing.end()

    def _copy(self, target: tuple[int, int], source: tuple[int, int], direction: str, stream: Stream) -> None:
        (to, room_nbytes), (at, nbytes) = target, source
        if room_nbytes != nbytes:
            raise ValueError(f"a copy of {nbytes} bytes into {room_nbytes}")
        if not nbytes:
            return  # memory of no bytes may have no address
        runtime = self._cupy.cuda.runtime
        with working_on(self._ordinal):
            runtime.memcpyAsync(to, at, nbytes, getattr(runtime, direction), as_stream(stream).ptr)

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
            shares=int(version >= SHARING_VERSION and os.environ.get(SHARING_VARIABLE) == "1"),
            exports=int(not properties.get("integrated") and os.path.exists("/dev/nvidiactl")),  # not on Tegra, WSL
        )


def _span(flat: Flat) -> tuple[int, int]:
    """Address and length in bytes of device memory."""
    return flat.data.ptr, flat.nbytes
