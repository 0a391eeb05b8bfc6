"""How `kfcomm.transports.nccl` asks NCCL for things: with a stand-in for CuPy's module that writes down what it hears.

NCCL's own behaviour is in ``tests/gpu/test_nccl.py``.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from kfcomm.errors import TransportError
from kfcomm.transports import nccl
from kfcomm.transports.base import BackendMaker, CollectiveBackend, Part
from kfcomm.transports.nccl import Nccl
from kfcomm.types import Op, Verb

STREAM = SimpleNamespace(ptr=0x57)


class NcclError(RuntimeError):
    """Of the stand-in, as CuPy's."""


class Communicator:
    """With the signatures of ``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: None = None) -> None:  # noqa: N803
        self.log: list[Any] = [("connect", ndev, commId, rank)]
        self.fails: dict[str, Callable[[], object]] = {}

    def _note(self, *call: Any) -> None:
        self.log.append(call)
        self.fails.get(call[0], lambda: None)()

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        self._note("allReduce", sendbuf, recvbuf, count, datatype, op, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._note("reduce", sendbuf, recvbuf, count, datatype, op, root, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._note("broadcast", sendbuff, recvbuff, count, datatype, root, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        self._note("reduceScatter", sendbuf, recvbuf, recvcount, datatype, op, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        self._note("allGather", sendbuf, recvbuf, count, datatype, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._note("send", sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._note("recv", recvbuf, count, datatype, peer, stream)

    def check_async_error(self) -> None:
        self.fails.get("check_async_error", lambda: None)()

    def abort(self) -> None:
        self._note("abort")

    def destroy(self) -> None:
        self._note("destroy")


class Capture:
    """A stream that captures what its communicator is asked, and the graph of it."""

    ptr = 0xCA

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._log: list[Any] = []

    def begin_capture(self) -> None:
        self._cuda.made[-1].fails.get("begin_capture", lambda: None)()
        self._log = self._cuda.made[-1].log
        self._cuda.made[-1].log = []

    def end_capture(self) -> Any:
        communicator = self._cuda.made[-1]
        captured, communicator.log = communicator.log, self._log
        graph = Graph(communicator, captured)
        self._cuda.graphs.add(graph)
        return graph


class Graph:
    """Captured calls of a communicator, which a launch logs as one call of a CUDA graph."""

    def __init__(self, communicator: Communicator, captured: list[Any]) -> None:
        self._communicator = communicator
        self._captured = captured

    def launch(self, stream: Any) -> None:
        self._communicator._note("graph", stream.ptr, *self._captured)


class Cuda:
    """A fake of ``cupy.cuda``; its constants of NCCL are those of nccl.h."""

    def Stream(self, *, non_blocking: bool) -> Capture:  # noqa: N802
        assert non_blocking
        return Capture(self)

    def __init__(self) -> None:
        self.made: list[Communicator] = []
        self.current: list[int] = []
        self.graphs: WeakSet[Graph] = WeakSet()
        self.nccl = SimpleNamespace(
            available=True,
            NcclError=NcclError,
            NcclCommunicator=self._connect,
            get_unique_id=lambda: b"i" * 128,
            groupStart=lambda: self.made[-1]._note("groupStart"),
            groupEnd=lambda: self.made[-1]._note("groupEnd"),
            NCCL_INT8=0,
            NCCL_UINT8=1,
            NCCL_INT32=2,
            NCCL_UINT32=3,
            NCCL_INT64=4,
            NCCL_UINT64=5,
            NCCL_FLOAT16=6,
            NCCL_FLOAT32=7,
            NCCL_FLOAT64=8,
            NCCL_BFLOAT16=9,
            NCCL_SUM=0,
            NCCL_PROD=1,
            NCCL_MAX=2,
            NCCL_MIN=3,
            NCCL_AVG=4,
        )

    def _connect(self, *args: Any) -> Communicator:
        assert self.current == [5]
        self.made.append(Communicator(*args))
        return self.made[-1]

    def Device(self, ordinal: int) -> Cuda:  # noqa: N802
        self._next = ordinal
        return self

    def __enter__(self) -> None:
        self.current.append(self._next)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


class Memory:
    """Flat memory of CuPy, as far as it matters."""

    def __init__(self, address: int, size: int, dtype: str) -> None:
        self.data = SimpleNamespace(ptr=address)
        self.size = size
        self.dtype = np.dtype(dtype) if dtype != "bfloat16" else SimpleNamespace(name="bfloat16", itemsize=2)
        self.nbytes = size * self.dtype.itemsize
        self._name = dtype

    def __getitem__(self, part: slice) -> Memory:
        begin, end, _ = part.indices(self.size)
        return Memory(self.data.ptr + begin * self.dtype.itemsize, end - begin, self._name)


class Device:
    """The rank's device: number 5."""

    ordinal = 5

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []

    def copy(self, source: Memory, target: Memory, stream: Any) -> None:
        assert stream is STREAM
        assert source.nbytes == target.nbytes
        self.copies.append((source.data.ptr, target.data.ptr, source.nbytes))


