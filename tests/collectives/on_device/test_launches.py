"""Repeated device calls that are launched at once: where, when not, and how each failure ends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays.devices.routes import Route
from kfcomm.collectives.on_device import backed, launches, ordering
from kfcomm.core.launch_order import launch_order
from kfcomm.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, ConfigError, PeerLost
from kfcomm.testing import FakeDevice, FakeFabric, run_threads, sync_world
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance import worlds
from tests.conformance.worlds import assert_kinds, ends, everywhere, until

NAMES = ("a", "b", "c")


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not asked for notices of uses, unless somebody waits."""
    monkeypatch.setattr(launches, "WATCH_AFTER_S", worlds.HANG_S)


async def learned(world: DeviceWorld, names: tuple[str, ...] = NAMES) -> None:
    """Calls by these names, until every rank follows their order, and all of them are over."""
    for _ in range(3):
        for name in names:
            await everywhere(world.comms, lambda comm, name=name: called(world, comm, name))
    await everywhere(world.comms, lambda comm: comm.synchronize())


def called(world: DeviceWorld, comm: Any, name: str, value: float = 1, **options: Any) -> Any:
    return comm.all_reduce(world.array(comm, [value, comm.rank]), name, **options)


def num_launched(world: DeviceWorld) -> list[int]:
    """Uses of each rank that were launched at once, without a notice of the device so far."""
    return [len(comm._paths._made[Route.BACKEND].launches) for comm in world.comms]


def counts(comm: Any, names: Iterable[str]) -> list[int]:
    """Completed uses of some names, in the order of the alphabet."""
    return [key.count for key in sorted(comm.statistics().keys, key=lambda key: key.name) if key.name in names]


def own_streams(device: FakeDevice) -> list[Any]:
    """The streams that the runtime has made."""
    return [stream for stream in device.streams if stream.is_urgent]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_a_repeated_use_runs_on_the_callers_stream_and_is_done_at_once(size: int) -> None:
    async with device_world(size) as world:
        await learned(world)
        for device in world.devices:
            for stream in own_streams(device):
                device.hold(stream)
        handles = [called(world, comm, "a", 2) for comm in world.comms]
        assert all(handle.done() for handle in handles)
        assert {handle.seq for handle in handles} == {3}
        assert [handle.result().get().tolist() for handle in handles] == [[2 * size, size * (size - 1) / 2]] * size
        assert num_launched(world) == [1] * size
        world.devices[0].release()
        await everywhere(world.comms, lambda comm: comm.synchronize())
        assert num_launched(world) == [0] * size


@pytest.mark.usefixtures("unwatched")
@pytest.mark.asyncio
async def test_uses_that_follow_quickly_are_launched_at_once() -> None:
    async with device_world(1) as world:
        (comm,) = world.comms
        await called(world, comm, "others")
        await comm.synchronize()
        for stream in own_streams(world.devices[0]):
            world.devices[0].hold(stream)
        await called(world, comm, "a")
        handles = [called(world, comm, "a", value) for value in (2, 3)]
        assert num_launched(world) == [2]
        world.devices[0].release()
        await comm.synchronize()
        assert [handle.result().get().tolist() for handle in handles] == [[2, 0], [3, 0]]
        assert counts(comm, ["a"]) == [3]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.asyncio
async def test_all_uses_are_counted() -> None:
    async with device_world(2) as world:
        await learned(world)
        for _ in range(5):
            await everywhere(world.comms, lambda comm: called(world, comm, "a"))
            await everywhere(world.comms, lambda comm: called(world, comm, "b"))
            await everywhere(world.comms, lambda comm: called(world, comm, "c"))
        assert num_launched(world) == [15, 15]
        await everywhere(world.comms, lambda comm: comm.synchronize())
        for comm in world.comms:
            assert counts(comm, NAMES) == [8, 8, 8]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("verb", "given", "expected"),
    [
        ("all_reduce", (), [[1, 3]] * 2),
        ("reduce", (1,), [None, [1, 3]]),
        ("broadcast", (1,), [[1, 2]] * 2),
        ("all_gather", (), [[[0, 1], [1, 2]]] * 2),
        ("reduce_scatter", (), [[1], [3]]),
        ("gather", (0,), [[[0, 1], [1, 2]], None]),
        ("all_to_all", (), [[0, 1], [1, 2]]),
    ],
)
async def test_verbs(verb: str, given: tuple[Any, ...], expected: list[Any]) -> None:
    async with device_world(2) as world:
        for _ in range(4):
            results = await everywhere(
                world.comms,
                lambda comm: getattr(comm, verb)(world.array(comm, [comm.rank, comm.rank + 1]), *given, name="k"),
            )
            await everywhere(world.comms, lambda comm: comm.synchronize())
            assert [None if one is None else one.get().tolist() for one in results] == expected


