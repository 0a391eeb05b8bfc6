"""`FakeFabric`: launches are matched by order, faults are scripted, and misuse of a real backend is reported.

What the verbs give is in `tests.transports.test_conforming`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import TransportError
from kfcomm.testing import FakeArray, FakeDevice, FakeFabric
from kfcomm.transports.base import BackendMaker, Part
from kfcomm.types import Op, Verb
from tests.transports.conforming import Rank, connected


class Trio:
    """Three ranks, each with a source of 3 elements and memory for the sum."""

    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.devices = [FakeDevice(rank) for rank in range(3)]
        maker: BackendMaker = self.fabric
        self.ranks = connected(maker, self.devices)
        self.sources = [device.array(np.full(3, rank, np.float32)) for rank, device in enumerate(self.devices)]
        self.targets = [device.array(np.zeros(3, np.float32)) for device in self.devices]

    def launch(self, rank: int, verb: Verb = Verb.ALL_REDUCE, op: Op | None = Op.SUM, root: int = -1) -> None:
        part = Part(self.sources[rank], self.targets[rank])
        self.ranks[rank].backend.launch(verb, [part], op, root, self.ranks[rank].stream)

    def read(self, rank: int) -> list[float]:
        with self.devices[rank].working_on(self.ranks[rank].stream):
            return self.targets[rank].get().tolist()

    def is_idle(self, rank: int) -> bool:
        return not self.ranks[rank].stream.num_waiting


@pytest.fixture
def trio() -> Iterator[Trio]:
    made = Trio()
    yield made
    assert made.fabric.violations == []
    for device in made.devices:
        assert device.violations == []
        assert device.num_waiting == device.num_promised == 0


def _violation(fabric: FakeFabric) -> str:
    (said,) = fabric.violations
    fabric.violations.clear()
    return said


def _abort(trio: Trio) -> None:
    for rank in trio.ranks:
        rank.backend.abort()


# -------------------------------------------------------------------- when things run


def test_it_runs_when_all_have_launched_and_come_to_it(trio: Trio) -> None:
    trio.devices[1].hold(trio.ranks[1].stream)
    for rank in range(3):
        trio.launch(rank)
        assert [trio.is_idle(one) for one in range(3)] == [one > rank for one in range(3)]
    assert all(np.isnan(trio.targets[0].memory))  # under way: what is there is neither old nor new
    trio.devices[1].release(trio.ranks[1].stream)
    assert [trio.read(rank) for rank in range(3)] == [[3, 3, 3]] * 3


def test_later_launch_waits_for_the_earlier_one(trio: Trio) -> None:
    done: list[str] = []
    trio.launch(0)
    trio.devices[0].notify(trio.ranks[0].stream, lambda error: done.append(f"told {error}"))
    trio.launch(0)
    trio.launch(1)
    trio.launch(2)
    assert (done, trio.is_idle(0), trio.is_idle(1)) == (["told None"], False, True)
    trio.launch(1)
    trio.launch(2)
    assert trio.is_idle(0)
    assert [(rank, str(what)) for _, rank, what in trio.fabric.launched][:2] == [
        (0, "all_reduce sum of 3 float32"),
        (0, "all_reduce sum of 3 float32"),
    ]


def test_inputs_are_those_of_when_the_stream_came_there(trio: Trio) -> None:
    for rank in range(3):
        device, stream, source = trio.devices[rank], trio.ranks[rank].stream, trio.sources[rank]
        device.hold(stream)
        device.run(stream, lambda source=source: source.memory.fill(7), writes=[source])
        trio.launch(rank)
        device.run(stream, lambda source=source: source.memory.fill(0), writes=[source])
    for rank in range(3):
        trio.devices[rank].release(trio.ranks[rank].stream)
    assert trio.read(0) == [21, 21, 21]


def test_groups_do_not_meet(trio: Trio) -> None:
    pair = connected(trio.fabric, trio.devices[:2])
    for rank in range(2):
        pair[rank].backend.launch(
            Verb.BROADCAST, [Part(trio.sources[rank], trio.targets[rank])], None, 1, trio.ranks[rank].stream
        )
    assert trio.read(0) == [1, 1, 1]
    assert trio.fabric.num_open == 5
    for one in (*pair, *trio.ranks):
        one.backend.close()
        one.backend.close()
    assert trio.fabric.num_open == 0
    with pytest.raises(TransportError, match="rank 0 has aborted or closed"):
        trio.launch(0)


def test_capability() -> None:
    fabric = FakeFabric()
    assert fabric.name == "fake"
    for verb, dtype, op, expected in (
        (Verb.ALL_REDUCE, "f4", Op.AVG, True),
        (Verb.ALL_REDUCE, "i4", Op.MAX, True),
        (Verb.ALL_REDUCE, "i4", Op.AVG, False),
        (Verb.ALL_REDUCE, "i4", Op.AND, False),
        (Verb.ALL_REDUCE, "i2", Op.SUM, False),
        (Verb.REDUCE, "?", Op.MAX, False),
        (Verb.REDUCE_SCATTER, "c8", Op.SUM, False),
        (Verb.ALL_GATHER, "c8", None, True),
        (Verb.ALL_TO_ALL, "?", None, True),
        (Verb.SCATTER, "f4", None, False),
        (Verb.BARRIER, "f4", None, False),
    ):
        assert fabric.supports(verb, np.dtype(dtype), op) is expected, (verb, dtype, op)


# -------------------------------------------------------------------- faults


def test_a_rank_that_stops_leaves_the_others_hanging_until_they_abort(trio: Trio) -> None:
    trio.launch(1)
    trio.fabric.stop(1)
    trio.launch(0)
    trio.launch(2)
    assert [trio.is_idle(rank) for rank in range(3)] == [False] * 3
    assert [rank.backend.failure() for rank in trio.ranks] == [None] * 3
    trio.ranks[0].backend.abort()
    trio.ranks[0].backend.abort()
    assert [trio.is_idle(rank) for rank in range(3)] == [True, False, False]
    assert np.isnan(trio.read(0)).all()
    with pytest.raises(TransportError, match="rank 0 has aborted"):
        trio.launch(0)
    _abort(trio)
    assert trio.fabric.num_open == 0


def test_a_device_stops_in_every_group(trio: Trio) -> None:
    pair = connected(trio.fabric, trio.devices[1:])
    trio.fabric.stop(trio.devices[2])
    for rank in range(2):
        x = trio.sources[rank + 1]
        pair[rank].backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.SUM, -1, pair[rank].stream)
    assert [one.stream.num_waiting for one in pair] == [1, 1]
    for one in pair:
        one.backend.abort()
    assert [one.stream.num_waiting for one in pair] == [0, 0]


def test_aborted_launch_is_skipped(trio: Trio) -> None:
    trio.devices[0].hold(trio.ranks[0].stream)
    trio.launch(0)
    trio.ranks[0].backend.abort()
    trio.launch(1)
    trio.launch(2)
    trio.devices[0].release(trio.ranks[0].stream)
    assert trio.read(0) == [0, 0, 0]
    assert not trio.is_idle(1)
    _abort(trio)


def test_a_breakdown(trio: Trio) -> None:
    trio.launch(0)
    trio.fabric.break_down("the cable is out")
    with pytest.raises(TransportError, match="the cable is out"):
        trio.launch(1)
    assert [rank.backend.failure() for rank in trio.ranks] == ["the cable is out"] * 3
    assert not trio.is_idle(0)
    _abort(trio)


def test_a_stream_that_fails_never_comes_there(trio: Trio) -> None:
    def fails() -> None:
        raise ArithmeticError("an illegal instruction")

    trio.devices[0].run(trio.ranks[0].stream, fails)
    for rank in range(3):
        trio.launch(rank)
    assert [trio.is_idle(rank) for rank in range(3)] == [True, False, False]
    _abort(trio)


# -------------------------------------------------------------------- what must not be


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"op": Op.MAX}, "all_reduce max of 3 float32"),
        ({"verb": Verb.BROADCAST, "op": None, "root": 2}, "broadcast of 3 float32 with root 2"),
    ],
)
def test_different_launches_at_one_place(trio: Trio, other: dict[str, Any], said: str) -> None:
    trio.launch(0)
    trio.launch(1)
    with pytest.raises(TransportError, match=said):
        trio.launch(2, **other)
    assert _violation(trio.fabric) == (
        f"group 0: at place 0 rank 0 launched all_reduce sum of 3 float32, rank 2 launched {said}"
    )
    with pytest.raises(TransportError, match="at place 0 rank 0 launched"):
        trio.launch(0)
    assert "at place 0" in (trio.ranks[1].backend.failure() or "")
    assert not trio.is_idle(1)
    _abort(trio)


def test_different_sizes_dtypes_and_numbers_of_parts_at_one_place() -> None:
    def launch(rank: Rank, *arrays: FakeArray) -> None:
        rank.backend.launch(Verb.ALL_REDUCE, [Part(x, x) for x in arrays], Op.SUM, -1, rank.stream)

    for other in ([np.zeros(4)], [np.zeros(3, np.int64)], [np.zeros(3), np.zeros(3)]):
        fabric, devices = FakeFabric(), [FakeDevice(rank) for rank in range(2)]
        ranks = connected(fabric, devices)
        launch(ranks[0], devices[0].array(np.zeros(3)))
        with pytest.raises(TransportError, match="rank 0 launched all_reduce sum of 3 float64, rank 1 launched"):
            launch(ranks[1], *map(devices[1].array, other))
        assert len(fabric.violations) == 1


def _impossible() -> dict[str, Callable[[Trio, FakeArray, FakeArray], tuple[Any, ...]]]:
    """Expected message: the arguments of a launch of rank 0."""
    return {
        "of no part": lambda t, x, y: (Verb.ALL_REDUCE, [], Op.SUM, -1),
        "with root 0 in a group of 3": lambda t, x, y: (Verb.ALL_REDUCE, [Part(x, y)], Op.SUM, 0),
        "with root -1 in a group of 3": lambda t, x, y: (Verb.REDUCE, [Part(x, y)], Op.SUM, -1),
        "with root 3 in a group of 3": lambda t, x, y: (Verb.REDUCE, [Part(x, y)], Op.SUM, 3),
        "with op and, which is not supported": lambda t, x, y: (Verb.ALL_REDUCE, [Part(x, y)], Op.AND, -1),
        "with op None, which is not supported": lambda t, x, y: (Verb.ALL_REDUCE, [Part(x, y)], None, -1),
        "with op sum, which is not supported": lambda t, x, y: (Verb.BROADCAST, [Part(x, y)], Op.SUM, 0),
        "of 3 elements into 2": lambda t, x, y: (Verb.ALL_REDUCE, [Part(x, y[:2])], Op.SUM, -1),
        "of 2 elements into 3": lambda t, x, y: (Verb.ALL_TO_ALL, [Part(x[:2], y)], None, -1),
        "of 3 elements into 3": lambda t, x, y: (Verb.ALL_GATHER, [Part(x, y)], None, -1),
        "without memory for a result": lambda t, x, y: (Verb.REDUCE, [Part(x, None)], Op.SUM, 0),
        "with memory for a result": lambda t, x, y: (Verb.REDUCE, [Part(x, y)], Op.SUM, 1),
        "overlaps that of its source": lambda t, x, y: (Verb.ALL_REDUCE, [Part(x[1:], x[:2])], Op.SUM, -1),
        "expected flat memory": lambda t, x, y: (Verb.ALL_REDUCE, [Part(x, np.zeros(3))], Op.SUM, -1),
        "expected flat memory of float32": lambda t, x, y: (
            Verb.ALL_REDUCE,
            [Part(x, y), Part(x.view("i4"), y.view("i4"))],
            Op.SUM,
            -1,
        ),
        "which is not on <FakeDevice 0>": lambda t, x, y: (Verb.ALL_REDUCE, [Part(t.sources[1], y)], Op.SUM, -1),
        "expected a stream of <FakeDevice 0>": lambda t, x, y: (
            Verb.ALL_REDUCE,
            [Part(x, y)],
            Op.SUM,
            -1,
            t.ranks[1].stream,
        ),
    }


@pytest.mark.parametrize("said", _impossible())
def test_launches_that_cannot_be(trio: Trio, said: str) -> None:
    verb, parts, op, root, *stream = _impossible()[said](trio, trio.sources[0], trio.targets[0])
    with pytest.raises(TransportError, match=said):
        trio.ranks[0].backend.launch(verb, parts, op, root, *(stream or [trio.ranks[0].stream]))
    assert said in _violation(trio.fabric)


def test_closing_while_something_is_under_way(trio: Trio) -> None:
    trio.launch(0)
    trio.ranks[0].backend.close()
    assert _violation(trio.fabric) == "group 0: rank 0 closed while it was at all_reduce sum of 3 float32"
    _abort(trio)


def test_results_on_a_stream_that_has_not_waited(trio: Trio) -> None:
    """Read the memory that the launch wrote, on the device's default stream."""
    for rank in range(3):
        trio.launch(rank)
    trio.targets[0].get()
    (said,) = trio.devices[0].violations
    trio.devices[0].violations.clear()
    assert said == "<FakeStream 0.0> reads memory that <FakeStream 0.1> wrote, and has not waited for it"


