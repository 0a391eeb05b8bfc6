"""Collectives of device memory that ranks of one host map: results, order, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices.routes import Route
from kfcomm.arrays.dtypes import SUPPORTED_NAMES, dtype_of
from kfcomm.arrays.reduce import supports
from kfcomm.collectives.on_device import calls, places, slots
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, PeerLost, TransportError
from kfcomm.types import Op
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance import interfaces
from tests.conformance.verb_table import VERBS, inputs
from tests.conformance.worlds import assert_kinds, everywhere, turns, until

LONG = 5000


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls, too, are carried out in device slots."""
    monkeypatch.setattr(calls, "SLOTS_NBYTES", 0)


@pytest.fixture(autouse=True)
def no_records(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Drop log records: those of errors keep frames alive."""
    yield
    caplog.clear()


@asynccontextmanager
async def slots_world(size: int, **options: Any) -> AsyncIterator[DeviceWorld]:
    """A world whose ranks share a device, and that comes to rest."""
    async with device_world(size, shared=True, exports=True, **options) as world:
        assert {comm.route.route for comm in world.comms} == {Route.SLOTS}
        yield world
        await until(lambda: all(is_at_rest(comm) for comm in world.comms))


def path_of(comm: Any) -> Any:
    return comm._paths._made[Route.SLOTS]


def is_at_rest(comm: Any) -> bool:
    path = comm._paths._made.get(Route.SLOTS)  # none once it is closed
    return path is None or not (len(path) or len(path.turns))


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


def held(device: Any, given: Any) -> Any:
    if isinstance(given, dict):
        return {key: device.array(one) for key, one in given.items()}
    return [device.array(one) for one in given] if isinstance(given, list) else device.array(given)


# -------------------------------------------------------------------- results


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 100])
@pytest.mark.parametrize("transport", ["memory", "shm"])
async def test_verbs_give_numpys_result(
    size: int, length: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conformance.worlds.LINKS", transport)
    async with slots_world(size) as world:
        for row in (row for row in VERBS if row.on_devices):
            for use in range(4):
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
@pytest.mark.parametrize("name", SUPPORTED_NAMES)
async def test_bits_are_those_of_the_host(name: str) -> None:
    dtype, rng = dtype_of(name), np.random.default_rng(1)
    ops = [op for op in Op if supports(op, dtype)]
    async with slots_world(3) as world:
        for op in ops:
            xs = [numbers(rng, dtype, 300) for _ in world.comms]
            there = [device.array(x) for device, x in zip(world.devices, xs, strict=True)]
            found = await world.everywhere(lambda comm, there=there, op=op: comm.all_reduce(there[comm.rank], op=op))
            wanted = await everywhere(world.comms, lambda comm, xs=xs, op=op: comm.all_reduce(xs[comm.rank], op=op))
            for one, other in zip(found, wanted, strict=True):
                assert one.tobytes() == other.tobytes(), op


def numbers(rng: np.random.Generator, dtype: Any, count: int) -> Any:
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 100, count).astype(dtype)
    parts = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 3, count)
    return (parts + 1j * parts[::-1] if dtype.kind == "c" else parts).astype(dtype)


@pytest.mark.asyncio
async def test_a_result_in_the_memory_of_the_input() -> None:
    async with slots_world(3) as world:
        for use in range(5):
            xs = [device.array(np.full(LONG, rank + use, np.float32)) for rank, device in enumerate(world.devices)]
            results = await world.everywhere(lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], "k", out=xs[comm.rank]))
            assert all((one == 3 + 3 * use).all() for one in results)


@pytest.mark.asyncio
async def test_arrays_of_a_mapping_and_of_a_list() -> None:
    async with slots_world(3) as world:
        for use in range(3):
            shapes = {f"a{n}": n for n in (1, 3, 70, 30_000)}
            many = await everywhere(
                world.comms,
                lambda comm, use=use, shapes=shapes: comm.all_reduce_many(
                    {name: world.array(comm, np.full(n, comm.rank + use)) for name, n in shapes.items()}
                ),
            )
            await everywhere(world.comms, lambda comm: comm.synchronize())
            for result in many:
                assert all(
                    (result[name].get() == 3 + 3 * use).all() and result[name].shape == (n,)
                    for name, n in shapes.items()
                )


# -------------------------------------------------------------------- memory


@pytest.mark.asyncio
async def test_memory_is_used_again() -> None:
    async with slots_world(2) as world:
        for _ in range(50):
            await works(world)
            await works(world, None)
        for comm, device in zip(world.comms, world.devices, strict=True):
            assert device.sharing().nbytes == places.FIRST_NBYTES
            # each name has a place whose readers have not told yet
            assert len(path_of(comm).shared.places) <= 4


@pytest.mark.asyncio
async def test_contributions_that_do_not_fit_get_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "FIRST_NBYTES", 1 << 12)
    async with slots_world(2) as world:
        for _ in range(3):
            for count in (10, 3000, 100_000):
                assert_sums(world, await ended(world, begun(world, f"k{count}", count)))
        assert world.devices[0].sharing().nbytes < 4 * 400_000


# -------------------------------------------------------------------- order


@pytest.mark.asyncio
async def test_many_at_once_in_opposite_orders() -> None:
    async with slots_world(3) as world:

        async def main(comm: Any) -> None:
            for _ in range(3):
                names = list(range(100))
                if comm.rank:
                    names = names[::-1] if comm.rank == 1 else random.Random(1).sample(names, len(names))
                handles = {n: comm.all_reduce(world.array(comm, np.full(LONG, n + comm.rank)), f"k{n}") for n in names}
                for number, handle in handles.items():
                    assert (await world.get(comm, handle) == 3 * number + 3).all()

        await everywhere(world.comms, main)


@pytest.mark.asyncio
async def test_unnamed_calls_of_any_lengths_go_in_their_order() -> None:
    counts = [500, 1, 0, 3000, 7]
    async with slots_world(2) as world:
        for handles in [begun(world, None, count) for count in counts]:
            assert_sums(world, await ended(world, handles))


@pytest.mark.asyncio
async def test_a_contribution_is_read_only_when_it_is_complete() -> None:
    async with slots_world(2) as world:
        await works(world)
        slow = world.devices[1]
        slow.hold(slow.default_stream)
        handles = begun(world)
        await turns(100)
        assert not any(handle.done() for handle in handles)
        await asyncio.to_thread(slow.release)
        assert_sums(world, await ended(world, handles))


@pytest.mark.asyncio
async def test_a_held_stream_holds_up_neither_other_streams_nor_earlier_calls() -> None:
    async with slots_world(2) as world:
        slow = [device.stream() for device in world.devices]
        for device, stream in zip(world.devices, slow, strict=True):
            device.hold(stream)
        arrays = [world.array(comm, np.full(LONG, comm.rank + 1.0)) for comm in world.comms]
        going = begun(world, "going")
        held_up = [comm.all_reduce(arrays[comm.rank], "held", stream=slow[comm.rank]) for comm in world.comms]
        await asyncio.gather(*going)
        await turns(100)
        assert not any(handle.done() for handle in held_up)
        for device in world.devices:
            device.release()
        assert_sums(world, await ended(world, going))
        for handle, device, stream in zip(held_up, world.devices, slow, strict=True):
            with device.working_on(stream):
                assert ((await handle).get() == 3).all()


@pytest.mark.asyncio
async def test_ranks_whose_strategies_have_another_generation() -> None:
    async with slots_world(2, strategy="star") as world:
        one, other = world.comms
        await works(world)
        early = one.all_reduce(world.array(one, [1.0]), "k")
        await asyncio.gather(*(comm.set_strategy("ring") for comm in world.comms))
        outcomes = await ended(world, [early, other.all_reduce(world.array(other, [1.0]), "k")])
        assert_kinds(outcomes, CollectiveMismatch)
        await works(world)


@pytest.mark.asyncio
async def test_small_calls_go_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SLOTS_NBYTES", 2 * LONG)  # of each rank
    async with slots_world(2) as world:
        for _ in range(3):
            assert_sums(world, await ended(world, begun(world, count=LONG - 1)))
        assert {path_of(comm).state for comm in world.comms} == {slots.SlotsState.IDLE}
        for count in (LONG, 5, LONG, 1, 5, LONG, LONG):  # of one name
            assert_sums(world, await ended(world, begun(world, count=count)))
        assert {path_of(comm).state for comm in world.comms} == {slots.SlotsState.READY}


# -------------------------------------------------------------------- where memory cannot be shared


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["sharing", "allocate", "open"])
async def test_a_rank_that_cannot_share_sends_all_through_the_host(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with slots_world(3) as world:

        def refuses(*_: Any) -> Any:
            raise TransportError("containers are closed")

        device = world.devices[1]
        with monkeypatch.context() as patch:
            patch.setattr(device if step == "sharing" else device.sharing(), step, refuses)
            for _ in range(3):
                await works(world)
                await works(world, None)
        assert {path_of(comm).state for comm in world.comms} == {slots.SlotsState.STAGED}
        (told,) = [one.message for one in caplog.records if "cannot share" in one.message]
        assert told.startswith("rank 1 cannot share")
        assert "containers are closed" in told


# -------------------------------------------------------------------- failures


@pytest.mark.asyncio
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 5, 8, 12])
async def test_cancelled_after_so_many_turns(turn: int, is_first: bool) -> None:
    async with slots_world(3) as world:
        if not is_first:
            await works(world)
            await works(world)
        handles = begun(world)
        await turns(turn)
        handles[1].cancel()
        await ended(world, handles)
        await world.ends(lambda comm: comm.synchronize())
        await works(world)
        await works(world)


@pytest.mark.asyncio
async def test_cancelled_while_the_device_is_slow() -> None:
    async with slots_world(2) as world:
        await works(world)
        slow = world.devices[1]
        slow.hold(slow.default_stream)
        handles = begun(world)
        await turns()
        handles[1].cancel()
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted, asyncio.CancelledError)
        slow.release()
        await works(world)


@pytest.mark.asyncio
async def test_a_timeout_names_who_is_missing() -> None:
    async with slots_world(3) as world:
        await works(world)
        outcomes = await world.ends(
            lambda comm: comm.all_reduce(world.array(comm, [1.0]), "k", timeout=0.1) if comm.rank else None
        )
        assert_kinds(outcomes[1:], CollectiveTimeout)
        assert list(outcomes[1].missing) == [0]
        one = world.comms[0]
        await asyncio.gather(one.all_reduce(world.array(one, [1.0]), "k"), return_exceptions=True)
        await works(world)


@pytest.mark.asyncio
async def test_unlike_shapes_are_a_mismatch_on_all_ranks() -> None:
    async with slots_world(3) as world:
        for _ in range(3):
            outcomes = await world.ends(
                lambda comm: comm.all_reduce(world.array(comm, np.zeros(4 + (comm.rank == 1))), "k")
            )
            assert_kinds(outcomes, CollectiveMismatch)
            await works(world)
            await works(world)


@pytest.mark.asyncio
@pytest.mark.parametrize("turn", [0, 1, 2, 3, 4, 6, 8, 12])
async def test_memory_of_a_killed_rank_is_not_touched(turn: int) -> None:
    async with slots_world(3, quiet=False) as world:
        await works(world)
        await works(world)
        handles = begun(world)
        await turns(turn)
        world.comms.kill(1)
        # What has arrived is read, as long as nobody knows: the memory is still mapped.
        await until(lambda: all(1 in world.comms[rank]._session.engine.router.lost for rank in (0, 2)))
        world.devices[1].sharing().perish()
        survivors = [handles[0], handles[2]]
        outcomes = await asyncio.gather(*survivors, return_exceptions=True)
        assert all(isinstance(one, PeerLost) or (one.get() == 6).all() for one in outcomes)
        if not handles[1].cancel():
            handles[1].exception()
        for comm in (world.comms[0], world.comms[2]):
            with pytest.raises(PeerLost):  # a call whose handle was done may have failed later
                await comm.all_reduce(world.array(comm, [1.0]), "k")


@pytest.mark.asyncio
async def test_survivors_share_memory_in_the_next_epoch() -> None:
    async with slots_world(3, quiet=False) as world:
        await works(world)
        world.comms.kill(1)
        world.devices[1].sharing().perish()
        survivors = [world.comms[0], world.comms[2]]
        made = await asyncio.gather(*(comm.shrink() for comm in survivors))
        devices = [world.devices[0], world.devices[2]]
        for _ in range(3):
            handles = [
                comm.all_reduce(device.array(np.ones(8)), "k") for comm, device in zip(made, devices, strict=True)
            ]
            assert all((result.get() == 2).all() for result in await asyncio.gather(*handles))
        assert all(path_of(comm).state is slots.SlotsState.READY for comm in made)


@pytest.mark.asyncio
async def test_the_device_has_no_memory() -> None:
    async with slots_world(2) as world:
        await works(world)
        big = [world.array(comm, np.zeros(places.FIRST_NBYTES // 4 + 1)) for comm in world.comms]
        world.devices[1].fail_next_allocation(3)
        outcomes = await ended(
            world, [comm.all_reduce(x, "k", out=x) for comm, x in zip(world.comms, big, strict=True)]
        )
        assert_kinds(outcomes, CollectiveAborted)
        assert all("rank 1 has no memory for" in str(one) for one in outcomes)
        world.devices[1].fail_next_allocation(0)
        await works(world)


@pytest.mark.asyncio
@pytest.mark.parametrize("step", ["wait", "passed", "mark", "run"])
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_the_device_refuses(step: str, number: int) -> None:
    async with slots_world(2) as world:
        await works(world)
        device = world.devices[1]
        arrays = [world.array(comm, np.full(LONG, comm.rank + 1.0)) for comm in world.comms]
        where = device.sharing() if step == "run" else device
        usual, left = getattr(where, step), [number]

        def broken(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("the device refuses")
            return usual(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, step, broken)
            outcomes = await world.ends(lambda comm: comm.all_reduce(arrays[comm.rank], "k"))
            await world.ends(lambda comm: comm.synchronize())
        if left[0] < 0 and (step, number) != ("mark", 0):  # refused before the call begins, it is made anew
            assert "the device refuses" in str(outcomes[1])
        else:
            assert_sums(world, outcomes)
        await works(world)


@pytest.mark.asyncio
async def test_a_stream_fails() -> None:
    async with slots_world(2, quiet=False) as world:

        def fail() -> None:
            raise RuntimeError("a kernel failed")

        arrays = [world.array(comm, np.ones(LONG)) for comm in world.comms]
        world.devices[1].run(world.devices[1].default_stream, fail)
        outcomes = await world.ends(lambda comm: comm.all_reduce(arrays[comm.rank], "k"))
        assert "a kernel failed" in str(outcomes[0])
