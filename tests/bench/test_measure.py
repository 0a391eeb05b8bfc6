"""Measurement of collectives in a world in memory: everything is measured, and a wrong element is found."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of
from kfcomm.bench.load import PERIOD, BenchLoad, contributions, first_wrong, reduced, tiled
from kfcomm.bench.measure import AsyncCaller, BlockingCaller, WrongResult, measure
from kfcomm.bench.memory import HostBenchMemory, memory_of, spoil
from kfcomm.bench.suite import COLLECTIVES, BenchPlace, CallMode, Event, Failed, MeasuredCase, Starting, Suite
from kfcomm.bench.workloads import WORKLOADS
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.types import Op, Verb

TINY = {"iterations": 2, "warmup": 1}
Wrap = Callable[[Any], Any]


async def measured(
    suite: Suite, size: int, wrap: Wrap = lambda comm: comm, events: list[Event] | None = None
) -> list[Event]:
    """The events of a benchmark in which each rank's communicator is ``wrap(comm)``."""
    events = [] if events is None else events
    async with world(size) as comms:
        await run_ranks(comms, lambda comm: measure(AsyncCaller(wrap(comm)), suite.cases(size), events.append))
    return events


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", [Verb.ALL_REDUCE, Verb.GATHER])
async def test_arrays_in_symmetric_memory(verb: Verb) -> None:
    """Made by the communicator; that the world shares no memory changes nothing."""
    made = []

    async def rank(comm: Any) -> None:
        def empty(shape: Any, dtype: Any) -> Any:
            made.append(np.empty(shape, dtype))
            return made[-1]

        caller = AsyncCaller(comm)
        suite = Suite(collectives=(verb,), sizes=(64, 1 << 16), device=BenchPlace.SYMMETRIC, **TINY)
        events: list[Event] = []
        await measure(caller, suite.cases(2), events.append, memory_of(suite.device, None, empty))
        assert len(results(events)) == 2 * (comm.rank == 0)

    async with world(2) as comms:
        assert (AsyncCaller(comms[0]).empty((2, 3), np.int32)).shape == (2, 3)
        await run_ranks(comms, rank)
    assert {array.nbytes for array in made} >= {64, 1 << 16}


def results(events: list[Event]) -> list[MeasuredCase]:
    return [event for event in events if isinstance(event, MeasuredCase)]


@pytest.fixture
def small_workload(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(WORKLOADS, "small", lambda: ((3, 5), (1,), (9000,), (2, 2, 2)))
    return "small"


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("verb", COLLECTIVES)
async def test_every_collective_is_measured_and_right(verb: Verb, size: int) -> None:
    suite = Suite((verb,), sizes=(240, 80_000), dtypes=("float32", "int16", "bfloat16"), **TINY)
    found = results(await measured(suite, size))
    assert [event.result.case for event in found] == suite.cases(size)
    assert all(len(event.result.times_s) == 2 and min(event.result.times_s) > 0 for event in found)


@pytest.mark.asyncio
@pytest.mark.parametrize("op", [op for op in Op if op is not Op.AVG])
async def test_every_op_is_right_on_integers(op: Op) -> None:
    suite = Suite(
        (Verb.ALL_REDUCE, Verb.REDUCE_SCATTER), sizes=(960,), dtypes=("int8", "uint64", "bool"), op=op, **TINY
    )
    if op in (Op.PROD, Op.SUM):
        suite = Suite(suite.collectives, sizes=(960,), dtypes=("int8", "uint64"), op=op, **TINY)
    assert len(results(await measured(suite, 3))) == len(suite.cases(3))


@pytest.mark.asyncio
@pytest.mark.parametrize("op", [Op.SUM, Op.AVG, Op.PROD, Op.MIN, Op.MAX])
async def test_every_op_is_right_on_floating_point_numbers(op: Op) -> None:
    suite = Suite(sizes=(960,), dtypes=("float16", "bfloat16", "float32", "float64"), op=op, **TINY)
    assert len(results(await measured(suite, 3))) == 4


@pytest.mark.asyncio
async def test_workloads_in_every_mode_and_strategy(small_workload: str) -> None:
    suite = Suite((), workloads=(small_workload,), strategies=("star", "ring"), **TINY)
    found = results(await measured(suite, 2))
    assert [event.result.case.mode for event in found] == [*CallMode, *CallMode]
    assert {event.result.case.nbytes for event in found} == {4 * 9024}


def test_the_blocking_interface(small_workload: str) -> None:
    suite = Suite(tuple(COLLECTIVES), sizes=(240,), workloads=(small_workload,), **TINY)
    events: list[Event] = []
    with sync_world(2) as comms:
        run_threads(comms, lambda comm: asyncio.run(measure(BlockingCaller(comm), suite.cases(2), events.append)))
    assert [event.result.case for event in results(events)] == suite.cases(2)


@pytest.mark.asyncio
async def test_events_tell_of_each_case_before_and_after() -> None:
    events = await measured(Suite(sizes=(4, 8), **TINY), 2)
    assert [type(event) for event in events] == [Starting, MeasuredCase] * 2


class Broken:
    """A communicator whose all_reduce is wrong on rank 1: once, from its third call on, in one element."""

    def __init__(self, comm: Any, spoil: Callable[[Any, Any], None]) -> None:
        self._comm = comm
        self._spoil = spoil
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Any, name: str | None = None, **options: Any) -> Any:
        if name is None or self._comm.rank != 1:
            return self._comm.all_reduce(x, name, **options)
        return self._late(x, name, options)

    async def _late(self, x: Any, name: str, options: dict[str, Any]) -> Any:
        found = await self._comm.all_reduce(x, name, **options)
        self._calls += 1
        if self._calls == 3:
            self._spoil(x, found)
        return found


