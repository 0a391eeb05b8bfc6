"""Batches of device memory that are begun again and again: their results, and how each failure ends them."""

from __future__ import annotations

from typing import Any

import pytest

from kfcomm.collectives.on_device import backed
from kfcomm.errors import CollectiveError, CollectiveMismatch, ConfigError, PeerLost
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance.worlds import assert_kinds, ends, everywhere, until

NAMES = ("a", "b", "c")


def mapping(world: DeviceWorld, comm: Any, value: float, *more: float) -> dict[str, Any]:
    """Arrays of one rank: by name, each with its rank and its place."""
    return {name: world.array(comm, [value, comm.rank, at, *more]) for at, name in enumerate(NAMES)}


async def repeated(world: DeviceWorld) -> list[Any]:
    """A persistent batch of each rank, which has been begun often enough to be launched at once."""
    inits = [comm.all_reduce_many_init(mapping(world, comm, 1), "many") for comm in world.comms]
    for _ in range(4):
        await everywhere(world.comms, lambda comm: inits[comm.rank].start())
        await everywhere(world.comms, lambda comm: comm.synchronize())
    return inits


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2])
async def test_each_start_has_what_the_arrays_hold_then(size: int) -> None:
    async with device_world(size) as world:
        xs = [mapping(world, comm, 0) for comm in world.comms]
        outs = [mapping(world, comm, 0) for comm in world.comms]
        inits = [comm.all_reduce_many_init(xs[comm.rank], "many", out=outs[comm.rank]) for comm in world.comms]
        for number in range(12):
            for comm in world.comms:
                device, given = world.devices[comm.rank], xs[comm.rank]
                for name, new in mapping(world, comm, number).items():
                    if number % 4 == 3:  # the mapping holds another array
                        given[name] = new
                    else:
                        device.copy(new, given[name], device.default_stream)
            await everywhere(world.comms, lambda comm: inits[comm.rank].start())
            await everywhere(world.comms, lambda comm: comm.synchronize())
            for out in outs:
                for at, name in enumerate(NAMES):
                    assert out[name].get().tolist() == [size * number, size * (size - 1) / 2, size * at]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2])
async def test_a_repeated_batch_is_over_for_its_caller_where_it_is_begun(size: int) -> None:
    async with device_world(size) as world:
        inits = await repeated(world)
        for device in world.devices:
            device.hold()
        for init in inits:
            assert init.start().done()
        for device in world.devices:
            device.release()
        await everywhere(world.comms, lambda comm: comm.synchronize())
        assert [init.result()["a"].get().tolist() for init in inits] == [[size, size * (size - 1) / 2, 0]] * size


@pytest.mark.asyncio
async def test_a_killed_rank_is_raised_by_a_repeated_batch() -> None:
    async with device_world(2, quiet=False) as world:
        inits = await repeated(world)
        world.fabric.stop(1)
        await everywhere(world.comms, lambda comm: inits[comm.rank].start())
        world.comms.kill(1)
        errors = await ends(world.comms[:1], lambda comm: comm.synchronize())
        assert_kinds(errors, PeerLost)
        assert errors[0].rank == 1
        assert_kinds(await ends(world.comms[:1], lambda comm: inits[comm.rank].start()), PeerLost)
        await until(lambda: not world.devices[0].num_waiting)
        world.comms[1]._paths.close()
        await until(lambda: not world.devices[1].num_waiting)


@pytest.mark.asyncio
async def test_an_unlike_batch_is_a_mismatch_on_both_ranks() -> None:
    async with device_world(2) as world:
        inits = await repeated(world)
        world.devices[0].hold()
        assert inits[0].start().done()
        unlike = world.comms[1].all_reduce_many(mapping(world, world.comms[1], 1, 7), "many")
        assert_kinds(await ends(world.comms[1:], lambda _: unlike), CollectiveMismatch)
        world.devices[0].release()
        assert_kinds(await ends(world.comms[:1], lambda comm: comm.synchronize()), CollectiveMismatch)
        await world.works()


@pytest.mark.asyncio
async def test_a_refused_launch_fails_a_repeated_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backed, "GRACE_S", 0.01)
    async with device_world(2) as world:
        inits = await repeated(world)
        path: Any = next(path for path in world.comms[1]._paths._made.values() if path.launches is not None)
        path.backend.is_open = False  # as if it had ended by itself
        errors = await world.ends(lambda comm: inits[comm.rank].start())
        assert all(isinstance(error, CollectiveError) for error in errors)
        assert "aborted or closed" in str(errors[1])
        await world.works()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_repeated", [False, True])
async def test_results_in_the_memory_of_other_inputs_are_refused(is_repeated: bool) -> None:
    async with device_world(2) as world:
        for _ in range(4 if is_repeated else 0):
            xs, outs = ([mapping(world, comm, 1) for comm in world.comms] for _ in range(2))
            await everywhere(
                world.comms,
                lambda comm, xs=xs, outs=outs: comm.all_reduce_many(xs[comm.rank], "m", out=outs[comm.rank]),
            )
        xs = [mapping(world, comm, 1) for comm in world.comms]
        turned = [{"a": one["b"], "b": one["a"], "c": one["c"]} for one in xs]
        calls: list[Any] = [lambda comm: comm.all_reduce_many(xs[comm.rank], "m", out=turned[comm.rank])]
        calls.append(lambda comm: comm.all_reduce([*xs[comm.rank].values()], out=[*turned[comm.rank].values()]))
        for call in calls:
            assert_kinds(await ends(world.comms, call), ConfigError)
        await everywhere(world.comms, lambda comm: comm.all_reduce_many(xs[comm.rank], "m", out=xs[comm.rank]))
        await world.works()
