"""Worlds in memory whose ranks have devices: their reports, and who closes them."""

from __future__ import annotations

import asyncio

import pytest

import kfcomm
from kfcomm.arrays.devices.routes import Route
from kfcomm.testing import MemoryWorld, run_threads, sync_world, world
from tests.stubs import StubDevice, stub


@pytest.mark.asyncio
async def test_every_rank_has_its_own_and_knows_of_all() -> None:
    devices, maker = [stub(0), stub(1)], object()
    async with world(2, devices=devices, maker=maker) as comms:
        for comm, device in zip(comms, devices, strict=True):
            setup = comm._session.devices
            assert setup.device is device
            assert setup.maker is maker
            assert setup.reports == tuple(one.report for one in devices)
            assert comm.route is not None
            assert comm.route.route is Route.BACKEND
    assert [len(device.closed_by) for device in devices] == [1, 1]


@pytest.mark.asyncio
async def test_groups_have_routes_of_their_own() -> None:
    async with world(6, hosts=3, devices=[stub(0), stub(1), stub(2), stub(3), stub(4), None], maker=object()) as comms:
        assert {str(comm.route) for comm in comms} == {
            "staged: some ranks have no device (rank 5: the test gave it no device)"
        }
        assert comms[5]._session.devices.maker is None
        members = ([0, 1], [0, 1, 2, 3], [1, 2], [4, 5])
        routes = (Route.BACKEND, Route.HIERARCHY, Route.STAGED, Route.STAGED)
        for ranks, route in zip(members, routes, strict=True):
            groups = await kfcomm.testing.run_ranks([comms[rank] for rank in ranks], lambda comm: comm.group(ranks))  # noqa: B023
            assert {comm.route.route for comm in groups} == {route}
            said = groups[0].dump()
            assert said["routes"][groups[0]._group.view.id.hex()] == str(groups[0].route)
        assert "(rank 5: " in comms[4].dump()["routes"][groups[0]._group.view.id.hex()]


@pytest.mark.asyncio
async def test_a_world_without_devices_has_no_routes() -> None:
    async with world(2) as comms:
        assert [comm.route for comm in comms] == [None, None]
        assert comms[0].dump()["routes"] == {}


@pytest.mark.asyncio
async def test_the_transport_of_devices() -> None:
    async with world(2, hosts=2, devices=[stub(0), stub(1)], device_transport="nccl") as comms:
        assert comms[0].route.route is Route.BACKEND
    async with world(2, devices=[stub(0), stub(1)], device_transport="tcp") as comms:
        assert comms[1].route.route is Route.STAGED
    for devices in (None, [stub(0), None], [stub(0), stub(1, version=1)]):
        with pytest.raises(kfcomm.ConfigError, match="transport 'nccl' cannot work"):
            MemoryWorld(2, devices=devices, device_transport="nccl")
    with pytest.raises(ValueError, match="2 ranks need as many devices"):
        MemoryWorld(2, devices=[stub(0)])


@pytest.mark.asyncio
async def test_a_device_that_cannot_be_closed_keeps_nothing_else_open() -> None:
    class Broken(StubDevice):
        def close(self) -> None:
            super().close()
            raise OSError("the device is gone")

    comms = MemoryWorld(1, devices=[Broken(stub(0).report)])
    with pytest.raises(OSError, match="the device is gone"):
        await comms.close()
    assert comms[0]._session not in kfcomm.engine.closing.open_sessions()


@pytest.mark.asyncio
async def test_a_forked_child_lets_the_device_alone() -> None:
    device = stub(0)
    comms = MemoryWorld(1, devices=[device])
    session = comms[0]._session
    await asyncio.sleep(0)  # the loop of this process goes on, and has to know by now what it watches
    session.forked()
    assert session.devices.device is None
    assert comms[0].route is None
    await comms.close()
    assert device.closed_by == []


def test_the_blocking_world() -> None:
    devices = [stub(0), stub(1), stub(2)]
    with sync_world(3, devices=devices, maker=object(), device_transport="nccl") as comms:
        assert run_threads(comms, lambda comm: comm.route.route) == [Route.BACKEND] * 3
    assert [len(device.closed_by) for device in devices] == [1] * 3
