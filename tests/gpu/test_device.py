"""A real CUDA device: streams, marks, notifications, copies, pinned memory, lack of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pytest

from kfcomm.arrays import dtype_of
from kfcomm.arrays.devices import cuda, routes
from kfcomm.arrays.devices.cuda import as_stream, working_on
from kfcomm.arrays.devices.host import PinnedPool
from kfcomm.errors import ConfigError, TransportError

pytestmark = pytest.mark.gpu

FLOAT = np.dtype(np.float32)
COUNT = 1 << 16


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    """Use the device once, so that the files that CUDA keeps open are not counted as leaks of a test."""
    cupy = pytest.importorskip("cupy")
    cupy.cuda.PinnedMemory(1)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.launch_host_func(lambda _: None, None)
    stream.record(cupy.cuda.Event(block=True, disable_timing=True)).synchronize()
    cupy.arange(4).sum().get()


@pytest.fixture
def device() -> Iterator[cuda.CudaDevice]:
    made = cuda.CudaDevice(0)
    yield made
    made.close()


class Gate:
    """Holds a stream back until it is opened: a callback of CUDA that waits for a thread."""

    def __init__(self, stream: Any) -> None:
        self._open = threading.Event()
        stream.launch_host_func(lambda _: self._open.wait(), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()

    def open(self) -> None:
        self._open.set()


class Told:
    """Collects what ``notify`` says, and waits for it."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self._change = threading.Condition()

    def __call__(self, error: BaseException | None) -> None:
        with self._change:
            self.errors.append(error)
            self._change.notify_all()

    def wait_for(self, count: int) -> list[BaseException | None]:
        with self._change:
            self._change.wait_for(lambda: len(self.errors) >= count)
        return self.errors


def on_host(device: cuda.CudaDevice, flat: Any, stream: Any) -> np.ndarray:
    """The elements, after all work on the stream."""
    host, told = device.pinned(flat.nbytes), Told()
    device.fetch(flat, host, stream)
    device.notify(stream, told)
    assert told.wait_for(1) == [None]
    return host.view(flat.dtype).copy()


def filled(device: cuda.CudaDevice, values: np.ndarray, stream: Any) -> Any:
    flat = device.empty(values.size, values.dtype, stream)
    device.put(values, flat, stream)
    return flat


# --- which one --------------------------------------------------------------------------------------------------------


def test_it_is_found() -> None:
    found, report = routes.find("auto", 0)
    assert found is not None
    assert (report.kind, found.report) == ("cuda", report)
    assert report.model
    assert report.driver >= 12000
    uuid, place = report.uuid.split("@")
    assert uuid
    assert place.count(":") == 2
    assert routes.find("cuda:0", 5)[1] == report


def test_one_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"device is cuda:99, but this process sees only cuda:0 \("):
        routes.find("cuda:99", 0)
    with pytest.raises(TransportError, match="cuda:99: cudaErrorInvalidDevice"):
        cuda.CudaDevice(99)


def test_nccl_is_reported() -> None:
    version = cuda.nccl_version()
    report = routes.find("auto", 0)[1]
    assert (report.backend, report.backend_version, report.lack == "") == (
        ("nccl" if version else ""),
        version,
        version > 0,
    )


# --- streams and marks ------------------------------------------------------------------------------------------------