@pytest.mark.asyncio
async def test_results_in_given_memory() -> None:
    async with device_world(2) as world:
        outs = [world.array(comm, [0, 0]) for comm in world.comms]
        xs = [world.array(comm, [1, comm.rank]) for comm in world.comms]
        for number in range(4):
            results = await everywhere(
                world.comms, lambda comm: comm.all_reduce(xs[comm.rank], "k", out=outs[comm.rank])
            )
            await everywhere(world.comms, lambda comm: comm.synchronize())
            assert all(one is out for one, out in zip(results, outs, strict=True))
            assert [out.get().tolist() for out in outs] == [[2, 1]] * 2
            assert all(out.version > number for out in outs)
        for number in range(3):
            results = await everywhere(world.comms, lambda comm: comm.all_reduce(xs[comm.rank], "k", out=xs[comm.rank]))
            await everywhere(world.comms, lambda comm: comm.synchronize())
            assert all(one is x for one, x in zip(results, xs, strict=True))
            assert [x.get().tolist() for x in xs] == [[2 ** (number + 1), 2**number]] * 2
        both = [world.array(comm, [1, 1, 1]) for comm in world.comms]
        refused = await ends(world.comms, lambda c: c.all_reduce(both[c.rank][:2], "k", out=both[c.rank][1:]))
        assert all(isinstance(error, CollectiveError | ConfigError) for error in refused)


@pytest.mark.asyncio
async def test_names_in_changing_orders_stay_right() -> None:
    rng = random.Random(5)
    names = [f"key {number}" for number in range(12)]
    async with device_world(3) as world:

        async def step(comm: Any, order: list[str]) -> None:
            handles = {}
            for name in order:
                handles[name] = called(world, comm, name, names.index(name))
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
            results = {name: await handle for name, handle in handles.items()}
            await comm.synchronize()
            for name, result in results.items():
                assert result.get().tolist() == [3 * names.index(name), 3]

        for number in range(12):
            shared = rng.sample(names, len(names) - number % 3)
            orders = [shared if number % 2 else rng.sample(shared, len(shared)) for _ in world.comms]
            await everywhere(world.comms, lambda comm, orders=orders: step(comm, orders[comm.rank]))
        await everywhere(world.comms, lambda comm: comm.synchronize())


@pytest.mark.asyncio
async def test_uses_on_several_streams() -> None:
    async with device_world(2) as world:
        await learned(world)
        others = [device.stream() for device in world.devices]

        async def calls(comm: Any) -> None:
            device, results = world.devices[comm.rank], []
            for number in range(9):
                stream = others[comm.rank] if number % 2 else device.default_stream
                with device.working_on(stream):
                    x = device.empty(2, np.dtype(np.float32), stream)
                    device.copy(world.array(comm, [number, comm.rank]), x, stream)
                    results.append(comm.all_reduce(x, NAMES[number % 3]))
                    del x
            await comm.synchronize()
            for number, result in enumerate(results):
                with device.working_on(others[comm.rank] if number % 2 else device.default_stream):
                    assert result.result().get().tolist() == [2 * number, 1]

        await everywhere(world.comms, calls)
        assert num_launched(world) == [0, 0]


@pytest.mark.asyncio
async def test_memory_belongs_to_the_callers_stream_as_a_kernels_does() -> None:
    async with device_world(2) as world:
        await learned(world)
        for device in world.devices:
            device.hold(device.default_stream)
        for _ in range(2):
            for name in NAMES:
                assert all(called(world, comm, name).done() for comm in world.comms)
        assert [device.used_nbytes for device in world.devices] == [0, 0]
        for device in world.devices:
            device.release()
        await everywhere(world.comms, lambda comm: comm.synchronize())


