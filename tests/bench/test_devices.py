"""Benchmarks of arrays that NumPy cannot read: everything is made, overwritten, read and timed by their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kfcomm.arrays.devices import DeviceReport
from kfcomm.bench.measure import AsyncCaller, WrongResult, measure
from kfcomm.bench.memory import CudaBenchMemory, HostBenchMemory, described, in_words, num_devices
from kfcomm.bench.pages import surroundings
from kfcomm.bench.report import Report
from kfcomm.bench.suite import COLLECTIVES, Begun, BenchPlace, CallMode, Event, MeasuredCase, Suite, from_line, to_line
from kfcomm.bench.workloads import WORKLOADS
from kfcomm.cli import main
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world
from kfcomm.types import Layout

TINY = {"iterations": 2, "warmup": 1}


class Boxed:
    """An array that only its memory can read; as of a device, its result is ready some time after the call."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def reshape(self, shape: tuple[int, ...]) -> Boxed:
        return Boxed(self.values.reshape(shape))


class BoxedMemory(HostBenchMemory):
    """Memory of such arrays, whose clock says that everything takes a second more for each call of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def holding(self, values: Any) -> Boxed:
        return Boxed(values)

    def empty(self, count: int, dtype: Any) -> Boxed:
        return Boxed(super().empty(count, dtype))

    def spoil(self, array: Boxed) -> None:
        super().spoil(array.values)
        self.log.append("spoil")

    def settle(self) -> None:
        self.log.append("settle")

    def read(self, array: Boxed) -> Any:
        assert self.log[-1] in ("elapsed", "read")  # nothing is looked at before it is done
        self.log.append("read")
        return array.values

    def stopwatch(self) -> Any:
        return self

    def start(self) -> None:
        assert self.log[-1] == "settle"
        self.log.append("start")

    async def elapsed_s(self) -> float:
        self.log.append("elapsed")
        return float(self.log.count("elapsed"))


class Unboxing:
    """A communicator of boxed arrays; ``change`` may spoil what comes out."""

    def __init__(self, comm: Any, change: Callable[[Any], None]) -> None:
        self._comm = comm
        self._change = change

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return self._verb(found) if name in {*map(str, COLLECTIVES), "all_reduce_many"} else found

    def _verb(self, verb: Any) -> Any:
        async def call(x: Any, name: str | None = None, **options: Any) -> Any:
            if isinstance(x, dict):
                many = await verb({key: one.values for key, one in x.items()}, **options)
                return {key: Boxed(one) for key, one in many.items()}
            if not isinstance(x, Boxed) and not isinstance(options.get("out"), Boxed):
                return await verb(x, name=name, **options)
            unboxed = {key: getattr(value, "values", value) for key, value in options.items()}
            result = await verb(getattr(x, "values", x), name=name, **unboxed)
            if result is None:
                return None
            self._change(result)
            return Boxed(result)

        return call


async def measured(
    suite: Suite, memories: list[BoxedMemory], change: Callable[[Any], None] = lambda _: None
) -> list[Event]:
    """The events of a benchmark of boxed arrays."""
    events: list[Event] = []

    async def rank(comm: Any) -> None:
        cases, memory = suite.cases(len(memories)), memories[comm.rank]
        await measure(AsyncCaller(Unboxing(comm, change)), cases, events.append, memory)

    async with world(len(memories)) as comms:
        await run_ranks(comms, rank)
    return events


@pytest.mark.asyncio
async def test_every_collective_and_mode_works_by_the_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "small", lambda: ((3, 5), (9000,)))
    suite = Suite(tuple(COLLECTIVES), sizes=(240,), workloads=("small",), dtypes=("float32", "int8"), **TINY)
    memories = [BoxedMemory(), BoxedMemory()]
    found = [event.result for event in await measured(suite, memories) if isinstance(event, MeasuredCase)]
    assert [result.case for result in found] == suite.cases(2)
    assert {result.case.mode for result in found} == {None, *CallMode}
    # times are those of the memory's clock: one for each run, those of warm-up left out
    assert found[0].times_s == (2.0, 3.0)
    assert all(memory.log.count("start") == 3 * len(found) for memory in memories)


@pytest.mark.asyncio
async def test_a_wrong_result_in_other_memory_is_found() -> None:
    def change(values: Any) -> None:
        values[7] += 1

    with pytest.raises(WrongResult):
        await measured(Suite(sizes=(400,), **TINY), [BoxedMemory(), BoxedMemory()], change)


# ---------------------------------------------------------------- CuPy, by a stand-in


class CudaEvent:
    """A CUDA event that knows when it was recorded."""

    def __init__(self, *, block: bool) -> None:
        assert block
        self.at_ms = -1.0
        self.is_waited_for = False

    def record(self, stream: Any) -> None:
        stream.now_ms += 250.0
        self.at_ms = stream.now_ms

    def synchronize(self) -> None:
        self.is_waited_for = True


class OnDevice:
    """An array of the stand-in."""

    def __init__(self, values: Any, stream: Any) -> None:
        self._values = values
        self.dtype, self.nbytes, self.data = values.dtype, values.nbytes, self
        self._stream = stream

    def reshape(self, shape: tuple[int, ...]) -> OnDevice:
        return OnDevice(self._values.reshape(shape), self._stream)

    def set(self, values: Any) -> None:
        assert values.shape == self._values.shape
        self._values[...] = values

    def get(self) -> Any:
        return self._values.copy()

    def memset_async(self, value: int, nbytes: int, stream: Any) -> None:
        assert stream is self._stream
        self._values.view(np.uint8)[:nbytes] = value


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    stream = SimpleNamespace(now_ms=0.0, synchronize=lambda: None)

    def empty(count: int, dtype: Any) -> OnDevice:
        if count > 1 << 20:
            raise MemoryError
        if dtype.name == "float16":
            raise TypeError("no such dtype")
        return OnDevice(np.zeros(count, dtype), stream)

    used: list[int] = []
    made = SimpleNamespace(
        empty=empty,
        used=used,
        cuda=SimpleNamespace(
            Device=lambda ordinal: SimpleNamespace(use=lambda: used.append(ordinal)),
            Event=CudaEvent,
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda first, last: last.at_ms - first.at_ms,
            runtime=SimpleNamespace(getDeviceCount=lambda: 3),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr("kfcomm.bench.memory.find_spec", lambda _: object())
    return made


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "bool", "complex64", "float64"])
def test_arrays_are_made_overwritten_and_read_on_the_device(cupy: Any, dtype: str) -> None:
    memory = CudaBenchMemory(2)
    assert cupy.used == [2]
    values = np.array([[1, 0], [1, 1]]).astype(dtype)
    array = memory.holding(values)
    np.testing.assert_array_equal(memory.read(array), values)
    flat = memory.empty(4, values.dtype)
    memory.spoil(flat)
    memory.settle()
    spoiled = memory.read(flat)
    assert not np.isin(spoiled, np.arange(100)).any() or dtype == "bool"
    assert np.isnan(spoiled).all() if values.dtype.kind in "fc" else len(set(spoiled.tolist())) == 1


@pytest.mark.asyncio
async def test_time_is_that_between_two_events(cupy: Any) -> None:
    stopwatch = CudaBenchMemory(0).stopwatch()
    stopwatch.start()
    assert await stopwatch.elapsed_s() == 0.25


def test_arrays_too_large_for_the_device_are_refused(cupy: Any) -> None:
    with pytest.raises(ConfigError, match="no 8 MiB left"):
        CudaBenchMemory(0).empty(1 << 21, np.dtype("float32"))
    with pytest.raises(ConfigError, match="no arrays of float16"):
        CudaBenchMemory(0).empty(1, np.dtype("float16"))


# ---------------------------------------------------------------- what there is, and what is said of it


def test_devices_are_counted(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_devices() == 3
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(ConfigError, match="no CUDA device"):
        num_devices()

    def fail() -> int:
        raise RuntimeError("driver\nmissing")

    cupy.cuda.runtime.getDeviceCount = fail
    with pytest.raises(ConfigError, match=r"\(driver missing\)"):
        num_devices()


@pytest.mark.parametrize("arguments", [["--device", "gpu"], ["--device", "gpu", "-n", "2", "--blocking"]])
def test_without_cupy_one_line_says_what_to_install(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.bench.memory.find_spec", lambda _: None)
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == 2
    assert "kfcomm[cuda13]" in done.stderr.splitlines()[-1]
    assert done.stdout == ""


REPORTS = (
    DeviceReport("cuda", "a", "Tesla <T>", 12040, "nccl", 22803),
    DeviceReport("cuda", "a", "Tesla <T>", 12040, "nccl", 22803),
    DeviceReport("cuda", "b", "H1", 13000, lack="no NCCL"),
)


def test_the_report_says_devices_backend_and_route() -> None:
    found = described(REPORTS, Layout((0, 0, 0)), ("auto", "tcp"))
    suite = Suite(transports=("auto", "tcp"), device=BenchPlace.GPU)
    begun = Begun(3, 1, ({"ranks": [0, 1, 2], "processor": "P", "usable_cores": 2},), found)
    assert from_line(to_line(begun)) == begun
    report = Report(suite)
    report.note(begun)
    line = report.world()
    assert "1 Tesla <T>, NCCL 2.28.3" in line
    assert "1 H1, no NCCL" in line
    assert "auto staged (" in line
    assert "tcp staged (" in line
    data = report.as_json()
    assert data["suite"]["device"] == "gpu"
    assert [one["ranks"] for one in data["devices"]] == [[0, 1], [2]]
    assert data["routes"]["auto"]["because"]
    data["hosts"] = []
    (section,) = [one for one in surroundings(data) if one.title == "Devices"]
    assert "Tesla &lt;T&gt;" in section.content
    assert "CUDA 12.4" in section.content


def test_the_report_says_that_memory_is_symmetric() -> None:
    report = Report(Suite(device=BenchPlace.SYMMETRIC))
    report.note(Begun(2, 1, ({"ranks": [0, 1], "processor": "P", "usable_cores": 2},), None))
    assert report.world().endswith("asynchronous; arrays in symmetric memory")


def test_one_route_is_said_once() -> None:
    found = described(REPORTS[:1], Layout((0,)), ("auto",))
    assert in_words(found).startswith("1 Tesla <T>, NCCL 2.28.3; route backend (")
