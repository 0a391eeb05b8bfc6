"""Every verb on device memory, along every route: what NumPy gives; and what cannot be is refused in plain words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    TransportError,
)
from kfcomm.testing import FakeArray, FakeDevice
from tests.collectives.on_device.worlds import DeviceWorld, device_world
from tests.conformance import worlds
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns

SIZE = 4
ROUTES: dict[str, dict[str, Any]] = {
    "backend": {},
    "shared": {"shared": True},
    "no backend": {"backend": ""},
    "hierarchy": {"hosts": 2},
    "links": {"device_transport": "tcp"},
}
BASE = np.arange(12, dtype=np.float32).reshape(4, 3)
ALL = [BASE + rank for rank in range(SIZE)]
SUM = sum(ALL)


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
async def test_an_input_that_is_not_contiguous(route: str) -> None:
    async with device_world(SIZE, **ROUTES[route]) as world:
        for result in await world.everywhere(lambda c: c.all_reduce(world.array(c, ALL[c.rank])[:, 1:], "k")):
            np.testing.assert_array_equal(result, SUM[:, 1:])


INTO: dict[str, tuple[Callable[[Any, Any, Any], Any], int, list[Any]]] = {
    "all_reduce": (lambda c, x, out: c.all_reduce(x, "k", out=out), 12, [SUM] * SIZE),
    "all_gather": (lambda c, x, out: c.all_gather(x, "k", out=out), 12 * SIZE, [np.stack(ALL)] * SIZE),
    "reduce_scatter": (lambda c, x, out: c.reduce_scatter(x, "k", out=out), 3, list(SUM)),
    "scatter": (lambda c, x, out: c.scatter(x, 2, "k", out=out), 3, list(ALL[2])),
    "all_to_all": (lambda c, x, out: c.all_to_all(x, "k", out=out), 12,
                   [np.stack([one[rank] for one in ALL]) for rank in range(SIZE)]),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("verb", INTO)
async def test_out_may_join_axes(verb: str, route: str) -> None:
    call, size, expected = INTO[verb]
    async with device_world(SIZE, **ROUTES[route]) as world:
        outs = [world.array(comm, np.zeros(size, np.float32)) for comm in world.comms]
        for _ in range(2):
            results = await everywhere(world.comms, lambda c: call(c, world.array(c, ALL[c.rank]), outs[c.rank]))
            await everywhere(world.comms, lambda c: c.synchronize())
            for result, out, wanted in zip(results, outs, expected, strict=True):
                assert result is out
                np.testing.assert_array_equal(out.get(), wanted.reshape(-1))


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ["backend", "shared"])
async def test_lists_and_parts(route: str) -> None:
    async with device_world(2, **ROUTES[route]) as world:

        def parts(comm: Any) -> list[FakeArray]:
            return [world.array(comm, np.full(to + 1, 10 * comm.rank + to)) for to in range(2)]

        received = await everywhere(world.comms, lambda c: c.all_to_all(parts(c), "lists"))
        await everywhere(world.comms, lambda c: c.synchronize())
        for rank, lines in enumerate(received):
            assert [line.get().tolist() for line in lines] == [[10 * source + rank] * (rank + 1) for source in range(2)]

        outs = [world.array(comm, np.zeros(comm.rank + 1)) for comm in world.comms]
        scattered = await everywhere(
            world.comms, lambda c: c.scatter(parts(c) if c.rank == 0 else None, 0, "scatter", out=outs[c.rank])
        )
        assert [one.get().tolist() for one in scattered] == [[0], [1, 1]]
        assert all(one is out for one, out in zip(scattered, outs, strict=True))
        even = await everywhere(
            world.comms, lambda c: c.scatter(world.array(c, [1, 2]) if c.rank == 0 else None, 0, "s")
        )
        assert isinstance(even[0], FakeArray)
        assert even[1].tolist() == [2]


@pytest.mark.asyncio
async def test_messages_keep_their_order() -> None:
    async with device_world(2) as world:
        one, other = world.comms
        device = world.devices[0]
        x = device.array(np.array([1.0, 2.0]))
        device.hold_copies()
        handles = [one.send(x, 1, "t"), one.send(np.array([3.0]), 1, "t"), one.send(x, 1, "another")]
        device.release_copies()
        out = world.devices[1].array(np.zeros(2))
        assert await other.recv(0, "t", out=out) is out
        assert out.get().tolist() == [1, 2]
        assert (await other.recv(0, "t")).tolist() == [3]
        assert (await other.recv(0, "another")).tolist() == [1, 2]
        await asyncio.gather(*handles)


@pytest.mark.asyncio
async def test_a_message_has_its_host_memory_until_it_is_received() -> None:
    count = 100_000
    async with device_world(2) as world:
        one, other = world.comms
        sent = []
        for number in range(3):
            sent.append(one.send(world.array(one, np.full(count, number)), 1, f"{number}"))
            await turns()
        for number in range(3):
            assert (await other.recv(0, f"{number}") == number).all()
        await asyncio.gather(*sent)
        world.devices[0].hold_copies()
        given_up = one.send(world.array(one, np.zeros(count)), 1, "t")
        given_up.cancel()
        assert world.uses_pinned_memory(one)
        world.devices[0].release_copies()
        assert_kinds(await ends([other], lambda c: c.recv(0, "t")), CollectiveAborted)
        await worlds.until(lambda: not world.uses_pinned_memory(one))


@pytest.mark.asyncio
async def test_a_receive_that_was_cancelled_leaves_its_message_and_its_out_on_the_device_alone() -> None:
    values = np.arange(1_000_000)
    async with device_world(2) as world:
        one, other = world.comms
        for when in range(0, 40, 3):
            outs = [world.array(other, np.zeros(values.shape)) for _ in range(2)]
            first = other.recv(0, "t", out=outs[0])
            sent = one.send(world.array(one, values), 1, "t")
            await turns(when)
            was_cancelled = first.cancel()
            got = await (other.recv(0, "t", out=outs[1]) if was_cancelled else first)
            await sent
            await everywhere(world.comms, lambda c: c.synchronize())
            assert got is outs[was_cancelled]
            assert (got.get() == values).all()
            assert not was_cancelled or not outs[0].get().any()


@pytest.mark.asyncio
async def test_a_change_of_strategy_among_calls_whose_copies_are_slow() -> None:
    async with device_world(SIZE, shared=True) as world:

        async def calls(comm: Any) -> list[Any]:
            device = world.devices[comm.rank]
            device.hold_copies()
            handles = [comm.all_reduce(world.array(comm, ALL[comm.rank]), "before")]
            swap = comm.set_strategy("ring")
            handles.append(comm.all_reduce(world.array(comm, ALL[comm.rank]), "after"))
            await swap
            device.release_copies()
            results = [await handle for handle in handles]
            await comm.synchronize()
            return [result.get() for result in results]

        for results in await everywhere(world.comms, calls):
            for result in results:
                np.testing.assert_array_equal(result, SUM)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.asyncio
async def test_results_of_a_mapping_go_into_its_out(route: str) -> None:
    async with device_world(SIZE, **ROUTES[route]) as world:
        outs = [{"a": world.array(c, BASE), "b": world.array(c, BASE[0])} for c in world.comms]
        results = await everywhere(
            world.comms,
            lambda c: c.all_reduce_many(
                {"b": world.array(c, ALL[c.rank][0]), "a": world.array(c, ALL[c.rank])}, "m", out=outs[c.rank]
            ),
        )
        await everywhere(world.comms, lambda c: c.synchronize())
        for result, out in zip(results, outs, strict=True):
            assert result is out
            assert min(out["a"].version, out["b"].version) > 0
            np.testing.assert_array_equal(out["a"].get(), SUM)
            np.testing.assert_array_equal(out["b"].get(), SUM[0])


# -------------------------------------------------------------------- refused


def _on(world: DeviceWorld, comm: Any) -> FakeArray:
    return world.array(comm, [1, 2, 3, 4])


REFUSED: dict[str, tuple[Callable[[DeviceWorld, Any], Any], str]] = {
    "wire_dtype": (lambda w, c: c.all_reduce(_on(w, c), "k", wire_dtype="float16"), "host memory"),
    "stream of a host array": (lambda w, c: c.all_reduce(np.ones(3), "k", stream=1), "stream="),
    "an invalid root": (lambda w, c: c.broadcast(_on(w, c), -1, "k"), "root -1"),
    "an invalid op": (lambda w, c: c.all_reduce(_on(w, c), "k", op="median"), "median"),
    "avg of integers": (lambda w, c: c.all_reduce(w.devices[c.rank].array([1, 2]), "k", op="avg"), "avg"),
    "uneven all_to_all": (lambda w, c: c.all_to_all(w.array(c, [1, 2, 3]), "k"), "3 rows among 2 ranks"),
    "rows of a number": (lambda w, c: c.reduce_scatter(w.array(c, 1.0), "k"), "without dimensions"),
    "out of another shape": (lambda w, c: c.all_reduce(_on(w, c), "k", out=w.array(c, [1])), "out has shape"),
    "out in host memory": (lambda w, c: c.all_reduce(_on(w, c), "k", out=np.zeros(4, np.float32)), "device"),
    "a stream of nothing": (lambda w, c: c.all_reduce(_on(w, c), "k", stream="mine"), "stream"),
    "both memories in a mapping": (lambda w, c: c.all_reduce_many({"a": _on(w, c), "b": np.ones(2)}), "got both"),
    "both memories in a list": (lambda w, c: c.all_to_all([_on(w, c), np.ones(4, np.float32)], "k"), "got both"),
    "both memories in a list of sums": (lambda w, c: c.reduce_scatter([_on(w, c), np.ones(4, np.float32)]), "got both"),
    "parts of several shapes": (lambda w, c: c.reduce_scatter([_on(w, c), w.array(c, [1])], "k"), "of one shape"),
    "consensus": (lambda w, c: c.consensus(_on(w, c), "k"), "a copy in host memory"),
    "an invalid timeout": (lambda w, c: c.all_reduce(_on(w, c), "k", timeout=-1), "timeout"),
    "half of itself as out": (
        lambda w, c: (lambda x: c.all_reduce(x[:2], "k", out=x[1:3]))(_on(w, c)),
        "shares some of the memory",
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("route", ["backend", "shared"])
@pytest.mark.parametrize("what", REFUSED)
async def test_invalid_arguments_are_refused(what: str, route: str) -> None:
    call, words = REFUSED[what]
    async with device_world(2, aborted=True, **ROUTES[route]) as world:
        for comm in world.comms:
            with pytest.raises(ConfigError, match=words):
                await call(world, comm)
        await world.works()


@pytest.mark.asyncio
async def test_an_array_on_a_device_where_the_rank_has_none() -> None:
    device = FakeDevice(0)
    async with worlds.world(2) as comms:
        for comm in comms:
            with pytest.raises(ConfigError, match="joined without a device"):
                await comm.all_reduce(device.array(np.ones(2)), "k")


@pytest.mark.asyncio
async def test_host_and_device_under_one_name_differ_where_all_have_a_device() -> None:
    async with device_world(2, shared=True, aborted=True) as world:
        results = await world.ends(lambda c: c.all_reduce(_on(world, c) if c.rank else np.ones(4, np.float32), "k"))
        assert_kinds(results, CollectiveMismatch)
        assert all("in device memory" in str(error) for error in results)
        await world.works()


@pytest.mark.asyncio
async def test_late_failures_are_raised_by_the_next_call() -> None:
    async with device_world(2) as world:
        await world.works("before")
        world.fabric.stop(1)
        await everywhere(world.comms, lambda c: c.all_reduce(_on(world, c), "k", timeout=0.1))
        await worlds.until(lambda: all(comm._devices._late is not None for comm in world.comms))
        for comm in world.comms:
            with pytest.raises(CollectiveError, match="'k'"):
                comm.all_reduce(_on(world, comm), "next")
        late = await ends(world.comms, lambda c: c.synchronize())
        assert all("'k'" in str(error) for error in late)
        await everywhere(world.comms, lambda c: c.synchronize())


@pytest.mark.asyncio
async def test_a_device_that_never_comes_to_an_array_of_two_steps() -> None:
    async with device_world(2, timeout_s=0.3, aborted=True) as world:
        arrays = [_on(world, comm) for comm in world.comms]
        world.devices[0].hold_copies()
        results = await ends(world.comms, lambda c: c.all_gather(arrays[c.rank], "k", concat=True))
        assert isinstance(results[0], CollectiveTimeout)
        assert "the device did not finish" in str(results[0])
        assert isinstance(results[1], CollectiveError)
        world.devices[0].release_copies()
        await worlds.until(lambda: not world.devices[0].num_promised)


@pytest.mark.asyncio
async def test_a_device_that_fails_in_the_midst_of_the_hierarchy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with device_world(4, hosts=2, aborted=True) as world:
        await world.works("before")
        device, stream = world.devices[1], world.comms[1]._paths._made[Route.HIERARCHY]._stream
        wait = device.wait

        def fails(target: Any, mark: Any) -> None:
            if target is stream:
                raise TransportError("the device has fallen off the bus")
            wait(target, mark)

        monkeypatch.setattr(device, "wait", fails)
        results = await world.ends(lambda c: c.all_reduce(_on(world, c), "k"))
        assert_kinds(results, CollectiveError)
        assert any("fallen off the bus" in str(error) for error in results)
        monkeypatch.undo()
        await world.works()


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["a weight", "a weight for a mapping", "adasum", "a shared result"])
async def test_calls_for_host_memory_say_why_they_refuse_groups_with_devices(what: str) -> None:
    def call(comm: Any, x: Any) -> Any:
        if what == "a weight for a mapping":
            return comm.all_reduce_many({"x": x}, name="k", op="avg", weight=2)
        options = {"a weight": {"op": "avg", "weight": 2}, "adasum": {"op": "adasum"}}.get(what, {"shared": True})
        return comm.all_reduce(x, "k", **options)

    device = FakeDevice(0)
    async with worlds.world(2, devices=[device, None], maker=None, aborted=True) as comms:
        for comm in comms:
            with pytest.raises(
                ConfigError, match=f"{what[:8]}.* is for arrays in host memory, .* have one.*make a group"
            ):
                await call(comm, np.ones(3, np.float32))
        with pytest.raises(ConfigError, match=r"is for arrays in host memory$"):
            await call(comms[0], device.array(np.ones(3, np.float32)))
        with pytest.raises(ConfigError, match="have one"):
            await call(comms[1], np.ones(3, np.float32))
        alone = await asyncio.gather(*(comm.split(comm.rank) for comm in comms))
        for comm in alone:
            assert comm is not None
            found = await call(comm, np.ones(3, np.float32))
            assert (found["x"] if "mapping" in what else found).tolist() == [1, 1, 1]