@pytest.mark.asyncio
async def test_synchronize_waits_for_the_device() -> None:
    async with device_world(2) as world:
        await learned(world)
        for device in world.devices:
            device.hold(device.default_stream)
        results = await everywhere(world.comms, lambda comm: called(world, comm, "a"))
        waiting = [asyncio.ensure_future(comm.synchronize()) for comm in world.comms]
        await worlds.turns()
        assert not any(one.done() for one in waiting)
        for device in world.devices:
            device.release()
        await asyncio.gather(*waiting)
        assert [result.get().tolist() for result in results] == [[2, 1]] * 2


@pytest.mark.asyncio
async def test_an_event_loop_gets_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MAX_USES", 4)
    async with device_world(1) as world:
        await learned(world)
        device, (comm,), num_turns = world.devices[0], world.comms, 0
        device.hold(device.default_stream)

        async def others() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(others())
        for number in range(20):
            assert (await called(world, comm, NAMES[number % 3])).shape == (2,)
        assert num_turns >= 16
        task.cancel()
        device.release()
        await comm.synchronize()


@pytest.mark.asyncio
async def test_a_captured_stream_is_refused() -> None:
    async with device_world(2, aborted=True) as world:
        await learned(world)
        first, second = world.comms
        assert called(world, first, "a").done()  # of which a notice is asked for while the stream is captured
        world.devices[0].default_stream.is_capturing = True
        with pytest.raises(ConfigError, match="captured into a graph"):
            called(world, first, "b")
        await called(world, second, "a")
        assert isinstance((await ends([second], lambda comm: called(world, comm, "b")))[0], CollectiveError)
        waiting = asyncio.ensure_future(first.synchronize())
        await worlds.turns()
        assert not waiting.done()
        world.devices[0].default_stream.is_capturing = False
        await ends([first, second], lambda comm: waiting if comm is first else comm.synchronize())
        await world.works()


@pytest.mark.asyncio
async def test_a_use_unlike_the_last_one_raises_mismatch() -> None:
    async with device_world(2) as world:
        await learned(world)
        world.devices[0].hold(world.devices[0].default_stream)
        handle = called(world, world.comms[0], "a")
        assert handle.done()
        unlike = world.comms[1].all_reduce(world.array(world.comms[1], [1, 2, 3]), "a")
        assert_kinds(await ends([world.comms[1]], lambda _: unlike), CollectiveMismatch)
        world.devices[0].release()
        assert_kinds(await ends(world.comms[:1], lambda comm: comm.synchronize()), CollectiveMismatch)
        await world.works("afterwards")
        await learned(world, ("d", "e"))


@pytest.mark.asyncio
async def test_a_rank_that_never_launches_is_named_by_the_deadline() -> None:
    async with device_world(3, timeout_s=0.6) as world:
        await learned(world)
        some = [comm for comm in world.comms if comm.rank != 1]
        handles = [called(world, comm, "a") for comm in some]
        assert all(handle.done() for handle in handles)
        errors = await ends(some, lambda comm: comm.synchronize())
        assert_kinds(errors, CollectiveTimeout)
        assert any(error.missing == (1,) for error in errors)
        await ends([world.comms[1]], lambda comm: called(world, comm, "a"))
        for comm in world.comms:
            comm.set_timeout(worlds.HANG_S)
        await world.works()


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [0, 2])
async def test_a_killed_rank_is_raised_by_what_was_launched(lost: int) -> None:
    async with device_world(3, quiet=False) as world:
        await learned(world)
        world.fabric.stop(lost)
        await everywhere(world.comms, lambda comm: called(world, comm, "a"))
        world.comms.kill(lost)
        survivors = [comm for comm in world.comms if comm.rank != lost]
        errors = await ends(survivors, lambda comm: comm.synchronize())
        assert_kinds(errors, PeerLost)
        assert {error.rank for error in errors} == {lost}
        assert_kinds(await ends(survivors, lambda comm: called(world, comm, "b")), PeerLost)
        await until(lambda: not any(world.devices[comm.rank].num_waiting for comm in survivors))
        world.comms[lost]._paths.close()
        await until(lambda: not world.devices[lost].num_waiting)