class Bench:
    """A backend, and what it was asked."""

    def __init__(self, rank: int = 0, size: int = 3) -> None:
        self.cuda = Cuda()
        self.device = Device()
        maker: BackendMaker = Nccl(self.cuda)
        device: Any = self.device
        self.backend: CollectiveBackend = maker.connect(b"i" * 128, rank, size, device)
        self.communicator = self.cuda.made[-1]
        assert self.communicator.log.pop() == ("connect", size, b"i" * 128, rank)

    def launch(self, verb: Verb, parts: Sequence[Part], op: Op | None = None, root: int = -1) -> list[Any]:
        self.backend.launch(verb, parts, op, root, STREAM)
        log, self.communicator.log = self.communicator.log, []
        assert self.cuda.current == []
        return log


def memory(size: int, dtype: str, address: int = 0x1000) -> Memory:
    return Memory(address, size, dtype)


def sum_of(dtype: str = "f4", size: int = 4) -> list[Part]:
    return [Part(memory(size, dtype), memory(size, dtype, 0x2000))]


# -------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("dtype", "count", "number"),
    [
        ("i1", 4, 0),
        ("u1", 4, 1),
        ("i4", 4, 2),
        ("u4", 4, 3),
        ("i8", 4, 4),
        ("u8", 4, 5),
        ("f2", 4, 6),
        ("f4", 4, 7),
        ("f8", 4, 8),
        ("bfloat16", 4, 9),
        ("c8", 8, 7),
        ("c16", 8, 8),
    ],
)
def test_types_of_numbers(dtype: str, count: int, number: int) -> None:
    bench = Bench()
    assert bench.launch(Verb.ALL_REDUCE, sum_of(dtype), Op.SUM) == [
        ("allReduce", 0x1000, 0x2000, count, number, 0, 0x57)
    ]
    scattered = [Part(memory(12, dtype), memory(4, dtype, 0x2000))]
    assert bench.launch(Verb.REDUCE_SCATTER, scattered, Op.MIN) == [
        ("reduceScatter", 0x1000, 0x2000, count, number, 3, 0x57)
    ]


@pytest.mark.parametrize(("op", "number"), [(Op.SUM, 0), (Op.PROD, 1), (Op.MAX, 2), (Op.MIN, 3), (Op.AVG, 4)])
def test_ops(op: Op, number: int) -> None:
    parts = [Part(memory(4, "f4"), None)]
    assert Bench().launch(Verb.REDUCE, parts, op, 2) == [("reduce", 0x1000, 0, 4, 7, number, 2, 0x57)]


def test_the_average_of_one_rank_is_its_sum() -> None:
    assert Bench(size=1).launch(Verb.ALL_REDUCE, sum_of("f8"), Op.AVG) == [("allReduce", 0x1000, 0x2000, 4, 8, 0, 0x57)]


@pytest.mark.parametrize(("dtype", "nbytes"), [("?", 4), ("i2", 8), ("c16", 64), ("bfloat16", 8)])
def test_moving_verbs_move_bytes(dtype: str, nbytes: int) -> None:
    bench = Bench(rank=1)
    parts = [Part(memory(4, dtype), memory(12, dtype, 0x2000))]
    assert bench.launch(Verb.ALL_GATHER, parts) == [("allGather", 0x1000, 0x2000, nbytes, 1, 0x57)]
    parts = [Part(memory(4, dtype), memory(4, dtype, 0x2000))]
    assert bench.launch(Verb.BROADCAST, parts, root=1) == [("broadcast", 0x1000, 0x2000, nbytes, 1, 1, 0x57)]
    assert bench.launch(Verb.BROADCAST, parts, root=0) == [("broadcast", 0x2000, 0x2000, nbytes, 1, 0, 0x57)]
    assert bench.launch(Verb.GATHER, [Part(memory(4, dtype), None)], root=2) == [
        ("groupStart",),
        ("send", 0x1000, nbytes, 1, 2, 0x57),
        ("groupEnd",),
    ]


