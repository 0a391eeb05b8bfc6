"""The device of a rank, from the setting to the end of the session, without a device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

import kfcomm
from kfcomm.arrays.devices import Device, DeviceReport
from kfcomm.arrays.devices.routes import Route
from kfcomm.joining import Accelerator, look_for_device, set_up_devices
from kfcomm.rendezvous.settings import Settings
from kfcomm.types import Layout
from tests.stubs import StubDevice, stub


class Finding:
    """Stand-in for ``kfcomm.arrays.devices.routes`` and the maker of NCCL's backends.

    Attributes:
        device: what is found; None for a machine without.
        asked: the arguments of each search.
    """

    def __init__(self, device: StubDevice | None = None) -> None:
        self.device = device
        self.asked: list[tuple[str, int]] = []
        self.maker = object()
        self.threads: list[threading.Thread] = []

    def find(self, choice: str, local_rank: int) -> tuple[Device | None, DeviceReport]:
        self.asked.append((choice, local_rank))
        self.threads.append(threading.current_thread())
        if self.device is None:
            if choice != "auto":
                raise kfcomm.ConfigError(f"device={choice!r}: no driver")
            return None, DeviceReport(lack="no driver")
        return self.device, self.device.report


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Finding]:
    found = Finding(stub(0))
    monkeypatch.setattr("kfcomm.arrays.devices.routes.find", found.find)
    monkeypatch.setattr("kfcomm.transports.nccl.Nccl", lambda: found.maker)
    return found


def test_device_none_looks_for_no_device(finding: Finding) -> None:
    own = look_for_device(Settings(device="none"))
    assert own == Accelerator(None, DeviceReport(lack="device 'none' was asked for"), None)
    assert finding.asked == []


def test_it_is_looked_for_by_the_choice_and_the_place_on_the_host(finding: Finding) -> None:
    own = look_for_device(Settings(device="cuda", rank=5, size=8, local_rank=1, local_size=4))
    assert finding.asked == [("cuda", 1)]
    assert own.device is finding.device
    assert own.maker is finding.maker


def test_a_device_without_a_backend_has_no_maker(finding: Finding) -> None:
    finding.device = StubDevice(DeviceReport("cuda", "GPU-0", lack="CuPy has no NCCL"))
    assert look_for_device(Settings()).maker is None


@pytest.mark.asyncio
async def test_a_world_of_one_has_its_device_and_closes_it(finding: Finding) -> None:
    async with kfcomm.init(device="cuda") as comm:
        setup = comm._session.devices
        assert setup.device is finding.device
        assert setup.maker is finding.maker
        assert comm.route is not None
        assert str(comm.route) == "backend: every rank has a device of its own, on one host"
        said = comm.dump()
        assert said["device"]["uuid"] == "GPU-0"
        assert said["routes"] == {comm._session.world.id.hex(): str(comm.route)}
        assert finding.device is not None
        assert finding.device.closed_by == []
    (searched,), (closed,) = finding.threads, finding.device.closed_by
    assert threading.main_thread() not in (searched, closed)


def test_the_blocking_communicator_too(finding: Finding) -> None:
    with kfcomm.sync.init() as comm:
        assert finding.asked == [("auto", 0)]
        assert comm.route is not None
        assert comm.route.route is Route.BACKEND
    assert len(finding.device.closed_by) == 1


@pytest.mark.asyncio
async def test_without_a_device_there_is_no_route(finding: Finding) -> None:
    finding.device = None
    async with kfcomm.init() as comm:
        assert comm.route is None
        said = comm.dump()
        assert said["device"]["lack"] == "no driver"
        assert said["routes"] == {}


@pytest.mark.asyncio
@pytest.mark.parametrize("init", [kfcomm.init, kfcomm.sync.init], ids=["async", "blocking"])
async def test_a_device_that_is_not_there_is_refused(finding: Finding, init, monkeypatch: pytest.MonkeyPatch) -> None:
    finding.device = None
    monkeypatch.setenv("KFCOMM_DEVICE", "cuda")

    with pytest.raises(kfcomm.ConfigError, match="device='cuda': no driver"):
        await init() if init is kfcomm.init else init()


@pytest.mark.asyncio
async def test_nccl_that_cannot_work_is_refused_and_the_device_closed(finding: Finding) -> None:
    finding.device = None
    with pytest.raises(kfcomm.ConfigError, match=r"no rank has a device \(rank 0: no driver\); use 'auto'"):
        await kfcomm.init(transport="nccl")
    finding.device = StubDevice(DeviceReport("cuda", "GPU-0", lack="CuPy has no NCCL"))
    with pytest.raises(kfcomm.ConfigError, match=r"\(rank 0: CuPy has no NCCL\); use 'auto'"):
        await kfcomm.init(transport="nccl")
    assert len(finding.device.closed_by) == 1


def told(caplog: pytest.LogCaptureFixture, rank: int, device: str, *devices: StubDevice) -> list[tuple[str, str]]:
    """Log of rank ``rank`` about a world with these devices on one host."""
    settings = Settings(rank=rank, size=len(devices), device=device)
    own = Accelerator(devices[rank], devices[rank].report, None)
    layout = Layout((0,) * len(devices))
    with caplog.at_level(logging.INFO, "kfcomm"):
        set_up_devices(settings, own, [device.report for device in devices], layout, "auto")
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_rank_0_logs_what_costs_speed(caplog: pytest.LogCaptureFixture) -> None:
    unequal = "NCCL 2.32.7 on rank 0, NCCL 2.28.3 on rank 1; the version must be the same everywhere"
    said = told(caplog, 0, "auto", stub(0), stub(1, version=22803))
    assert said == [
        ("INFO", f"device memory goes by staged: {unequal}"),
        ("WARNING", f"device memory goes through memory of the hosts, which is slower: {unequal}"),
    ]


def test_the_other_ranks_do_not(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 1, "auto", stub(0), stub(1, version=22803)) == []


def test_a_shared_device_is_a_warning_where_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert [level for level, _ in told(caplog, 0, "auto", stub(0), stub(0))] == ["INFO"]
    caplog.clear()
    (_, (level, message)) = told(caplog, 0, "cuda:0", stub(0), stub(0))
    assert level == "WARNING"
    assert "ranks 0-1 share one device (GPU-0)" in message


def test_the_report_is_that_of_the_others_not_ones_own() -> None:
    device = stub(0)
    told = replace(device.report, model="as told")
    setup = set_up_devices(Settings(), Accelerator(device, device.report, None), [told], Layout((0,)), "auto")
    assert setup.reports == (told,)
    assert setup.route([0], Layout((0,))) is not None