@pytest.mark.asyncio
async def test_a_launch_that_is_refused_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backed, "GRACE_S", 0.01)
    async with device_world(2) as world:
        await learned(world)
        path = world.comms[1]._paths._made[Route.BACKEND]
        path.backend.is_open = False  # as if it had ended by itself
        errors = await world.ends(lambda comm: called(world, comm, "a"))
        assert all(isinstance(error, CollectiveError) for error in errors)
        assert "aborted or closed" in str(errors[1])
        await world.works()


@pytest.mark.asyncio
async def test_a_backend_that_breaks_down_fails_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backed, "DOUBT_S", 0.01)
    async with device_world(2) as world:
        await learned(world)
        world.fabric.stop(1)
        await everywhere(world.comms, lambda comm: called(world, comm, "a"))
        world.fabric.break_down("the cable is broken")
        errors = await ends(world.comms, lambda comm: comm.synchronize())
        assert all(isinstance(error, CollectiveError) for error in errors)


@pytest.mark.asyncio
async def test_closed_with_uses_under_way() -> None:
    async with device_world(2) as world:
        await learned(world)
        groups = await everywhere(world.comms, lambda comm: comm.group([0, 1], "pair"))
        for _ in range(4):
            await everywhere(groups, lambda comm: called(world, comm, "a"))
        for device in world.devices:
            device.hold(device.default_stream)
        await everywhere([*groups, *world.comms], lambda comm: called(world, comm, "a"))
        closing = [asyncio.ensure_future(comm.close()) for comm in (*groups, *world.comms)]
        await worlds.turns()
        assert not any(one.done() for one in closing)
        for device in world.devices:
            device.release()
        await asyncio.gather(*closing)


@pytest.mark.asyncio
async def test_a_late_use_is_a_call_of_which_others_can_ask(caplog: pytest.LogCaptureFixture) -> None:
    async with device_world(2, stall_after=0.6) as world:
        await learned(world)
        for device in world.devices:
            device.hold(device.default_stream)
        await everywhere(world.comms, lambda comm: called(world, comm, "a"))
        assert [event["event"] for event in world.comms[0].dump()["events"]][-1:] == ["posted"]
        await until(lambda: "has waited" in caplog.text)
        assert num_launched(world) == [0, 0]
        for device in world.devices:
            device.release()
        await everywhere(world.comms, lambda comm: comm.synchronize())


@pytest.mark.asyncio
async def test_a_full_call_amid_launched_ones() -> None:
    async with device_world(2) as world:
        await learned(world)
        for device in world.devices:
            device.hold(device.default_stream)
        results = [await everywhere(world.comms, lambda comm, n=n: called(world, comm, "a", n)) for n in range(1)]
        results.append(await everywhere(world.comms, lambda comm: called(world, comm, "b", 1, timeout=60)))
        results.append(await everywhere(world.comms, lambda comm: called(world, comm, "c", 2)))
        results.append(await everywhere(world.comms, lambda comm: called(world, comm, "a", 3, timeout=60)))
        for device in world.devices:
            device.release()
        await everywhere(world.comms, lambda comm: comm.synchronize())
        for number, both in enumerate(results):
            assert [one.get().tolist() for one in both] == [[2 * number, 1]] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("is_out_given", [False, True])
async def test_mappings_of_one_dtype_are_one_launch_at_once(is_out_given: bool) -> None:
    async with device_world(2) as world:
        names = [f"g{number}" for number in range(6)]
        for number in range(6):
            xs = [{n: world.array(c, [number, c.rank, at]) for at, n in enumerate(names)} for c in world.comms]
            outs = [{n: world.array(c, [0, 0, 0]) for n in reversed(names)} for c in world.comms]
            for _ in range(3):  # the same arrays again
                given = outs if is_out_given else [None, None]
                handles = [comm.all_reduce_many(xs[comm.rank], "many", out=given[comm.rank]) for comm in world.comms]
                results = await everywhere(handles, lambda handle: handle)
                await everywhere(world.comms, lambda comm: comm.synchronize())
                for result, x in zip(results, given if is_out_given else xs, strict=True):
                    assert list(result) == list(x or ())
                    for at, name in enumerate(names):
                        assert result[name].get().tolist() == [2 * number, 1, 2 * at]
        assert all(handle.seq == 17 for handle in handles)
        comm = world.comms[0]
        comm._paths._made[Route.BACKEND].backend.note = "batches are launched plainly"
        assert str(comm.route).endswith("on one host; batches are launched plainly")
        assert {len(launched.sizes) for _, _, launched in world.fabric.launched} == {6}


