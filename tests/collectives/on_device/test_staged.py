"""Collectives of device memory through the host, in segments: results, order, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices.host import PinnedPool
from kfcomm.arrays.devices.routes import Route
from kfcomm.collectives.on_device import staged
from kfcomm.engine import operation as operations
from kfcomm.errors import CollectiveAborted, CollectiveMismatch
from kfcomm.testing import FakeDevice
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance import interfaces
from tests.conformance.verb_table import VERBS, inputs
from tests.conformance.worlds import assert_kinds, everywhere, turns, until

PER_SEGMENT = 16
LONG = 9 * PER_SEGMENT + 3
"""More elements than a call has segments under way."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of 16 elements of float32."""
    monkeypatch.setitem(staged.StagedPath.__init__.__kwdefaults__, "segment_nbytes", 4 * PER_SEGMENT)


class Unpinned(FakeDevice):
    """A device whose host has no memory that can be pinned: copies block the thread that begins them."""

    def pinned(self, nbytes: int) -> Any:
        raise MemoryError(f"{nbytes} bytes cannot be pinned")


HOSTS = {"pinned": FakeDevice, "not pinned": Unpinned}
on_both_kinds_of_hosts = pytest.mark.parametrize("make", HOSTS.values(), ids=HOSTS)


@asynccontextmanager
async def staged_world(size: int, **options: Any) -> AsyncIterator[DeviceWorld]:
    """A world without a backend that comes to rest: no block in use, no call under way, no turn awaited."""
    async with device_world(size, backend="", **options) as world:
        yield world
        await until(lambda: all(is_at_rest(world, comm) for comm in world.comms))


def path_of(comm: Any) -> Any:
    return comm._paths._made[Route.STAGED]


def is_at_rest(world: DeviceWorld, comm: Any) -> bool:
    return not (world.uses_pinned_memory(comm) or len(path_of(comm)) or len(path_of(comm).turns))


def begun(world: DeviceWorld, name: str | None = "k", count: int = LONG, **options: Any) -> list[Any]:
    """An all_reduce of each rank's number plus one, on every rank."""
    return [
        comm.all_reduce(world.array(comm, np.full(count, comm.rank + 1.0)), name, **options) for comm in world.comms
    ]


async def ended(world: DeviceWorld, handles: Sequence[Any]) -> list[Any]:
    """Results in host memory, once the device has made them, or errors; by rank."""
    calls = (world.get(comm, handle) for comm, handle in zip(world.comms, handles, strict=True))
    return await asyncio.gather(*calls, return_exceptions=True)


def assert_sums(world: DeviceWorld, results: Sequence[Any]) -> None:
    size = len(world.comms)
    for result in results:
        assert (result == size * (size + 1) / 2).all(), results


async def works(world: DeviceWorld, name: str | None = "k") -> None:
    assert_sums(world, await ended(world, begun(world, name)))


# -------------------------------------------------------------------- results


@on_both_kinds_of_hosts
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [0, 1, 5, 6, 8, 11, 16, 100])
async def test_verbs_give_numpys_result_whatever_their_segments(size: int, length: int, make: Any) -> None:
    async with staged_world(size, make=make) as world:
        for row in (row for row in VERBS if row.on_devices):
            for use in range(2):
                xs = inputs(size, length, use)
                given = [row.give(x, rank, size) for rank, x in enumerate(xs)]
                results = await everywhere(
                    world.comms,
                    lambda comm, row=row, given=given: getattr(comm, row.verb)(
                        **interfaces.arguments(row, held(world.devices[comm.rank], given[comm.rank]))
                    ),
                )
                await everywhere(world.comms, lambda comm: comm.synchronize())
                np.testing.assert_equal(interfaces.on_host(results), row.expected(xs), f"{row.name}, use {use}")


@pytest.mark.asyncio
async def test_a_rank_that_is_alone_gets_what_it_gives() -> None:
    async with staged_world(1) as world:
        for count in (0, 1, LONG):
            assert_sums(world, await ended(world, begun(world, count=count)))