def test_gather_on_its_root() -> None:
    bench = Bench(rank=1)
    assert bench.launch(Verb.GATHER, [Part(memory(4, "i2"), memory(12, "i2", 0x2000))], root=1) == [
        ("groupStart",),
        ("recv", 0x2010, 8, 1, 2, 0x57),
        ("recv", 0x2000, 8, 1, 0, 0x57),
        ("groupEnd",),
    ]
    assert bench.device.copies == [(0x1000, 0x2008, 8)]


def test_all_to_all() -> None:
    bench = Bench(rank=1)
    assert bench.launch(Verb.ALL_TO_ALL, [Part(memory(12, "i2"), memory(12, "i2", 0x2000))]) == [
        ("groupStart",),
        ("send", 0x1010, 8, 1, 2, 0x57),
        ("recv", 0x2010, 8, 1, 2, 0x57),
        ("send", 0x1000, 8, 1, 0, 0x57),
        ("recv", 0x2000, 8, 1, 0, 0x57),
        ("groupEnd",),
    ]
    assert bench.device.copies == [(0x1008, 0x2008, 8)]


def test_alone_there_is_nothing_to_send() -> None:
    bench = Bench(size=1)
    both = [Part(memory(4, "i2"), memory(4, "i2", 0x2000))]
    assert bench.launch(Verb.ALL_TO_ALL, both) == []
    assert bench.launch(Verb.GATHER, both, root=0) == []
    assert bench.device.copies == [(0x1000, 0x2000, 8)] * 2


def test_several_parts_are_one_group_and_empty_ones_are_left_out() -> None:
    bench = Bench()
    parts = [Part(memory(size, "f4"), memory(size, "f4", 0x2000)) for size in (4, 0, 2)]
    assert bench.launch(Verb.ALL_REDUCE, parts, Op.SUM) == [
        ("groupStart",),
        ("allReduce", 0x1000, 0x2000, 4, 7, 0, 0x57),
        ("allReduce", 0x1000, 0x2000, 2, 7, 0, 0x57),
        ("groupEnd",),
    ]
    assert bench.launch(Verb.ALL_REDUCE, parts[1:], Op.SUM) == [("allReduce", 0x1000, 0x2000, 2, 7, 0, 0x57)]
    assert bench.launch(Verb.ALL_REDUCE, parts[1:2], Op.SUM) == []
    assert bench.launch(Verb.GATHER, [Part(memory(0, "f4"), None)], root=1) == []


@pytest.mark.parametrize(
    ("verb", "op", "root", "call"),
    [
        (Verb.ALL_REDUCE, Op.SUM, -1, ("allReduce", 0x1000, 0x2000, 4, 7, 0, 0x57)),
        (Verb.REDUCE, Op.MAX, 2, ("reduce", 0x1000, 0x2000, 4, 7, 2, 2, 0x57)),
        (Verb.REDUCE_SCATTER, Op.AVG, -1, ("reduceScatter", 0x1000, 0x2000, 12, 7, 4, 0x57)),
        (Verb.ALL_GATHER, None, -1, ("allGather", 0x1000, 0x2000, 16, 1, 0x57)),
        (Verb.BROADCAST, None, 0, ("broadcast", 0x1000, 0x2000, 16, 1, 0, 0x57)),
        (Verb.BROADCAST, None, 2, ("broadcast", 0x2000, 0x2000, 16, 1, 2, 0x57)),
    ],
)
def test_prepared_launches(verb: Verb, op: Op | None, root: int, call: tuple[Any, ...]) -> None:
    bench = Bench()
    launch = bench.backend.prepared(verb, (4, 12), np.dtype("f4"), op, root)
    assert launch is not None
    for _ in range(2):
        launch(0x1000, 0x2000, 0x57)
    assert bench.communicator.log == [call] * 2
    assert bench.backend.failure() is None
    bench.communicator.fails[call[0]] = _raise(NcclError("no"))
    for _ in range(2):
        with pytest.raises(TransportError, match=f"NCCL could not launch {verb}: no"):
            launch(0x1000, 0x2000, 0x57)
    assert len(bench.communicator.log) == 3
    assert bench.backend.failure() == f"NCCL could not launch {verb}: no"