@pytest.mark.asyncio
async def test_mappings_that_change() -> None:
    async with device_world(2) as world:

        def call(comm: Any, **shapes: int) -> Any:
            return comm.all_reduce_many({n: world.array(comm, [1] * size) for n, size in shapes.items()}, "many")

        for _ in range(3):
            await everywhere(world.comms, lambda comm: call(comm, a=1, b=2))
        for shapes in ({"a": 1, "b": 3}, {"a": 1, "c": 3}, {"a": 1}, {"a": 1, "b": 2}):
            for _ in range(3):
                results = await everywhere(world.comms, lambda comm, shapes=shapes: call(comm, **shapes))
                await everywhere(world.comms, lambda comm: comm.synchronize())
                for result in results:
                    assert {n: one.get().tolist() for n, one in result.items()} == {
                        n: [2] * s for n, s in shapes.items()
                    }
        errors = await ends(world.comms, lambda comm: call(comm, a=1, b=2 + comm.rank))
        await ends(world.comms, lambda comm: comm.synchronize())
        assert CollectiveMismatch in {type(error) for error in errors}
        await world.works()


@pytest.mark.asyncio
async def test_persistent_mappings() -> None:
    async with device_world(2) as world:
        xs = [{"a": world.array(comm, [1, 2]), "b": world.array(comm, [3])} for comm in world.comms]
        inits = [comm.all_reduce_many_init(xs[comm.rank], "many", out=xs[comm.rank]) for comm in world.comms]
        for number in range(1, 6):
            await everywhere(world.comms, lambda comm: inits[comm.rank].start())
            await everywhere(world.comms, lambda comm: comm.synchronize())
            assert [x["b"].get().tolist() for x in xs] == [[3 * 2**number]] * 2


@pytest.mark.asyncio
async def test_a_new_timeout_holds_for_names_in_use() -> None:
    async with device_world(2) as world:
        await learned(world)
        world.comms[0].set_timeout(0.3)
        assert_kinds(await ends(world.comms[:1], lambda c: world.get(c, called(world, c, "a"))), CollectiveTimeout)
        await ends(world.comms[1:], lambda comm: called(world, comm, "a"))
        world.comms[0].set_timeout(worlds.HANG_S)
        await world.works()


@pytest.mark.usefixtures("unwatched")
@pytest.mark.asyncio
async def test_persistent_starts_are_launched_at_once() -> None:
    async with device_world(2) as world:
        xs = [world.array(comm, [1, 2]) for comm in world.comms]
        inits = [comm.all_reduce_init(xs[comm.rank], "k", out=xs[comm.rank]) for comm in world.comms]
        for _ in range(3):
            await everywhere(world.comms, lambda comm: inits[comm.rank].start())
        await everywhere(world.comms, lambda comm: comm.synchronize())
        await everywhere(world.comms, lambda comm: inits[comm.rank].start())
        assert num_launched(world) == [1, 1]
        await everywhere(world.comms, lambda comm: comm.synchronize())
        assert [x.get().tolist() for x in xs] == [[16, 32]] * 2