def held(device: FakeDevice, given: Any) -> Any:
    if isinstance(given, dict):
        return {key: device.array(one) for key, one in given.items()}
    return [device.array(one) for one in given] if isinstance(given, list) else device.array(given)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.complex128])
async def test_dtypes_in_place(dtype: Any) -> None:
    async with staged_world(3) as world:
        xs = [device.array(np.full(LONG, rank + 1, dtype)) for rank, device in enumerate(world.devices)]
        results = await world.everywhere(lambda comm: comm.all_reduce(xs[comm.rank], "k", out=xs[comm.rank]))
        assert all(one.dtype == dtype and (one == 6).all() for one in results)


@pytest.mark.asyncio
async def test_arrays_of_a_mapping_go_as_one_vector() -> None:
    counts = [3, 0, PER_SEGMENT, 7, 2 * PER_SEGMENT]
    async with staged_world(2) as world:
        many = await everywhere(
            world.comms,
            lambda comm: comm.all_reduce_many({f"{n}": world.array(comm, np.full(n, n)) for n in counts}),
        )
        await everywhere(world.comms, lambda comm: comm.synchronize())
        assert all(one[f"{n}"].get().tolist() == [2 * n] * n for one in many for n in counts)


# -------------------------------------------------------------------- order, strategies, priorities


@pytest.mark.asyncio
async def test_segments_are_few_at_a_time_and_overlap() -> None:
    async with staged_world(2) as world:
        world.devices[1].hold(world.devices[1].default_stream)
        handles = begun(world)
        await turns()
        in_flight = [len(comm._session.engine.in_flight()) for comm in world.comms]
        assert in_flight == [1 + staged.WINDOW, 1], "the call itself, and its segments where it is ready"
        await asyncio.to_thread(world.devices[1].release)
        assert_sums(world, await ended(world, handles))


@pytest.mark.asyncio
async def test_the_handle_is_done_before_the_copies_back_are() -> None:
    async with staged_world(2) as world:
        handles = begun(world, count=10)
        await turns(1)
        for device in world.devices:
            device.hold_copies()
        await asyncio.gather(*handles)
        assert all(device.num_waiting for device in world.devices)
        for device in world.devices:
            device.release_copies()
        assert_sums(world, await ended(world, handles))


@pytest.mark.asyncio
async def test_a_small_result_waits_on_the_callers_stream_and_the_handle_does_not() -> None:
    async with staged_world(2) as world:
        handles = begun(world, count=10)
        for device in world.devices:
            device.hold(device.default_stream)
        await asyncio.gather(*handles)
        assert all(device.num_waiting for device in world.devices)
        for device in world.devices:
            device.release()
        assert_sums(world, await ended(world, handles))


@on_both_kinds_of_hosts
@pytest.mark.asyncio
async def test_many_at_once_in_opposite_orders(make: Any) -> None:
    async with staged_world(3, make=make) as world:

        async def main(comm: Any) -> None:
            numbers = list(range(150))
            if comm.rank:
                numbers = numbers[::-1] if comm.rank == 1 else random.Random(1).sample(numbers, len(numbers))
            handles = {n: comm.all_reduce(world.array(comm, np.full(LONG, n + comm.rank)), f"k{n}") for n in numbers}
            for number, handle in handles.items():
                assert (await world.get(comm, handle) == 3 * number + 3).all()

        await everywhere(world.comms, main)


@pytest.mark.asyncio
async def test_a_held_stream_holds_up_neither_other_streams_nor_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(staged.StagedPath.__init__.__kwdefaults__, "window", 2)
    async with staged_world(2) as world:
        slow = [device.stream() for device in world.devices]
        for device, stream in zip(world.devices, slow, strict=True):
            device.hold(stream)
        arrays = [world.array(comm, np.full(LONG, comm.rank + 1.0)) for comm in world.comms]
        going = begun(world, "going")
        held_up = [comm.all_reduce(arrays[comm.rank], "held", stream=slow[comm.rank]) for comm in world.comms]
        going += begun(world, "going, too")
        for device in world.devices:
            device.hold(device.default_stream)  # after the calls: those are ready
        later = begun(world, "later")
        await asyncio.gather(*going)
        await turns(100)
        assert not any(handle.done() for handle in (*held_up, *later))
        for device in world.devices:
            device.release()
        for handles in (going[:2], going[2:], later):
            assert_sums(world, await ended(world, handles))
        for handle, device, stream in zip(held_up, world.devices, slow, strict=True):
            with device.working_on(stream):
                assert ((await handle).get() == 3).all()


