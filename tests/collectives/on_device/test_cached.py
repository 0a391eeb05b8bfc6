"""Cached plans of device calls: a repeated name plans nothing again, and a call unlike its last one is planned anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm.collectives.compiled import CompiledCall
from kfcomm.errors import CollectiveMismatch, ConfigError
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance.worlds import ends, everywhere

OURS = str(Path(kfcomm.__file__).parent)
FAKES = str(Path(OURS) / "testing")
ROUTES: dict[str, dict[str, Any]] = {"backend": {}, "staged": {"backend": ""}, "hierarchy": {"hosts": 2}}
BUDGETS = {
    ("backend", "all_reduce"): (364, 7),
    ("backend", "broadcast"): (368, 7),
    ("staged", "all_reduce"): (1952, 79),
    ("staged", "broadcast"): (1983, 78),
    ("hierarchy", "all_reduce"): (1647, 63),
}
"""Bytecodes and calls of functions of this package from a call to its handle, fakes aside. Without a cached plan an
all_reduce costs (2091, 90), (3179, 131) and (2495, 100). To read an array of CuPy and its stream takes 70 more, and to
call NCCL 30; what fakes do instead is not counted."""
SETTLED_AFTER = 4
"""Calls of all ranks between two waits for the device: the first one after that sets timers."""
SLACK = 1.1
"""A call through shared memory may have to wake its parked loop, which takes 70 bytecodes."""
MAX_CALLS = 100
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x, "k"),
    "broadcast": lambda comm, x: comm.broadcast(x, 1, "k"),
}


class Cost:
    """Bytecodes and calls of functions of this package, but for fakes."""

    def __init__(self) -> None:
        self.bytecodes = self.calls = 0

    def entered(self, frame: FrameType, _: str, __: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(OURS) or file.startswith(FAKES):
            return None
        self.calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.inside

    def inside(self, _: FrameType, event: str, __: object) -> Any:
        self.bytecodes += event == "opcode"
        return self.inside

    def of(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self.entered)
        try:
            return call()
        finally:
            sys.settrace(before)


@pytest.mark.asyncio
@pytest.mark.parametrize(("route", "verb"), BUDGETS)
async def test_a_repeated_device_call_costs_no_more_than_it_did(route: str, verb: str) -> None:
    budget, size = BUDGETS[route, verb], 4 if route == "hierarchy" else 2
    costs: list[tuple[int, int]] = []

    def least() -> tuple[int, int]:
        return min(costs[size:], default=(sys.maxsize, sys.maxsize))

    def is_within() -> bool:
        return all(one <= allowed * SLACK for one, allowed in zip(least(), budget, strict=True))

    async with device_world(size, **ROUTES[route]) as world:
        # On a busy machine a timer may have to be set again in a call: so the least of several calls counts.
        while not is_within() and len(costs) < MAX_CALLS:
            handles = []
            for comm in world.comms:
                cost, x = Cost(), world.array(comm, np.ones(256))
                handles.append(cost.of(lambda comm=comm, x=x: CALLS[verb](comm, x)))
                costs.append((cost.bytecodes, cost.calls))
            await everywhere(handles, lambda handle: handle)
            if len(costs) % (SETTLED_AFTER * size) == 0:
                await everywhere(world.comms, lambda comm: comm.synchronize())
    assert is_within(), f"{least()} bytecodes and calls, where {budget} were enough"
    assert least()[0] < 0.75 * costs[0][0], f"{least()} bytecodes and calls, after {costs[0]} of the first call"


def plans(world: DeviceWorld, name: str | None = "k") -> list[Any]:
    return [comm._group.compiled.get(name) for comm in world.comms]


def summed(world: DeviceWorld, values: float, **options: Any) -> Callable[[Any], Any]:
    return lambda comm: comm.all_reduce(world.array(comm, [values, comm.rank]), "k", **options)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_a_cached_plan_serves_other_values_streams_and_outs(route: str) -> None:
    async with device_world(4, **{"hosts": 1, **ROUTES[route]}) as world:
        await world.everywhere(summed(world, 1))
        first = plans(world)
        assert all(isinstance(plan, CompiledCall) for plan in first)
        for values in (2, 3):
            assert [one.tolist() for one in await world.everywhere(summed(world, values))] == [[4 * values, 6]] * 4
        outs = [world.array(comm, np.zeros(2)) for comm in world.comms]
        for comm, one in zip(
            world.comms, await everywhere(world.comms, lambda c: summed(world, 5, out=outs[c.rank])(c)), strict=True
        ):
            await comm.synchronize()
            assert one is outs[comm.rank]
            assert one.get().tolist() == [20, 6]
        assert plans(world) == first


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_another_shape_op_or_strategy_is_planned_anew(route: str) -> None:
    async with device_world(4, **ROUTES[route]) as world:
        await world.everywhere(summed(world, 1))
        first = plans(world)
        assert [one.tolist() for one in await world.everywhere(summed(world, 3, op="max"))] == [[3, 3]] * 4
        other = plans(world)
        assert not set(first) & set(other)
        for result in await world.everywhere(lambda c: c.all_reduce(world.array(c, np.ones(5)), "k")):
            assert result.tolist() == [4] * 5
        assert not set(other) & set(plans(world))
        await everywhere(world.comms, lambda c: c.set_strategy("ring"))
        assert plans(world) == [None] * 4
        assert [one.tolist() for one in await world.everywhere(summed(world, 2))] == [[8, 6]] * 4


@pytest.mark.asyncio
async def test_calls_with_options_of_their_own_use_no_cached_plan() -> None:
    async with device_world(2) as world:
        await world.everywhere(summed(world, 1))
        first = plans(world)
        await world.everywhere(summed(world, 1, timeout=60))
        again = plans(world)
        assert not set(first) & set(again)
        with pytest.raises(ConfigError, match="wire_dtype is for arrays in host memory"):
            world.comms[0].all_reduce(world.array(world.comms[0], [1, 2]), "k", wire_dtype="float16")
        assert plans(world) == again


@pytest.mark.asyncio
async def test_unlike_second_calls_raise_mismatch_on_every_rank() -> None:
    async with device_world(2, backend="") as world:
        await world.everywhere(summed(world, 1))
        errors = await ends(world.comms, lambda c: c.all_reduce(world.array(c, np.ones(2 + c.rank)), "k", timeout=60))
        assert {type(error) for error in errors} == {CollectiveMismatch}
        await world.works()
        assert [one.tolist() for one in await world.everywhere(summed(world, 3))] == [[6, 1]] * 2


@pytest.mark.asyncio
async def test_a_name_may_go_from_device_to_host_memory_and_back() -> None:
    async with device_world(2) as world:
        for _ in range(2):
            await world.everywhere(summed(world, 1))
            for result in await everywhere(world.comms, lambda c: c.all_reduce(np.ones(2, np.float32), "k")):
                assert type(result) is np.ndarray
                assert result.tolist() == [2, 2]


@pytest.mark.asyncio
async def test_an_out_that_does_not_fit_is_refused_by_a_cached_name_too() -> None:
    async with device_world(2) as world:
        await world.everywhere(summed(world, 1))
        first, second = world.comms
        waiting = summed(world, 1)(second)
        with pytest.raises(ConfigError, match="out has shape"):
            summed(world, 1, out=world.array(first, np.zeros(3)))(first)
        assert "refused its call" in str((await ends([second], lambda _: waiting))[0])


@pytest.mark.asyncio
async def test_uses_of_a_name_may_follow_each_other_before_the_device_is_done() -> None:
    async with device_world(2) as world:
        results: list[list[Any]] = [[], []]

        async def loop(comm: Any) -> None:
            for number in range(5):
                results[comm.rank].append(await summed(world, number)(comm))

        await everywhere(world.comms, loop)
        for comm in world.comms:
            await comm.synchronize()
            assert [one.get().tolist() for one in results[comm.rank]] == [[2 * n, 1] for n in range(5)]


@pytest.mark.asyncio
async def test_unnamed_device_calls_share_one_plan() -> None:
    async with device_world(2) as world:
        for _ in range(3):
            await world.everywhere(lambda c: c.all_reduce(world.array(c, [1, c.rank])))
        assert all(isinstance(plan, CompiledCall) for plan in plans(world, None))