def test_launches_that_are_not_prepared() -> None:
    bench = Bench()
    assert bench.backend.prepared(Verb.GATHER, (4, 12), np.dtype("f4"), None, 0) is None
    assert bench.backend.prepared(Verb.ALL_TO_ALL, (12, 12), np.dtype("f4"), None, -1) is None
    assert bench.backend.prepared(Verb.ALL_REDUCE, (0, 0), np.dtype("f4"), Op.SUM, -1) is None
    launch = bench.backend.prepared(Verb.ALL_REDUCE, (4, 4), np.dtype("f4"), Op.SUM, -1)
    bench.backend.abort()
    with pytest.raises(TransportError, match="aborted or closed"):
        launch(0x1000, 0x2000, 0x57)  # type: ignore[misc]


def group_of(stream: int) -> list[Any]:
    """Calls of the launch of two parts, of 4 and 2 elements."""
    first = ("allReduce", 0x1000, 0x3000, 4, 7, 0, stream)
    return [("groupStart",), first, ("allReduce", 0x2000, 0x4000, 2, 7, 0, stream), ("groupEnd",)]


def test_prepared_groups_with_the_same_memory_become_a_graph() -> None:
    bench = Bench(size=1)
    launch = bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    assert launch is not None
    log = bench.communicator.log
    launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
    assert log == group_of(0x57)
    for _ in range(2):
        launch([0x1000, 0x2000], [0x3000, 0x4000], 0x58)
    assert log[4:] == [("graph", 0x58, *group_of(0xCA))] * 2
    launch([0x1000, 0x2000], [0x3000, 0x4444], 0x57)
    launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
    assert log[-4:] == group_of(0x57)
    launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
    assert log[-1] == ("graph", 0x57, *group_of(0xCA))
    bench.backend.close()
    with pytest.raises(TransportError, match="aborted or closed"):
        launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)


def test_a_graph_ends_with_its_launch() -> None:
    bench = Bench(size=1)
    launch = bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    assert launch is not None
    for _ in range(2):
        launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
    assert len(bench.cuda.graphs) == 1
    del launch  # as where the arrays of a name change
    gc.collect()
    assert len(bench.cuda.graphs) == 0


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_nccl_ends_after_its_graphs(ending: str) -> None:
    bench = Bench(size=1)
    launch = bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    assert launch is not None
    for _ in range(2):
        launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
    left: list[int] = []
    bench.communicator.fails["abort" if ending == "abort" else "destroy"] = lambda: left.append(len(bench.cuda.graphs))
    getattr(bench.backend, ending)()
    assert left == [0]


def test_memory_that_changes_all_the_time_is_not_captured() -> None:
    bench = Bench(size=1)
    launch = bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    assert launch is not None

    def num_graphs(times: int) -> int:
        """Replays of so many launches with memory that no launch had before."""
        bench.communicator.log.clear()
        target = next(targets)
        for _ in range(times):
            launch([0x1000, 0x2000], [target, 0x4000], 0x57)
        return sum(call[0] == "graph" for call in bench.communicator.log)

    targets = itertools.count(0x10000, 0x100)
    assert [num_graphs(1) for _ in range(9)] == [0] * 9
    assert [num_graphs(2) for _ in range(6)] == [1, 1, 1, 0, 0, 0]
    targets = itertools.count(0x90000, 0x100)
    bench = Bench(size=1)
    launch = bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    assert launch is not None
    assert [num_graphs(70) for _ in range(5)] == [69] * 5


def test_prepared_groups_go_on_where_nothing_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(size=1)
    bench.communicator.fails["begin_capture"] = _raise(RuntimeError("no"))
    several = Bench()
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    for one in (bench, several):
        launch = one.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
        assert launch is not None
        for _ in range(3):
            launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
        assert one.communicator.log == group_of(0x57) * 3
        assert one.backend.note.startswith("batches are launched without a CUDA graph: ")
    assert caplog.text.count("not replayed as a CUDA graph: NCCL could not capture it: no") == 1
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    launch = several.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    assert launch is not None
    for _ in range(2):
        launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)
    assert several.communicator.log[-1][0] == "graph"
    assert bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 0), np.dtype("f4"), Op.SUM) is None
    assert bench.backend.prepared_group(Verb.BROADCAST, (4, 2), np.dtype("f4"), None) is None