def test_launches_do_not_keep_their_memory(trio: Trio) -> None:
    device = trio.devices[0]
    x = device.array(np.zeros(3, np.float32))
    device.hold(trio.ranks[0].stream)
    trio.ranks[0].backend.launch(Verb.ALL_REDUCE, [Part(x, x)], Op.SUM, -1, trio.ranks[0].stream)
    del x
    device.release(trio.ranks[0].stream)
    assert {"freed" in said for said in device.violations} == {True}
    device.violations.clear()
    _abort(trio)


# -------------------------------------------------------------------- meeting


def test_connecting_waits_for_all() -> None:
    fabric, devices = FakeFabric(), [FakeDevice(rank) for rank in range(2)]
    identity = fabric.identity()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fabric.connect, identity, 0, 2, devices[0])
        second = fabric.connect(identity, 1, 2, devices[1])
        assert (first.result().rank, second.rank, fabric.num_open) == (0, 1, 2)


def test_refusing_ends_those_who_wait() -> None:
    fabric = FakeFabric()
    identity, errors = fabric.identity(), list[TransportError]()

    def wait() -> None:
        with pytest.raises(TransportError) as caught:
            fabric.connect(identity, 0, 2, FakeDevice())
        errors.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    fabric.refuse("no route to host")
    waiting.join()
    assert [str(error) for error in errors] == ["no route to host"]
    with pytest.raises(TransportError, match="no route"):
        fabric.identity()
    assert fabric.num_open == 0


@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [(1, 3, "rank 1 of 3 came to a group of 2"), (0, 2, "rank 0 of 2"), (2, 2, "rank 2 of 2"), (1, 2, "the device of")],
)
def test_one_that_cannot_belong_to_the_group(rank: int, size: int, said: str) -> None:
    fabric = FakeFabric()
    identity = fabric.identity()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fabric.connect, identity, 0, 2, FakeDevice(0, "same"))
        with fabric._meeting:
            fabric._meeting.wait_for(lambda: fabric._groups[identity].backends)
        with pytest.raises(TransportError, match=said):
            fabric.connect(identity, rank, size, FakeDevice(1, "same"))
        assert said in str(first.exception())


def test_groups_that_were_never_made() -> None:
    with pytest.raises(TransportError, match="no fake group"):
        FakeFabric().connect(b"?", 0, 1, FakeDevice())