async def outcomes(world: DeviceWorld, comm: Any, names: list[str], wrong: str, victim: str) -> list[Any]:
    """Results of an all_reduce of each name, or errors; rank 1 misses one name, or gives an unlike array there."""
    found: list[Any] = []
    for name in names:
        is_wrong = bool(wrong) and name == victim and comm.rank == 1
        if is_wrong and wrong == "missing":
            continue
        try:
            found.append(await comm.all_reduce(world.array(comm, [1, 2, 3] if is_wrong else [1, comm.rank]), name))
        except CollectiveError as error:
            found.append(error.with_traceback(None))
    try:
        await comm.synchronize()
    except CollectiveError:
        return []
    return found


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_random_programs_amid_failures(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backed, "GRACE_S", 0.05)
    monkeypatch.setattr(ordering, "launch_order", partial(launch_order, patience_s=0.02))
    rng, names = random.Random(seed), [f"key {number}" for number in range(5)]
    async with device_world(2, timeout_s=0.5, aborted=True) as world:
        for number in range(12):
            wrong = rng.choice(["unlike", "missing", ""]) if number % 4 == 3 else ""
            order = rng.sample(names, len(names)) if rng.random() < 0.3 else names
            one_round = partial(outcomes, world, names=order, wrong=wrong, victim=rng.choice(names))
            for result in chain(*await everywhere(world.comms, one_round)):
                assert wrong or not isinstance(result, Exception), result
                assert isinstance(result, Exception) or result.get().tolist() == [2, 1]
            if wrong:
                await ends(world.comms, lambda comm: comm.synchronize())
                for comm in world.comms:
                    comm.set_timeout(worlds.HANG_S)
                names = [f"{number} {name}" for name in range(5)]  # one rank has missed a number of the others
                await world.works(f"after {number}")
                for comm in world.comms:
                    comm.set_timeout(0.5)


def blocking(main: Callable[[Any, FakeDevice], Any], size: int = 2) -> list[Any]:
    devices = [FakeDevice(0) for _ in range(size)]
    fabric = FakeFabric()
    with sync_world(size, devices=devices, maker=fabric, timeout=worlds.HANG_S) as comms:
        results = run_threads(comms, lambda comm: main(comm, devices[comm.rank]))
    assert fabric.violations == []
    assert [device.violations for device in devices] == [[]] * size
    return results


def test_blocking_calls() -> None:
    def main(comm: Any, device: FakeDevice) -> list[Any]:
        found = []
        exchange = comm.all_reduce_init(device.array(np.ones(2, np.float32)), "p")
        for number in range(40):
            y = comm.all_reduce(device.array(np.full(2, number, np.float32)), "k")
            handle = comm.all_reduce_async(device.array(np.full(2, number, np.float32)), "j")
            z, w = handle.wait(), exchange.run()
            comm.synchronize() if number % 7 == 3 else None
            found.append([y, z, w])
        comm.synchronize()
        assert counts(comm, "jkp") == [40, 40, 40]
        return [[one.get().tolist() for one in three] for three in found]

    expected = [[[2 * number] * 2, [2 * number] * 2, [2, 2]] for number in range(40)]
    assert blocking(main) == [expected] * 2


def test_blocking_mappings() -> None:
    def main(comm: Any, device: FakeDevice) -> list[Any]:
        xs = {name: device.array(np.ones(2, np.float32)) for name in "ab"}
        outs = {name: device.array(np.ones(2, np.float32)) for name in "ab"}
        stream = device.stream()
        with device.working_on(stream):
            for _ in range(3):
                comm.all_reduce_many(xs, "many", out=outs)
                comm.all_reduce_many_async(xs, "others").wait()
            comm.synchronize()
            for own in own_streams(device):
                device.hold(own)
            comm.all_reduce_many(xs, "many", out=outs)
            comm.all_reduce_many_async(xs, "others").wait()
            comm.synchronize()
            device.release()
            return [outs[name].get().tolist() for name in "ab"]

    assert blocking(main) == [[[2, 2]] * 2] * 2


def test_a_blocking_call_whose_launch_is_refused() -> None:
    def main(comm: Any, device: FakeDevice) -> Any:
        for _ in range(4):
            comm.all_reduce(device.array([1.0]), "k")
        comm.synchronize()
        comm.barrier()
        comm._inner._paths._made[Route.BACKEND].backend.is_open = comm.rank != 0
        comm.barrier()
        try:
            comm.all_reduce(device.array([1.0]), "k")
            comm.synchronize()
        except CollectiveError as error:
            return error
        return None

    errors = blocking(main)
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "aborted or closed" in str(errors[0])