def test_streams_wait_for_no_other(device: cuda.CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    one, other = device.stream(), device.stream()
    with Gate(one), Gate(cupy.cuda.Stream.null):
        told = Told()
        device.notify(other, told)
        assert told.wait_for(1) == [None]


def test_an_urgent_stream_goes_first(device: cuda.CudaDevice) -> None:
    assert device.stream(urgent=True).priority < device.stream().priority


def test_a_mark_holds_back_what_comes_after_it(device: cuda.CudaDevice) -> None:
    first, second = device.stream(), device.stream()
    order: list[str] = []
    with Gate(first) as gate:
        first.launch_host_func(order.append, "first")
        device.wait(second, device.mark(first))
        second.launch_host_func(order.append, "second")
        assert not order
        gate.open()
        told = Told()
        device.notify(second, told)
        told.wait_for(1)
    assert order == ["first", "second"]


def test_a_mark_does_not_hold_what_it_does_not_stand_behind(device: cuda.CudaDevice) -> None:
    first, second = device.stream(), device.stream()
    mark = device.mark(first)
    with Gate(first):
        device.wait(second, mark)
        told = Told()
        device.notify(second, told)
        assert told.wait_for(1) == [None]


def test_every_thread_can_use_it(device: cuda.CudaDevice) -> None:
    stream, got = device.stream(), []
    values = np.arange(COUNT, dtype=FLOAT)
    thread = threading.Thread(target=lambda: got.append(on_host(device, filled(device, values, stream), stream)))
    thread.start()
    thread.join()
    assert np.array_equal(got[0], values)


def test_streams_of_others(device: cuda.CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    theirs = cupy.cuda.Stream(non_blocking=True)
    for given in (theirs, theirs.ptr, cupy.cuda.Stream.null, 0, 1):
        stream = as_stream(given)
        values = np.arange(7, dtype=FLOAT)
        assert np.array_equal(on_host(device, filled(device, values, stream), given), values)


def test_within_a_device_and_a_stream(device: cuda.CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    stream, before = device.stream(), cupy.cuda.get_current_stream()
    with working_on(0, stream):
        assert cupy.cuda.get_current_stream() == stream
    assert cupy.cuda.get_current_stream() == before
    with pytest.raises(TransportError, match="cuda:0: cudaErrorInvalidValue"), working_on(0, stream):
        cupy.cuda.runtime.memcpyAsync(0, 0, 8, cupy.cuda.runtime.memcpyHostToDevice, stream.ptr)


# --- who is told ------------------------------------------------------------------------------------------------------


def test_it_is_told_when_the_work_is_done_and_not_before(device: cuda.CudaDevice) -> None:
    stream, told = device.stream(), Told()
    with Gate(stream) as gate:
        device.notify(stream, told)
        other = Told()
        device.notify(device.stream(), other)  # a thread of its own: not held up
        other.wait_for(1)
        assert not told.errors
        gate.open()
        assert told.wait_for(1) == [None]


def test_it_is_told_in_order(device: cuda.CudaDevice) -> None:
    stream, order, last = device.stream(), [], Told()
    with Gate(stream):
        for number in range(50):
            device.notify(stream, lambda _, number=number: order.append(number))
        device.notify(stream, last)
    last.wait_for(1)
    assert order == list(range(50))


def test_other_threads_run_while_it_waits(device: cuda.CudaDevice) -> None:
    """This thread ends the wait, which is impossible while the waiting thread holds the interpreter's lock."""
    stream, told = device.stream(), Told()
    with Gate(stream) as gate:
        device.notify(stream, told)
        assert sum(range(1000)) == 499500
        gate.open()
    told.wait_for(1)


def test_close_keeps_what_was_promised(device: cuda.CudaDevice) -> None:
    stream, told = device.stream(), Told()
    device.notify(stream, told)
    device.close()
    assert told.errors == [None]
    device.close()
    with pytest.raises(TransportError, match="closed"):
        device.notify(stream, told)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bool", "int8", "float16", "bfloat16", "float32", "complex128"])
def test_there_and_back(device: cuda.CudaDevice, name: str) -> None:
    stream = device.stream()
    values = (np.arange(COUNT) % 5).astype(dtype_of(name))
    flat = filled(device, values, stream)
    assert (flat.shape, flat.dtype) == ((COUNT,), dtype_of(name))
    copy = device.empty(COUNT, dtype_of(name), stream)
    device.copy(flat, copy, stream)
    assert np.array_equal(on_host(device, copy, stream), values)


def test_slices_are_views(device: cuda.CudaDevice) -> None:
    stream = device.stream()
    values = np.arange(COUNT, dtype=FLOAT)
    flat = filled(device, values, stream)
    device.put(np.full(8, -1, FLOAT), flat[16:24], stream)
    values[16:24] = -1
    assert np.array_equal(on_host(device, flat, stream), values)
    assert np.array_equal(on_host(device, flat[10:30], stream), values[10:30])


def test_copies_with_pinned_memory_wait_for_nobody(device: cuda.CudaDevice) -> None:
    stream = device.stream()
    flat, host = device.empty(1 << 20, np.dtype(np.uint8), stream), device.pinned(1 << 20)
    host[:] = 3
    with Gate(stream):  # while it is shut, these return
        device.put(host, flat, stream)
        device.fetch(flat, host, stream)
        device.copy(flat[: 1 << 19], flat[1 << 19 :], stream)
    assert (on_host(device, flat, stream) == 3).all()


def test_copies_of_zero_bytes(device: cuda.CudaDevice) -> None:
    stream = device.stream()
    flat = device.empty(0, FLOAT, stream)
    device.put(np.empty(0, FLOAT), flat, stream)
    device.fetch(flat, device.pinned(0), stream)
    assert on_host(device, flat, stream).size == 0


def test_both_ends_have_the_same_bytes(device: cuda.CudaDevice) -> None:
    stream = device.stream()
    with pytest.raises(ValueError, match="16 bytes into 12"):
        device.put(np.zeros(4, FLOAT), device.empty(3, FLOAT, stream), stream)


def test_more_memory_than_there_is(device: cuda.CudaDevice) -> None:
    stream = device.stream()
    with pytest.raises(MemoryError, match=r"cuda:0 \(.+\) has \d+ bytes free, \d+ are needed"):
        device.empty(1 << 50, FLOAT, stream)
    assert device.empty(8, FLOAT, stream).size == 8


def test_pinned_memory(device: cuda.CudaDevice) -> None:
    cupy = pytest.importorskip("cupy")
    for nbytes in (1, 4097, 1 << 20):
        memory = device.pinned(nbytes)
        assert (memory.dtype, memory.shape) == (np.uint8, (nbytes,))
        assert memory.flags.writeable
        attributes = cupy.cuda.runtime.pointerGetAttributes(memory.ctypes.data)
        assert attributes.type == cupy.cuda.runtime.memoryTypeHost
    with pytest.raises(MemoryError, match="cannot be pinned"):
        device.pinned(1 << 50)


def test_pinned_memory_lives_as_long_as_a_view_of_it(device: cuda.CudaDevice) -> None:
    view = device.pinned(1 << 12)[100:200]
    view[:] = 5
    assert (view == 5).all()


def test_a_pool_of_it(device: cuda.CudaDevice) -> None:
    stream, pool = device.stream(), PinnedPool(device, 1 << 20)
    block = pool.take(COUNT * 4)
    assert block.is_pinned()
    flat = filled(device, np.arange(COUNT, dtype=FLOAT), stream)
    told = Told()
    device.fetch(flat, block.view, stream)
    device.notify(stream, told)
    told.wait_for(1)
    assert np.array_equal(block.view.view(FLOAT), np.arange(COUNT, dtype=FLOAT))
    block.release()
    pool.close()
