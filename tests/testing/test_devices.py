"""`FakeDevice`: streams, marks and memory behave as a device's would, in an order that the calls alone decide."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices import Device
from kfcomm.testing import FakeArray, FakeDevice


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice()
    yield made
    assert made.violations == []
    assert made.num_waiting == made.num_promised == 0


def test_report_of_a_fake_device_for_other_ranks(device: FakeDevice) -> None:
    one: Device = device
    assert (one.ordinal, one.report.kind, one.report.backend, one.report.backend_version) == (0, "fake", "fake", 1)
    assert one.report.uuid != FakeDevice().report.uuid
    shared = [FakeDevice(ordinal, "one", backend="").report for ordinal in range(2)]
    assert shared[0] == shared[1]
    assert (shared[0].backend, shared[0].backend_version) == ("", 0)


# -------------------------------------------------------------------- arrays


def test_arrays(device: FakeDevice) -> None:
    x = device.array(np.arange(6.0).reshape(2, 3))
    assert (x.shape, x.ndim, x.size, x.nbytes, x.dtype, len(x)) == ((2, 3), 2, 6, 48, np.float64, 2)
    assert x.get().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x[1, 1:].get().tolist() == [4, 5]
    assert x.T.get().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (x.is_contiguous, x.T.is_contiguous) == (True, False)
    assert [row.get().tolist() for row in x] == [[0, 1, 2], [3, 4, 5]]
    assert x[0, 0].get() == 0
    flat = x.reshape(-1)
    assert flat.reshape((3, 2)).get().tolist() == [[0, 1], [2, 3], [4, 5]]
    assert flat.view(np.uint8).nbytes == 48
    device.put(np.ones(3), flat[3:], device.default_stream)
    assert x.get().tolist() == [[0, 1, 2], [1, 1, 1]]
    with pytest.raises(ValueError, match="without a copy"):
        x.T.reshape(-1)


def test_arrays_are_copies_of_what_they_are_made_of(device: FakeDevice) -> None:
    source = np.zeros(2)
    x = device.array(source)
    source[:] = 1
    got = x.get()
    got[:] = 2
    assert x.get().tolist() == [0, 0]


def test_numpy_cannot_read_them(device: FakeDevice) -> None:
    x = device.array(np.zeros(2))
    for read in (np.asarray, np.add.reduce, memoryview, lambda x: np.zeros(2) + x):
        with pytest.raises(TypeError):
            read(x)


def test_their_kind(device: FakeDevice) -> None:
    x = device.array(np.arange(6))
    kind = type(x).__kfcomm_kind__
    other = device.stream()
    assert kind.current_stream(x) is device.default_stream
    with device.working_on(other):
        assert kind.current_stream(x) is other
        elsewhere: list[Any] = []
        thread = threading.Thread(target=lambda: elsewhere.append(kind.current_stream(x)))
        thread.start()
        thread.join()
        assert elsewhere == [device.default_stream]
    assert kind.current_stream(x) is device.default_stream
    assert kind.stream_of(other, device) is other
    with pytest.raises(ValueError, match="expected a stream"):
        kind.stream_of(FakeDevice().default_stream, device)
    assert (kind.name, kind.ordinal(x), kind.read(x, other)) == ("fake array", 0, (x, np.int64))
    with pytest.raises(ValueError, match="cannot be read on"):
        kind.read(x, FakeDevice().default_stream)
    restored = kind.restore(x, (2, 3), other)
    assert (restored.get().tolist(), restored.strides) == ([[0, 1, 2], [3, 4, 5]], (24, 8))
    begin, end = kind.span(x)
    assert (end - begin, kind.span(x[1:3])) == (48, (begin + 8, begin + 24))
    assert len(set(kind.span(x[:0]))) == 1


def test_their_kind_packs_and_unpacks(device: FakeDevice) -> None:
    x, stream = device.array(np.arange(6).reshape(2, 3)), device.default_stream
    kind = type(x).__kfcomm_kind__
    flat = kind.flat_view(x)
    assert flat is not None
    assert flat.shape == (6,)
    assert kind.flat_view(x.T) is None
    device.hold(stream)
    packed = kind.pack(x.T, stream)
    target = device.array(np.zeros((3, 2)))
    kind.check_writable(target)
    kind.copy_into(target.T, flat, stream)
    assert target.memory.tolist() == [[0, 0]] * 3
    device.release(stream)
    assert packed.get().tolist() == [0, 3, 1, 4, 2, 5]
    assert target.get().tolist() == [[0, 3], [1, 4], [2, 5]]


# -------------------------------------------------------------------- streams, marks, promises


def test_work_is_done_at_once_unless_it_is_held(device: FakeDevice) -> None:
    stream, done = device.stream(), list[int]()
    device.run(stream, lambda: done.append(1))
    assert done == [1]
    device.hold(stream)
    device.run(stream, lambda: done.append(2))
    device.run(device.default_stream, lambda: done.append(3))
    assert (done, stream.num_waiting) == ([1, 3], 1)
    device.release(stream)
    assert (done, stream.num_waiting) == ([1, 3, 2], 0)


def test_all_streams_are_held(device: FakeDevice) -> None:
    first, second, done = device.default_stream, device.stream(), list[int]()
    assert device.streams == (first, second)
    device.hold()
    device.run(second, lambda: done.append(2))
    device.run(first, lambda: done.append(1))
    assert done == []
    device.release()
    assert done == [1, 2]


def test_marks_join_streams(device: FakeDevice) -> None:
    first, second, third = device.stream(), device.stream(urgent=True), device.stream()
    done: list[str] = []
    device.hold(first)
    device.run(first, lambda: done.append("first"))
    mark = device.mark(first)
    device.run(first, lambda: done.append("after the mark"))
    device.wait(second, mark)
    device.run(second, lambda: done.append("second"))
    device.wait(third, device.mark(second))
    device.run(third, lambda: done.append("third"))
    assert (done, mark.is_done) == ([], False)
    device.release(first)
    assert sorted(done) == ["after the mark", "first", "second", "third"]
    assert done.index("first") < done.index("second") < done.index("third")
    assert mark.is_done
    device.wait(second, mark)
    device.run(second, lambda: done.append("at once"))
    assert done[-1] == "at once"


def test_a_long_chain_of_streams(device: FakeDevice) -> None:
    """Far more than Python would nest."""
    streams = [device.stream() for _ in range(3000)]
    done: list[int] = []
    device.hold(streams[0])
    for index, stream in enumerate(streams):
        if index:
            device.wait(stream, device.mark(streams[index - 1]))
        device.run(stream, lambda index=index: done.append(index))
    device.release(streams[0])
    assert done == list(range(3000))


def test_promises_are_kept_in_order_and_outside_of_the_lock(device: FakeDevice) -> None:
    stream, told = device.stream(), list[Any]()

    def first(error: BaseException | None) -> None:
        told.append(("first", error))
        device.notify(stream, lambda _: told.append("put by the first"))
        other = threading.Thread(target=lambda: device.run(device.stream(), lambda: told.append("other thread")))
        other.start()
        other.join()  # it would wait for this one's lock
        told.append("end of the first")

    device.hold(stream)
    device.notify(stream, first)
    device.notify(stream, lambda _: told.append("second"))
    assert (told, device.num_promised) == ([], 2)
    device.release(stream)
    assert told == [("first", None), "other thread", "end of the first", "second", "put by the first"]


def test_work_enqueued_by_work_follows_it(device: FakeDevice) -> None:
    stream, done = device.stream(), list[str]()

    def outer() -> None:
        device.run(stream, lambda: done.append("inner"))
        device.notify(stream, lambda _: done.append("told"))
        done.append("outer")

    device.run(stream, outer)
    assert done == ["outer", "inner", "told"]


def test_work_that_fails(device: FakeDevice) -> None:
    stream, other, told = device.stream(), device.stream(), list[Any]()

    def fails() -> None:
        raise ArithmeticError("an illegal instruction")

    device.run(stream, fails)
    device.run(stream, lambda: told.append("never"))
    device.wait(other, device.mark(stream))
    device.run(other, lambda: told.append("never either"))
    device.notify(stream, told.append)
    device.notify(other, told.append)
    assert [type(one) for one in told] == [ArithmeticError, ArithmeticError]
    device.run(device.default_stream, lambda: told.append("elsewhere"))
    assert told[-1] == "elsewhere"
    x = device.array(np.zeros(1))
    with device.working_on(stream), pytest.raises(ArithmeticError):
        x.get()


def test_streams_of_others_are_refused(device: FakeDevice) -> None:
    other = FakeDevice(1)
    for call in (device.mark, device.hold, device.release, lambda stream: device.empty(1, np.dtype("f4"), stream)):
        with pytest.raises(ValueError, match="expected a stream of"):
            call(other.default_stream)
    with pytest.raises(ValueError, match="expected a stream of"):
        device.mark(None)  # type: ignore[arg-type]


def test_closing_waits_for_what_was_promised(device: FakeDevice) -> None:
    told: list[str] = []
    device.hold(device.default_stream)
    device.notify(device.default_stream, lambda _: told.append("kept"))
    closing = threading.Thread(target=device.close)
    closing.start()
    device.release(device.default_stream)
    closing.join()
    assert told == ["kept"]
    assert not device.is_open
    device.close()


# -------------------------------------------------------------------- memory and copies


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
def test_new_memory_is_no_number(device: FakeDevice, dtype: str) -> None:
    assert np.isnan(device.empty(3, np.dtype(dtype), device.default_stream).get()).all()


def test_new_memory_of_integers_is_poisoned(device: FakeDevice) -> None:
    stream = device.default_stream
    assert device.empty(2, np.dtype("i2"), stream).get().tolist() == [0x5A5A] * 2
    assert device.empty(2, np.dtype("?"), stream).get().tolist() == [True] * 2
    assert device.empty(0, np.dtype("?"), stream).get().tolist() == []
    assert device.pinned(3).tolist() == [0x5A] * 3
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert np.isnan(device.empty(2, np.dtype(ml_dtypes.bfloat16), stream).get().astype(np.float32)).all()


def test_copies(device: FakeDevice) -> None:
    stream = device.default_stream
    host = device.pinned(16)
    x, y = device.array(np.arange(2.0)), device.empty(2, np.dtype("f8"), stream)
    device.copy(x, y, stream)
    device.fetch(y, host, stream)
    assert host.view("f8").tolist() == [0, 1]
    device.put(host[8:], x[:1], stream)
    assert x.get().tolist() == [1, 1]
    device.copy(x[:0], y[:0], stream)


def test_copies_that_are_held(device: FakeDevice) -> None:
    stream, host = device.default_stream, np.zeros(2)
    x, y = device.array(np.ones(2)), device.array(np.zeros(2))
    device.hold_copies()
    device.copy(x, y, stream)
    assert y.get().tolist() == [1, 1]
    device.fetch(x, host, stream)
    assert (host.tolist(), stream.num_waiting) == ([0, 0], 1)
    with pytest.raises(RuntimeError, match="before this can be read"):
        x.get()
    device.release_copies()
    assert host.tolist() == [1, 1]


def test_copies_that_cannot_be(device: FakeDevice) -> None:
    stream = device.default_stream
    x, host = device.array(np.zeros((2, 2))), np.zeros(4)
    other = FakeDevice(1)
    bad: list[Any] = [
        lambda: device.fetch(x.reshape(-1)[:3], host, stream),
        lambda: device.fetch(x, host, stream),
        lambda: device.fetch(x.reshape(-1)[::2], host[:2], stream),
        lambda: device.put(host, other.array(host), stream),
        lambda: device.copy(other.array(host), x.reshape(-1), stream),
        lambda: device.copy(x.reshape(-1), other.array(host), stream),
        lambda: device.fetch(x.reshape(-1), host, other.default_stream),
    ]
    for call in bad:
        with pytest.raises(ValueError, match=r"expected a stream|copied is flat|a copy of|not in the memory"):
            call()
    with pytest.raises(TypeError, match="host memory"):
        device.fetch(x.reshape(-1), x, stream)  # type: ignore[arg-type]


def test_memory_in_use_is_counted(device: FakeDevice) -> None:
    x = device.empty(4, np.dtype("f4"), device.default_stream)
    part = x[2:]
    y = device.array(np.zeros(2))
    assert device.used_nbytes == 32
    del x
    assert device.used_nbytes == 32
    del part
    assert device.used_nbytes == 16
    del y
    host = device.pinned(100)
    view = host[:10]
    assert (device.used_nbytes, device.pinned_nbytes) == (0, 100)
    del host
    assert device.pinned_nbytes == 100
    del view
    assert device.pinned_nbytes == 0


def test_there_is_no_memory(device: FakeDevice) -> None:
    device.fail_next_allocation(2)
    with pytest.raises(MemoryError, match="400 bytes of device memory"):
        device.empty(100, np.dtype("f4"), device.default_stream)
    with pytest.raises(MemoryError, match="7 bytes of pinned memory"):
        device.pinned(7)
    assert isinstance(device.empty(100, np.dtype("f4"), device.default_stream), FakeArray)


# -------------------------------------------------------------------- what a real device would not forgive


def _write(device: FakeDevice, x: FakeArray, stream: Any) -> None:
    device.run(stream, lambda: None, writes=[x])


def _read(device: FakeDevice, x: FakeArray, stream: Any) -> None:
    device.run(stream, lambda: None, reads=[x])


def _violations(device: FakeDevice) -> list[str]:
    said = list(device.violations)
    device.violations.clear()
    return said


@pytest.mark.parametrize("first", [_read, _write])
@pytest.mark.parametrize("second", [_read, _write])
def test_streams_that_have_not_waited_for_each_other(device: FakeDevice, first: Any, second: Any) -> None:
    one, two = device.stream(), device.stream()
    x = device.array(np.zeros(4))
    first(device, x[:2], one)
    second(device, x[2:], two)
    assert _violations(device) == []
    second(device, x[1:], two)
    if first is second is _read:
        assert _violations(device) == []
    else:
        did, does = ("read" if first is _read else "wrote"), ("reads" if second is _read else "writes")
        assert _violations(device) == [
            f"<FakeStream 0.2> {does} memory that <FakeStream 0.1> {did}, and has not waited for it"
        ]


def test_streams_in_order(device: FakeDevice) -> None:
    """By a mark, by way of a third stream, or because the program was told."""
    one, two, three = device.stream(), device.stream(), device.stream()
    x = device.array(np.zeros(4))
    _write(device, x, one)
    device.wait(two, device.mark(one))
    device.wait(three, device.mark(two))
    _write(device, x, three)
    device.notify(three, lambda _: None)
    _write(device, x, two)
    with device.working_on(two):
        x.get()
    _write(device, x, one)


def test_work_enqueued_before_notification_is_unordered(device: FakeDevice) -> None:
    one, two = device.stream(), device.stream()
    x = device.array(np.zeros(4))
    device.hold(two)
    _write(device, x, two)
    _write(device, x, one)
    device.notify(one, lambda _: None)
    device.release(two)
    assert len(_violations(device)) == 1


def test_a_mark_says_nothing_of_what_comes_behind_it(device: FakeDevice) -> None:
    one, two = device.stream(), device.stream()
    x = device.array(np.zeros(4))
    mark = device.mark(one)
    _write(device, x, one)
    device.wait(two, mark)
    _read(device, x, two)
    assert len(_violations(device)) == 1


def test_new_memory_is_for_its_stream(device: FakeDevice) -> None:
    one, two = device.stream(), device.stream()
    x, y = device.empty(1, np.dtype("f4"), one), device.empty(1, np.dtype("f4"), one)
    _write(device, x, one)
    _write(device, y, two)
    assert len(_violations(device)) == 1


def test_memory_that_is_freed_too_early(device: FakeDevice) -> None:
    """Use on its own stream is allowed: later work there follows it."""
    other, home = device.stream(), device.default_stream
    device.hold(other)
    device.hold(home)
    x, y = device.array(np.zeros(4)), device.empty(4, np.dtype("f4"), home)
    device.fetch(x, np.zeros(4), other)
    device.fetch(y, np.zeros(4, "f4"), home)
    del x, y
    device.release(home)
    device.release(other)
    assert _violations(device) == [
        "memory of <FakeStream 0.0> was freed before what was on <FakeStream 0.1> had used it"
    ]
