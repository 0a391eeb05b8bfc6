"""All_reduces of devices on several hosts: the backend inside of hosts, links across them."""

from __future__ import annotations

import numpy as np
import pytest

from kfcomm.collectives.on_device import hierarchy
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError, PeerLost
from kfcomm.testing import FakeDevice
from kfcomm.types import Verb
from tests.collectives.on_device.worlds import device_world
from tests.conformance.worlds import assert_kinds, ends, everywhere, until


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of 16 elements of float32."""
    monkeypatch.setitem(hierarchy.HierarchicalPath.__init__.__kwdefaults__, "share_nbytes", 64)


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "hosts"), [(4, 2), (6, 2), (6, 3), (8, 4)])
async def test_any_sizes_give_the_sum(size: int, hosts: int) -> None:
    async with device_world(size, hosts=hosts) as world:
        assert world.comms[0].route.route == "hierarchy"
        for count in (0, 1, 3, 31, 32, 33, 64, 100, 1000):
            base = np.arange(count, dtype=np.float32)
            results = await world.everywhere(lambda c, b=base: c.all_reduce(world.array(c, b + c.rank), f"of {b.size}"))
            for result in results:
                np.testing.assert_array_equal(result, base * size + size * (size - 1) / 2)


@pytest.mark.asyncio
async def test_only_shares_cross_the_network_and_all_ranks_carry_one() -> None:
    async with device_world(4, hosts=2) as world:
        await world.everywhere(lambda c: c.all_reduce(world.array(c, np.ones(32)), "k"))
        kinds = [(rank, launched.verb) for _, rank, launched in world.fabric.launched]
        assert sorted(kinds) == sorted([(0, Verb.REDUCE_SCATTER), (1, Verb.REDUCE_SCATTER), (0, Verb.ALL_GATHER),
                                        (1, Verb.ALL_GATHER)] * 2)  # fmt: skip


@pytest.mark.asyncio
async def test_in_place_and_on_a_stream_that_is_slow() -> None:
    async with device_world(4, hosts=2) as world:
        arrays = [world.array(comm, np.full(50, comm.rank)) for comm in world.comms]
        for device in world.devices:
            device.hold(device.default_stream)
        handles = [comm.all_reduce(x, "k", out=x) for comm, x in zip(world.comms, arrays, strict=True)]
        for device in world.devices:
            device.release(device.default_stream)
        for handle, x in zip(handles, arrays, strict=True):
            assert await handle is x
        await everywhere(world.comms, lambda c: c.synchronize())
        assert all((x.get() == 6).all() for x in arrays)


@pytest.mark.asyncio
async def test_other_verbs_and_ops_without_the_backend_go_through_the_host() -> None:
    async with device_world(4, hosts=2) as world:
        gathered = await world.everywhere(lambda c: c.all_gather(world.array(c, [c.rank]), "gather"))
        assert all(one.tolist() == [[0], [1], [2], [3]] for one in gathered)
        results = await world.everywhere(
            lambda c: c.all_reduce(world.devices[c.rank].array(np.array([c.rank], np.int16)), "ints")
        )
        assert all(one.tolist() == [6] for one in results)
        assert not world.fabric.launched


@pytest.mark.asyncio
async def test_ranks_that_disagree_and_a_call_that_is_refused() -> None:
    elsewhere = FakeDevice(7)
    async with device_world(4, hosts=2, aborted=True) as world:
        await world.works("before")
        results = await world.ends(lambda c: c.all_reduce(world.array(c, np.ones(40 + c.rank // 3)), "k"))
        assert_kinds(results, CollectiveMismatch)
        await world.works("between")
        results = await world.ends(
            lambda c: c.all_reduce(
                (elsewhere.array(np.ones(40, np.float32)) if c.rank == 2 else world.array(c, np.ones(40))), "l"
            )
        )
        assert [type(one) for one in results] == [CollectiveAborted, CollectiveAborted, ConfigError, CollectiveAborted]
        await world.works()


@pytest.mark.asyncio
async def test_a_rank_that_dies() -> None:
    async with device_world(4, hosts=2, quiet=False) as world:
        await world.works("before")
        handles = [comm.all_reduce(world.array(comm, np.ones(40)), "k") for comm in world.comms[:3]]
        world.comms.kill(3)
        results = await ends(world.comms[:3], lambda c: world.get(c, handles[c.rank]))
        assert_kinds(results, PeerLost)
        await until(lambda: not any(device.num_waiting for device in world.devices[:3]))
        world.comms[3]._paths.close()
        await until(lambda: not world.devices[3].num_waiting)