@pytest.mark.asyncio
async def test_gates_of_streams_that_come_no_more_are_let_go() -> None:
    async with staged_world(2) as world:
        for _ in range(2 * staged.MAX_WAIT_STREAMS):
            streams = [device.stream() for device in world.devices]
            await everywhere(
                world.comms, lambda c, streams=streams: c.all_reduce(world.array(c, [1.0]), "k", stream=streams[c.rank])
            )
        assert all(len(path_of(comm)._wait_streams) == staged.MAX_WAIT_STREAMS for comm in world.comms)
        await everywhere(world.comms, lambda comm: comm.synchronize())


@pytest.mark.asyncio
async def test_unnamed_calls_of_any_lengths_go_in_their_order() -> None:
    counts = [5 * PER_SEGMENT, 1, 0, 3 * PER_SEGMENT, 7]
    async with staged_world(2) as world:
        for handles in [begun(world, None, count) for count in counts]:
            assert_sums(world, await ended(world, handles))


@pytest.mark.asyncio
async def test_ranks_whose_strategies_have_another_generation() -> None:
    async with staged_world(2, strategy="star") as world:
        one, other = world.comms
        early = one.all_reduce(world.array(one, [1.0]), "k")
        await asyncio.gather(*(comm.set_strategy("ring") for comm in world.comms))
        outcomes = await ended(world, [early, other.all_reduce(world.array(other, [1.0]), "k")])
        assert_kinds(outcomes, CollectiveMismatch)
        assert all(f"generation {number}" in str(one) for number in (0, 1) for one in outcomes)
        await works(world)


@pytest.mark.asyncio
async def test_segments_have_the_priority_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    make = operations.Operation.__init__

    def noted(self: operations.Operation, *args: Any, **options: Any) -> None:
        seen.append(options.get("priority", 0))
        make(self, *args, **options)

    monkeypatch.setattr(operations.Operation, "__init__", noted)
    async with staged_world(2) as world:
        assert_sums(world, await ended(world, begun(world, count=3 * PER_SEGMENT, priority=7)))
        assert seen == [7] * 2 * (1 + 3), "of the call itself and of its segments, on each rank"


# -------------------------------------------------------------------- failures


@on_both_kinds_of_hosts
@pytest.mark.asyncio
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 5, 8, 12])
async def test_cancelled_after_so_many_turns(turn: int, make: Any) -> None:
    async with staged_world(3, make=make) as world:
        handles = begun(world, count=40 * PER_SEGMENT)
        await turns(turn)
        handles[1].cancel()
        outcomes = await ended(world, handles)
        assert_kinds(outcomes, CollectiveAborted, asyncio.CancelledError, CollectiveAborted)
        await works(world)


@on_both_kinds_of_hosts
@pytest.mark.asyncio
@pytest.mark.parametrize("held", ["caller", "copies"])
async def test_cancelled_while_the_device_is_slow(held: str, make: Any) -> None:
    """Blocks go back when the copies are done, and not before; then nothing is written any more."""
    async with staged_world(2, make=make) as world:
        slow = world.devices[1]
        outs = [world.array(comm, np.zeros(LONG)) for comm in world.comms]
        arrays = [world.array(comm, np.ones(LONG)) for comm in world.comms]
        if held == "caller":
            slow.hold(slow.default_stream)
        else:
            slow.hold_copies()
        handles = [comm.all_reduce(arrays[comm.rank], "k", out=outs[comm.rank]) for comm in world.comms]
        await turns()
        handles[0].cancel()
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, asyncio.CancelledError, CollectiveAborted)
        await turns()
        assert [is_at_rest(world, comm) for comm in world.comms] == [True, False]
        if held == "caller":
            slow.release(slow.default_stream)
        else:
            slow.release_copies()
        await until(lambda: is_at_rest(world, world.comms[1]))
        assert not any(out.get().any() for out in outs)
        await works(world)