def wrong_result(_: Any, found: Any) -> None:
    found[17] += 1


def changed_input(x: Any, _: Any) -> None:
    x[18] += 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("spoil", "words"),
    [(wrong_result, "rank 1: element 17 is"), (changed_input, "rank 1: the input was changed: element 18 is")],
)
async def test_a_wrong_element_of_one_rank_in_one_iteration_is_an_error_on_all(
    spoil: Callable[[Any, Any], None], words: str
) -> None:
    suite = Suite(sizes=(400, 800), iterations=3, warmup=0)
    events: list[Event] = []
    with pytest.raises(WrongResult):
        await measured(suite, 2, lambda comm: Broken(comm, spoil), events)
    assert not results(events)
    assert isinstance(events[-1], Failed)
    assert "all_reduce of 400 B (sum), float32" in events[-1].message
    assert words in events[-1].message
    assert len(events) == 2


def test_a_result_of_another_length_is_wrong() -> None:
    (case,) = Suite(sizes=(400,)).cases(2)
    load = BenchLoad.of(case, 0, 2, HostBenchMemory())
    assert load.fault([np.zeros(99, np.float32)]) == "99 elements, must be 100"


EXACT = {
    Op.SUM: sum,
    Op.AVG: lambda values: Fraction(sum(values), len(values)),
    Op.MIN: min,
    Op.MAX: max,
    Op.PROD: lambda values: functools.reduce(operator.mul, values),
    Op.AND: lambda values: functools.reduce(operator.and_, values),
    Op.OR: lambda values: functools.reduce(operator.or_, values),
    Op.XOR: lambda values: functools.reduce(operator.xor, values),
}
BITWISE = (Op.AND, Op.OR, Op.XOR)


def makes_sense(op: Op, name: str) -> bool:
    kind = "f" if name == "bfloat16" else dtype_of(name).kind
    if op in BITWISE:
        return kind in "iu"
    return kind == "f" or (kind in "iu" and op is not Op.AVG)


@pytest.mark.parametrize("size", [2, 3, 8, 100])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in Op for name in SUPPORTED_NAMES if makes_sense(op, name)])
def test_the_reduction_is_what_whole_numbers_give(op: Op, name: str, size: int) -> None:
    values = contributions(dtype_of(name), op, size)
    found = reduced(values, op)
    assert found.dtype == values.dtype
    for place in (*range(0, PERIOD, 700), PERIOD - 1):
        due = EXACT[op]([int(value) for value in values[:, place]])
        assert float(found[place]) == float(due)


def test_complex_numbers_are_added_in_both_parts() -> None:
    values = contributions(np.dtype(np.complex64), Op.SUM, 3)
    found = reduced(values, Op.SUM)
    assert (found.real == reduced(values.real, Op.SUM)).all()
    assert (found.imag == reduced(values.imag, Op.SUM)).all()
    assert (found.imag != 0).any()


def test_ranks_and_places_differ() -> None:
    values = contributions(np.dtype(np.float32), Op.SUM, 4)
    assert len({row.tobytes() for row in values}) == 4
    assert all(len(np.unique(row)) > 4 for row in values)


@given(count=st.integers(0, 3 * PERIOD), start=st.integers(0, 3 * PERIOD))
def test_a_tiling_is_the_endless_repetition_from_a_place_on(count: int, start: int) -> None:
    values = np.arange(PERIOD)
    found = tiled(values, start, count)
    assert (found == (np.arange(count) + start) % PERIOD).all()
    assert first_wrong(found, values, start) is None


@given(count=st.integers(1, 40 * PERIOD), start=st.integers(0, 2 * PERIOD), where=st.floats(0, 1, exclude_max=True))
def test_one_wrong_element_is_found_wherever_it_is(count: int, start: int, where: float) -> None:
    values = np.arange(PERIOD, dtype=np.int16)
    found, index = tiled(values, start, count), int(where * count)
    found[index] = -1
    assert first_wrong(found, values, start) == (index, -1, (index + start) % PERIOD)


@pytest.mark.parametrize("name", [name for name in SUPPORTED_NAMES if name != "bool"])
def test_unwritten_result_is_wrong(name: str) -> None:
    values = reduced(contributions(dtype_of(name), Op.SUM, 3), Op.SUM)
    found = tiled(values, 0, PERIOD)
    spoil(found)
    assert not (found == values).any()