def test_a_prepared_group_that_fails_ends_all() -> None:
    bench = Bench()
    launch = bench.backend.prepared_group(Verb.ALL_REDUCE, (4, 2), np.dtype("f4"), Op.SUM)
    bench.communicator.fails["groupEnd"] = _raise(NcclError("late"))
    with pytest.raises(TransportError, match="NCCL could not launch all_reduce: late"):
        launch([0x1000, 0x2000], [0x3000, 0x4000], 0x57)  # type: ignore[misc]
    assert bench.backend.failure() == "NCCL could not launch all_reduce: late"


def test_streams_by_number() -> None:
    bench = Bench()
    bench.backend.launch(Verb.ALL_REDUCE, sum_of(), Op.SUM, -1, 0x99)
    assert bench.communicator.log == [("allReduce", 0x1000, 0x2000, 4, 7, 0, 0x99)]


def test_capability() -> None:
    maker = Nccl(Cuda())
    assert maker.name == "nccl"
    names = ("bool", "int8", "int16", "uint16", "int32", "int64", "uint64", "float16", "float32", "complex64")
    for verb in (Verb.BROADCAST, Verb.ALL_GATHER, Verb.GATHER, Verb.ALL_TO_ALL):
        assert all(maker.supports(verb, np.dtype(name), None) for name in names)
        assert not maker.supports(verb, np.dtype("f4"), Op.SUM)
    can = {op: [name for name in names if maker.supports(Verb.ALL_REDUCE, np.dtype(name), op)] for op in (*Op, None)}
    integers = ["int8", "int32", "int64", "uint64"]
    assert can == {
        Op.SUM: [*integers, "float16", "float32", "complex64"],
        Op.AVG: ["float16", "float32", "complex64"],
        **{op: [*integers, "float16", "float32"] for op in (Op.MIN, Op.MAX, Op.PROD)},
        **{op: [] for op in (Op.AND, Op.OR, Op.XOR, None)},
    }
    assert not maker.supports(Verb.SCATTER, np.dtype("f4"), None)
    assert not maker.supports(Verb.BARRIER, np.dtype("f4"), None)


# -------------------------------------------------------------------- what goes wrong


def _raise(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled"), "NCCL could not launch all_reduce: NCCL_ERROR_SYSTEM_ERROR"),
        (KeyError(8), r"NCCL could not launch all_reduce: status 8 \(NCCL_DEBUG=WARN"),
    ],
)
def test_a_launch_that_fails_ends_the_group(error: Exception, said: str) -> None:
    bench = Bench()
    bench.communicator.fails["allReduce"] = _raise(error)
    with pytest.raises(TransportError, match=said):
        bench.launch(Verb.ALL_REDUCE, sum_of() * 2, Op.SUM)
    assert [call[0] for call in bench.communicator.log] == ["groupStart", "allReduce", "groupEnd"]
    assert bench.cuda.current == []
    bench.communicator.fails.clear()
    with pytest.raises(TransportError, match=said):
        bench.launch(Verb.ALL_REDUCE, sum_of(), Op.SUM)
    assert said[:28] in (bench.backend.failure() or "")


def test_a_group_of_launches_that_fails() -> None:
    bench = Bench()
    bench.communicator.fails["groupEnd"] = _raise(NcclError("late"))
    with pytest.raises(TransportError, match="late"):
        bench.launch(Verb.ALL_REDUCE, sum_of() * 2, Op.SUM)
    bench = Bench()
    bench.communicator.fails["groupEnd"] = _raise(NcclError("late"))
    bench.communicator.fails["allReduce"] = _raise(NcclError("early"))
    with pytest.raises(TransportError, match="early"):
        bench.launch(Verb.ALL_REDUCE, sum_of() * 2, Op.SUM)


