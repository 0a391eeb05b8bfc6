"""Collectives that a backend runs whole: right in any order of calls, and every failure ends on all ranks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices.routes import Route
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    PeerLost,
)
from kfcomm.testing import FakeDevice
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance.worlds import assert_kinds, ends, everywhere, until

on_both_routes = pytest.mark.parametrize("backend", ["fake", ""])
"""By a backend, and through the host."""


def _path(comm: Any) -> Any:
    return comm._paths._made[Route.BACKEND]


def _messages(world: DeviceWorld) -> int:
    return sum(_path(comm).num_messages for comm in world.comms)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_names_in_any_order_are_launched_in_one(size: int) -> None:
    rng = random.Random(size)
    names = [f"key {number}" for number in range(30)]
    async with device_world(size) as world:

        async def step(comm: Any) -> None:
            handles = {}
            for name in rng.sample(names, len(names)):
                handles[name] = comm.all_reduce(world.array(comm, [names.index(name), comm.rank]), name)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            results = {name: await handle for name, handle in handles.items()}
            await comm.synchronize()
            for name, result in results.items():
                assert result.get().tolist() == [size * names.index(name), size * (size - 1) / 2]

        counts = []
        for _ in range(4):
            await everywhere(world.comms, step)
            counts.append(_messages(world))
        assert counts[0] <= (size - 1) * (len(names) + 2)
        assert counts[3] == counts[2] == counts[1]
        orders: dict[int, list[str]] = {rank: [] for rank in range(size)}
        for _, rank, launched in world.fabric.launched:
            orders[rank].append(str(launched))
        assert len({tuple(order) for order in orders.values()}) == 1


@pytest.mark.asyncio
async def test_unnamed_calls_meet_in_the_order_of_the_program() -> None:
    async with device_world(3) as world:

        async def calls(comm: Any) -> list[float]:
            handles = [comm.all_reduce(world.array(comm, [number])) for number in range(5)]
            results = [await handle for handle in handles]
            await comm.synchronize()
            return [result.get().tolist()[0] for result in results]

        assert await everywhere(world.comms, calls) == [[0, 3, 6, 9, 12]] * 3


@pytest.mark.asyncio
async def test_the_handle_is_done_before_the_device_is() -> None:
    async with device_world(2) as world:
        for device in world.devices:
            device.hold(device.default_stream)
        arrays = [device.array(np.ones(3, np.float32)) for device in world.devices]
        results = await everywhere(world.comms, lambda c: c.all_reduce(arrays[c.rank], "k"))
        assert all(device.num_waiting for device in world.devices)
        for device in world.devices:
            device.release(device.default_stream)
        assert [result.get().tolist() for result in results] == [[2, 2, 2]] * 2
        await everywhere(world.comms, lambda c: c.synchronize())


@pytest.mark.asyncio
async def test_a_name_is_free_again_when_its_handle_is_done_and_not_before() -> None:
    async with device_world(2) as world:

        async def calls(comm: Any) -> list[float]:
            device = world.devices[comm.rank]
            device.hold(device.default_stream)
            results = [await comm.all_reduce(world.array(comm, [number]), "k") for number in range(3)]
            device.release(device.default_stream)
            await comm.synchronize()
            return [result.get().tolist()[0] for result in results]

        assert await everywhere(world.comms, calls) == [[0, 2, 4]] * 2
        one = world.comms[1]
        first, second = (one.all_reduce(world.array(one, [1]), "j") for _ in range(2))
        assert "used again" in str((await ends([second], lambda handle: handle))[0])
        rest = await everywhere([first, world.comms[0].all_reduce(world.array(world.comms[0], [1]), "j")], lambda h: h)
        await everywhere(world.comms, lambda c: c.synchronize())
        assert [result.get().tolist() for result in rest] == [[2]] * 2
        again = await ends([world.comms[0]], lambda c: c.all_reduce(world.array(c, [1]), "j"))
        assert_kinds(again, CollectiveAborted)
        await world.works()


@pytest.mark.asyncio
async def test_a_handle_is_done_when_the_others_know_what_to_launch() -> None:
    async with device_world(3) as world:
        for _ in range(4):
            told = await asyncio.gather(*(_told(world, comm) for comm in world.comms))
            assert all(told)
            await everywhere(world.comms, lambda c: c.synchronize())


async def _told(world: DeviceWorld, comm: Any) -> bool:
    """Whether nothing that others need was still to be sent when a handle was done."""
    await comm.all_reduce(world.array(comm, [1]), "k")
    channel = _path(comm)._channel
    return bool(channel.is_heard(channel.batch))


@pytest.mark.asyncio
async def test_another_stream_of_the_caller() -> None:
    async with device_world(2) as world:

        async def call(comm: Any) -> Any:
            device = world.devices[comm.rank]
            stream = device.stream()
            x = device.empty(2, np.dtype(np.float32), stream)
            ones = device.array(np.ones(2, np.float32))
            device.hold(stream)
            device.copy(ones, x, stream)
            y = await comm.all_reduce(x, "k", stream=stream)
            device.release(stream)
            await comm.synchronize()
            with device.working_on(stream):
                return y.get().tolist()

        assert await everywhere(world.comms, call) == [[2, 2]] * 2


@pytest.mark.asyncio
async def test_many_arrays_are_one_launch_for_each_dtype() -> None:
    async with device_world(2) as world:

        async def call(comm: Any) -> Any:
            device = world.devices[comm.rank]
            given = {
                "b": device.array(np.full(3, 1, np.float32)),
                "a": device.array(np.full((2, 2), 2, np.float32)),
                "c": device.array(np.full(1, 3, np.int32)),
            }
            found = await comm.all_reduce_many(given)
            await comm.synchronize()
            return {name: array.get().tolist() for name, array in found.items()}

        results = await everywhere(world.comms, call)
        assert results == [{"b": [2, 2, 2], "a": [[4, 4], [4, 4]], "c": [6]}] * 2
        assert list(results[0]) == ["b", "a", "c"]
        assert len(world.fabric.launched) == 2 * 2


# -------------------------------------------------------------------- failures

DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "shape": (
        lambda w, c: c.all_reduce(w.array(c, [1, 2]), "k"),
        lambda w, c: c.all_reduce(w.array(c, [1]), "k"),
        "(1,)",
    ),
    "shape of as many elements": (
        lambda w, c: c.all_reduce(w.array(c, [1, 2]), "k"),
        lambda w, c: c.all_reduce(w.array(c, [[1], [2]]), "k"),
        "(2, 1)",
    ),
    "op": (
        lambda w, c: c.all_reduce(w.array(c, [1]), "k"),
        lambda w, c: c.all_reduce(w.array(c, [1]), "k", op="max"),
        "op max",
    ),
    "verb": (
        lambda w, c: c.all_reduce(w.array(c, [1]), "k"),
        lambda w, c: c.all_gather(w.array(c, [1]), "k"),
        "all_gather",
    ),
    "a host array": (
        lambda w, c: c.all_reduce(w.array(c, [1]), "k"),
        lambda w, c: c.all_reduce(np.ones(1, np.float32), "k"),
        "in device memory",
    ),
    "a host array on the other rank": (
        lambda w, c: c.all_reduce(np.ones(1, np.float32), "k"),
        lambda w, c: c.all_reduce(w.array(c, [1]), "k"),
        "in device memory",
    ),
}


@on_both_routes
@pytest.mark.asyncio
@pytest.mark.parametrize("kind", DIFFERENT)
async def test_ranks_that_disagree(kind: str, backend: str) -> None:
    one, other, words = DIFFERENT[kind]
    async with device_world(3, backend=backend, aborted=not backend) as world:
        for round_ in range(2):
            results = await world.ends(lambda c: (other if c.rank == 1 else one)(world, c))
            assert_kinds(results, CollectiveMismatch)
            assert all(words in str(error) for error in results)
            await world.works(f"after {round_}")


@pytest.mark.asyncio
async def test_a_name_that_changes_what_it_means_on_all_ranks() -> None:
    async with device_world(2) as world:
        for length in (1, 1, 1, 2, 2, 2, 1):
            results = await world.everywhere(lambda c, n=length: c.all_reduce(world.array(c, [1] * n), "k"))
            assert [result.tolist() for result in results] == [[2] * length] * 2


@on_both_routes
@pytest.mark.asyncio
async def test_a_call_that_one_rank_refuses(backend: str) -> None:
    elsewhere = FakeDevice(7)
    async with device_world(3, backend=backend, aborted=not backend) as world:
        results = await world.ends(
            lambda c: c.all_reduce(
                elsewhere.array(np.ones(2, np.float32)) if c.rank == 2 else world.array(c, [1, 1]), "k"
            )
        )
        assert_kinds(results[:2], CollectiveAborted)
        assert isinstance(results[2], ConfigError)
        assert "fake:7" in str(results[2])
        assert "fake:0" in str(results[2])
        await world.works()


@pytest.mark.asyncio
async def test_a_device_that_runs_out_of_memory() -> None:
    async with device_world(3) as world:
        arrays = [world.array(comm, [1, 1]) for comm in world.comms]
        world.devices[1].fail_next_allocation()
        results = await world.ends(lambda c: c.all_reduce(arrays[c.rank], "k"))
        assert [type(one) for one in results] == [CollectiveAborted, MemoryError, CollectiveAborted]
        await world.works()


@pytest.mark.asyncio
async def test_a_rank_that_does_not_come_is_named() -> None:
    async with device_world(3) as world:
        await world.works("before")
        some = [comm for comm in world.comms if comm.rank != 1]
        results = await ends(some, lambda c: world.get(c, c.all_reduce(world.array(c, [1]), "k", timeout=0.2)))
        assert_kinds(results, CollectiveTimeout)
        assert any(error.missing == (1,) for error in results)
        assert isinstance(
            (await ends([world.comms[1]], lambda c: c.all_reduce(world.array(c, [1]), "k")))[0], Exception
        )
        await world.works()


@pytest.mark.asyncio
async def test_calls_launched_everywhere_before_a_failure_complete() -> None:
    async with device_world(2) as world:
        await world.works("before")

        async def calls(comm: Any) -> list[Any]:
            handles = [comm.all_reduce(world.array(comm, [1]), name) for name in ("a", "b")]
            if comm.rank == 1:  # the leader would launch it, and be done with its handle
                handles.append(comm.all_reduce(world.array(comm, [1]), "only here", timeout=0.2))
            results = await asyncio.gather(*handles, return_exceptions=True)
            await comm.synchronize()
            return results

        first, second = await everywhere(world.comms, calls)
        assert [result.get().tolist() for result in [*first, *second[:2]]] == [[2]] * 4
        late = await ends(world.comms[:1], lambda c: c.all_reduce(world.array(c, [1]), "only here"))
        assert_kinds([second[2], *late], CollectiveTimeout)
        assert second[2].missing == (0,)
        await world.works()


@pytest.mark.asyncio
async def test_a_cancelled_call() -> None:
    async with device_world(2) as world:
        await world.works("before")
        handle = world.comms[0].all_reduce(world.array(world.comms[0], [1]), "k")
        handle.cancel()
        results = await ends([world.comms[1]], lambda c: c.all_reduce(world.array(c, [1]), "k"))
        assert_kinds(results, CollectiveAborted)
        await world.works()


@pytest.mark.asyncio
async def test_a_rank_that_dies_in_the_midst() -> None:
    async with device_world(3, quiet=False) as world:
        await world.works("before")
        world.fabric.stop(2)
        handles = await everywhere(world.comms, lambda c: c.all_reduce(world.array(c, [1]), "k"))
        assert len(handles) == 3
        world.comms.kill(2)
        survivors = world.comms[:2]
        results = await ends(survivors, lambda c: c.synchronize())
        assert_kinds(results, PeerLost)
        assert all(error.rank == 2 for error in results)
        assert_kinds(await ends(survivors, lambda c: c.all_reduce(world.array(c, [1]), "again")), PeerLost)
        groups = await everywhere(survivors, lambda c: c.group([0, 1], "survivors"))
        again = await everywhere(groups, lambda c: world.get(c, c.all_reduce(world.array(c, [1]), "k")))
        assert [one.tolist() for one in again] == [[2]] * 2
        await everywhere(groups, lambda c: c.close())
        await until(lambda: not any(device.num_waiting for device in world.devices[:2]))
        world.comms[2]._paths.close()
        await until(lambda: not world.devices[2].num_waiting)


@pytest.mark.asyncio
async def test_a_launch_that_hangs_ends_by_its_deadline() -> None:
    async with device_world(2) as world:
        await world.works("before")
        world.fabric.stop(1)
        await everywhere(world.comms, lambda c: c.all_reduce(world.array(c, [1]), "k", timeout=0.2))
        results = await ends(world.comms, lambda c: c.synchronize())
        assert Counter(map(type, results)) in (
            Counter({CollectiveTimeout: 2}),
            Counter({CollectiveTimeout: 1, None: 1}),
        )
        assert all("still under way" in str(error) for error in results)


@pytest.mark.asyncio
async def test_a_backend_that_breaks_down() -> None:
    async with device_world(2) as world:
        await world.works("before")
        world.fabric.break_down("the cable is broken")
        results = await world.ends(lambda c: c.all_reduce(world.array(c, [1]), "k"))
        assert all(isinstance(one, CollectiveError) for one in results)
        assert any("the cable is broken" in str(one) for one in results)


@pytest.mark.asyncio
async def test_a_backend_that_cannot_be_made() -> None:
    async with device_world(2) as world:
        world.fabric.refuse("no way to the others")
        results = await world.ends(lambda c: c.all_reduce(world.array(c, [1]), "k"))
        assert all(isinstance(one, CollectiveError) for one in results)
        assert any("no way to the others" in str(one) for one in results)


@on_both_routes
@pytest.mark.asyncio
async def test_closed_with_calls_in_flight(backend: str) -> None:
    async with device_world(2, backend=backend, aborted=True) as world:
        handle = world.comms[0].all_reduce(world.array(world.comms[0], [1]), "k")
        await world.comms[0].close()
        assert isinstance((await asyncio.gather(handle, return_exceptions=True))[0], CollectiveAborted)


@pytest.mark.asyncio
@pytest.mark.parametrize("shared", [False, True])
async def test_closed_while_the_device_works_on_what_was_promised(shared: bool) -> None:
    async with device_world(2, shared=shared) as world:
        for device in world.devices:
            device.hold(device.default_stream)
        handles = [comm.all_reduce(world.array(comm, [1]), "k") for comm in world.comms]
        results = [] if shared else [await handle for handle in handles]
        closing = [asyncio.ensure_future(comm.close()) for comm in world.comms] if results else []
        for device in world.devices:
            device.release(device.default_stream)
        results = results or [await handle for handle in handles]
        await asyncio.gather(*closing)
        await asyncio.gather(*(comm.close() for comm in world.comms))
        assert [result.get().tolist() for result in results] == [[2]] * 2


@pytest.mark.asyncio
async def test_groups_have_orders_of_their_own() -> None:
    async with device_world(4) as world:
        pairs = await everywhere(world.comms, lambda c: c.split(c.rank % 2))
        results = await everywhere(world.comms, lambda c: pairs[c.rank].all_reduce(world.array(c, [c.rank]), "k"))
        await everywhere(pairs, lambda c: c.synchronize())
        assert [result.get().tolist() for result in results] == [[2], [4], [2], [4]]
        await world.works()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["", 5, object()])
async def test_a_name_that_cannot_be_fails_nothing_else(name: Any) -> None:
    async with device_world(2) as world:
        for device in world.devices:
            device.hold(device.default_stream)
        results = await everywhere(world.comms, lambda c: c.all_reduce(world.array(c, [1])))
        for comm in world.comms:
            with pytest.raises(ConfigError, match="name"):
                comm.all_reduce(world.array(comm, [1]), name)
        for device in world.devices:
            device.release(device.default_stream)
        await everywhere(world.comms, lambda c: c.synchronize())
        assert [result.get().tolist() for result in results] == [[2]] * 2
        assert not any(_path(comm)._failures.hold for comm in world.comms)
        await world.works()


@pytest.mark.asyncio
async def test_many_arrays_of_several_dtypes_that_one_rank_refuses() -> None:
    elsewhere = FakeDevice(7)

    def call(comm: Any, world: DeviceWorld, where: FakeDevice) -> Any:
        return comm.all_reduce_many(
            {"a": where.array(np.ones(2, np.float32)), "b": world.devices[comm.rank].array(np.ones(2, np.int32))}
        )

    async with device_world(2) as world:
        failed = await ends(world.comms, lambda c: call(c, world, elsewhere if c.rank == 1 else world.devices[c.rank]))
        assert [type(one) for one in failed] == [CollectiveAborted, ConfigError]
        await ends(world.comms, lambda c: c.synchronize())
        await world.works("between")
        for _ in range(2):
            results = await everywhere(world.comms, lambda c: call(c, world, world.devices[c.rank]))
            await everywhere(world.comms, lambda c: c.synchronize())
            for found in results:
                assert [found[name].get().tolist() for name in "ab"] == [[2, 2]] * 2