@pytest.mark.asyncio
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_one_of_several_unnamed_calls_is_cancelled(which: int) -> None:
    """The others go on, whether they are before it or behind it."""
    async with staged_world(2) as world:
        arrays = [[world.array(comm, np.full(LONG, comm.rank + 1.0)) for _ in range(3)] for comm in world.comms]
        world.devices[1].hold(world.devices[1].default_stream)
        calls = [[comm.all_reduce(arrays[comm.rank][n]) for comm in world.comms] for n in range(3)]
        await turns()
        calls[which][0].cancel()
        outcomes = await asyncio.gather(*calls[which], return_exceptions=True)
        assert_kinds(outcomes, asyncio.CancelledError, CollectiveAborted)
        world.devices[1].release()
        for number, handles in enumerate(calls):
            if number != which:
                assert_sums(world, await ended(world, handles))
        await works(world, None)


@pytest.mark.asyncio
async def test_the_host_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged_world(2) as world:
        pool = path_of(world.comms[1]).pool_of(world.devices[1])
        take, requests = PinnedPool.take, iter(range(100))

        def refuses(self: PinnedPool, nbytes: int) -> Any:
            if self is pool and next(requests) == 1:
                raise MemoryError("nothing left")
            return take(self, nbytes)

        monkeypatch.setattr(PinnedPool, "take", refuses)
        outcomes = await ended(world, begun(world))
        assert_kinds(outcomes, CollectiveAborted)
        assert all("nothing left" in str(one) for one in outcomes)
        await works(world)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["stream", "wait", "fetch", "put", "mark", "notify"])
@pytest.mark.parametrize("number", [0, 1, 4])
async def test_the_device_refuses(step: str, number: int) -> None:
    async with staged_world(2) as world:
        device = world.devices[1]
        arrays = [world.array(comm, np.full(LONG, comm.rank + 1.0)) for comm in world.comms]
        usual, left = getattr(device, step), [number]

        def broken(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("the device refuses")
            return usual(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, step, broken)
            outcomes = await world.ends(lambda comm: comm.all_reduce(arrays[comm.rank], "k"))
            await world.ends(lambda comm: comm.synchronize())
        if left[0] < 0:
            assert "the device refuses" in str(outcomes[1])
        else:
            assert_sums(world, outcomes)
        await works(world)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("size", [1, 2])
async def test_a_stream_fails(verb: str, size: int) -> None:
    async with device_world(size, backend="", quiet=False) as world:

        def fail() -> None:
            raise RuntimeError("a kernel failed")

        arrays = [world.array(comm, np.ones(LONG)) for comm in world.comms]
        world.devices[-1].run(world.devices[-1].default_stream, fail)
        outcomes = await world.ends(lambda comm: getattr(comm, verb)(arrays[comm.rank], name="k"))
        assert "a kernel failed" in str(outcomes[0])
        await until(lambda: all(is_at_rest(world, comm) for comm in world.comms))


@pytest.mark.asyncio
async def test_a_closed_group_leaves_the_groups_of_its_segments() -> None:
    async with staged_world(2) as world:
        groups = await asyncio.gather(*(comm.group([0, 1], "pair") for comm in world.comms))
        for use in range(2):
            calls = (world.get(comm, comm.all_reduce(world.array(comm, np.ones(LONG)), "k")) for comm in groups)
            assert all((one == 2).all() for one in await asyncio.gather(*calls)), use
        names = [(comm._session.engine.router.names, path_of(comm).group_ids()) for comm in groups]
        await asyncio.gather(*(comm.close() for comm in groups))
        for known, ids in names:
            keys = [known.of_group(group_id) for group_id in ids]
            assert len(keys) == 2
            assert all(of_one and all(key.has_ended for key in of_one) for of_one in keys)
        await works(world)