@pytest.mark.parametrize(
    ("verb", "dtype", "op", "said"),
    [
        (Verb.ALL_REDUCE, "i2", Op.SUM, "does not reduce int16 by sum"),
        (Verb.ALL_REDUCE, "i4", Op.XOR, "does not reduce int32 by xor"),
        (Verb.SCATTER, "f4", None, "NCCL has no scatter"),
    ],
)
def test_unsupported_by_nccl(verb: Verb, dtype: str, op: Op | None, said: str) -> None:
    with pytest.raises(TransportError, match=said):
        Bench().launch(verb, sum_of(dtype), op)


def test_failures_of_nccls_own_threads() -> None:
    bench = Bench()
    assert bench.backend.failure() is None
    bench.communicator.fails["check_async_error"] = _raise(KeyError(7))  # ncclInProgress
    assert bench.backend.failure() is None
    bench.communicator.fails["check_async_error"] = _raise(NcclError("remote process exited"))
    assert bench.backend.failure() == "NCCL could not go on: remote process exited"
    bench.communicator.fails.clear()
    assert bench.backend.failure() == "NCCL could not go on: remote process exited"
    with pytest.raises(TransportError, match="remote process exited"):
        bench.launch(Verb.ALL_REDUCE, sum_of(), Op.SUM)


def test_aborting_and_closing() -> None:
    bench = Bench()
    bench.communicator.fails["abort"] = _raise(NcclError("no"))
    bench.backend.abort()
    bench.backend.abort()
    bench.backend.close()
    assert bench.communicator.log == [("abort",)]
    bench.communicator.fails["check_async_error"] = _raise(AssertionError("asked after the end"))
    assert bench.backend.failure() is None
    with pytest.raises(TransportError, match="aborted or closed"):
        bench.launch(Verb.ALL_REDUCE, sum_of(), Op.SUM)

    bench = Bench()
    bench.communicator.fails["destroy"] = _raise(NcclError("no"))
    bench.backend.close()
    bench.backend.close()
    bench.backend.abort()
    assert bench.communicator.log == [("destroy",)]


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_aborting_a_launch_that_waits_for_others(ends_by_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread is inside of NCCL; either what it waits for comes, or NCCL is aborted all the same."""
    bench = Bench()
    is_inside, goes_on, errors = threading.Event(), threading.Event(), list[Exception]()

    def stuck() -> None:
        is_inside.set()
        goes_on.wait()
        if not ends_by_itself:
            raise NcclError("aborted")

    def launch() -> None:
        try:
            bench.launch(Verb.ALL_REDUCE, sum_of(), Op.SUM)
        except TransportError as error:
            errors.append(error)

    bench.communicator.fails["allReduce"] = stuck
    bench.communicator.fails["abort"] = goes_on.set
    if not ends_by_itself:
        monkeypatch.setattr(nccl, "ABORT_PATIENCE_S", 0.0)
    launching = threading.Thread(target=launch)
    launching.start()
    is_inside.wait()
    assert bench.backend.failure() is None  # does not wait
    if ends_by_itself:
        goes_on.set()
    bench.backend.abort()
    launching.join()
    assert [str(error) for error in errors] == ([] if ends_by_itself else ["NCCL could not launch all_reduce: aborted"])


# -------------------------------------------------------------------- meeting


def test_identities() -> None:
    cuda = Cuda()
    assert Nccl(cuda).identity() == b"i" * 128
    cuda.nccl.get_unique_id = _raise(NcclError("no network"))
    with pytest.raises(TransportError, match="NCCL could not make an id for a group: no network"):
        Nccl(cuda).identity()


@pytest.mark.parametrize("error", [NcclError("no network"), ValueError("commId length 12 != 128")])
def test_connecting_fails(error: Exception) -> None:
    cuda, device = Cuda(), Device()
    cuda.nccl.NcclCommunicator = lambda *_: _raise(error)()
    with pytest.raises(TransportError, match=f"could not connect rank 1 of 2: {error}"):
        Nccl(cuda).connect(b"", 1, 2, device)  # type: ignore[arg-type]
    assert cuda.current == []


def test_without_cupy_or_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(TransportError, match="used through CuPy, which cannot be loaded"):
        Nccl()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", SimpleNamespace(available=False))
    with pytest.raises(TransportError, match="CuPy finds no NCCL"):
        Nccl()
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", cuda.nccl)
    assert Nccl().identity() == b"i" * 128
