"""The route of a group, as the table of ``choose`` has it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kfcomm.arrays.devices import DeviceReport
from kfcomm.arrays.devices.routes import MAX_SHARING, Choice, Route, agree, cautions, choose
from kfcomm.errors import ConfigError
from kfcomm.types import Layout

NOTHING = DeviceReport(lack="no NVIDIA driver")
LINKS = ("tcp", "unix", "shm")


def gpu(number: int, **other: object) -> DeviceReport:
    """A device of its own, with NCCL."""
    own = DeviceReport("cuda", f"GPU-{number}", "a model", 13010, "nccl", 23207)
    return replace(own, **other)  # type: ignore[arg-type]


def gpus(count: int) -> list[DeviceReport]:
    return [gpu(number) for number in range(count)]


FOUR = gpus(4)
OLD = gpu(1, backend_version=22803)
BARE = gpu(1, backend="", backend_version=0, lack="CuPy has no NCCL")

OBSTACLES = [
    ([NOTHING], "no rank has a device (rank 0: no NVIDIA driver)", False),
    ([NOTHING] * 3, "no rank has a device (ranks 0-2: no NVIDIA driver)", False),
    ([gpu(0), NOTHING], "some ranks have no device (rank 1: no NVIDIA driver)", True),
    (
        [NOTHING, gpu(0), DeviceReport(lack="device 'none' was asked for"), NOTHING],
        "some ranks have no device (ranks 0, 3: no NVIDIA driver; rank 2: device 'none' was asked for)",
        True,
    ),
    ([gpu(0), DeviceReport()], "some ranks have no device (rank 1: it does not say why)", True),
    ([gpu(0), gpu(0)], "ranks 0-1 share one device (GPU-0), and NCCL refuses two ranks on one", False),
    ([*gpus(3), gpu(1)], "ranks 1, 3 share one device (GPU-1), and NCCL refuses two ranks on one", False),
    ([gpu(0), BARE], "nothing runs collectives on the devices of some ranks (rank 1: CuPy has no NCCL)", False),
    ([gpu(0), OLD], "NCCL 2.32.7 on rank 0, NCCL 2.28.3 on rank 1; the version must be the same everywhere", False),
    (
        [gpu(0), OLD, gpu(2)],
        "NCCL 2.32.7 on ranks 0, 2, NCCL 2.28.3 on rank 1; the version must be the same everywhere",
        False,
    ),
    (
        [gpu(0), gpu(1, backend="other", backend_version=7)],
        "the ranks have different backends: NCCL 2.32.7 on rank 0, other 7 on rank 1",
        False,
    ),
]


@pytest.mark.parametrize(("reports", "because", "mixed"), OBSTACLES)
@pytest.mark.parametrize("hosts", [1, 2])
def test_obstacles_to_nccl_give_staged_or_config_error(
    reports: list[DeviceReport], because: str, mixed: bool, hosts: int
) -> None:
    layout = Layout.even(len(reports), min(hosts, len(reports)))
    assert choose(reports, layout, "auto") == Choice(Route.STAGED, mixed, because)
    with pytest.raises(ConfigError) as refused:
        choose(reports, layout, "nccl")
    assert str(refused.value) == f"transport 'nccl' cannot work: {because}; use 'auto'"


def test_ranks_share_a_device_through_nccl_where_all_allow_it_and_one_asks_for_it() -> None:
    reports, layout = [gpu(0, shares=1)] * 2 + [gpu(1, shares=1)] * 2, Layout((0,) * 4)
    asked = Choice(Route.BACKEND, False, "transport 'nccl' was asked for")
    assert choose(reports, layout, "nccl") == choose(reports, Layout((0, 0, 1, 1)), "nccl") == asked
    because = "ranks 0-1 share one device (GPU-0), and NCCL takes two ranks on one with transport 'nccl' only"
    assert choose(reports, layout, "auto") == Choice(Route.STAGED, False, because)
    assert list(cautions(reports, "auto", is_device_named=True)) == [SLOW + because]
    assert not list(cautions(reports, "nccl", is_device_named=True))
    for unlike, why in ((gpu(1), "NCCL refuses two ranks on one"), (gpu(1, shares=1, backend_version=23208), "same")):
        with pytest.raises(ConfigError, match=why):
            choose([*reports[:3], unlike], layout, "nccl")


def sharing(count: int, **other: object) -> list[DeviceReport]:
    """Ranks that share one device, whose memory they map."""
    return [gpu(0, exports=1, **other) for _ in range(count)]


@pytest.mark.parametrize("size", [2, 4, MAX_SHARING])
def test_ranks_of_one_host_that_share_a_device_map_its_memory(size: int) -> None:
    because = f"ranks 0-{size - 1} share one device (GPU-0), on one host"
    for reports in (sharing(size), sharing(size, backend="", backend_version=0), sharing(size, shares=1)):
        assert choose(reports, Layout((0,) * size), "auto") == Choice(Route.SLOTS, False, because)
    assert choose([*sharing(2), gpu(1, exports=1)], Layout((0, 0, 0)), "auto").route is Route.SLOTS


@pytest.mark.parametrize(
    ("reports", "hosts", "because"),
    [
        (sharing(4), 2, "the ranks are on several hosts"),
        (sharing(MAX_SHARING + 1), 1, f"{MAX_SHARING + 1} ranks are more than {MAX_SHARING}"),
        ([*sharing(2), gpu(0), gpu(1)], 1, "ranks 2-3 cannot export memory of the device"),
        ([*sharing(2), NOTHING], 1, "some ranks have no device (rank 2: no NVIDIA driver)"),
    ],
)
def test_ranks_that_cannot_map_memory_do_not(reports: list[DeviceReport], hosts: int, because: str) -> None:
    layout = Layout.even(len(reports), hosts)
    assert choose(reports, layout, "auto").route is Route.STAGED
    with pytest.raises(ConfigError) as refused:
        choose(reports, layout, "ipc")
    assert str(refused.value) == f"transport 'ipc' cannot work: {because}; use 'auto'"


def test_mapped_memory_is_asked_for_or_declined() -> None:
    alone = [gpu(number, exports=1) for number in range(3)]
    layout = Layout((0, 0, 0))
    assert choose(alone, layout, "auto").route is Route.BACKEND
    assert choose(alone, layout, "ipc") == Choice(Route.SLOTS, False, "transport 'ipc' was asked for")
    assert choose(alone[:1], Layout((0,)), "ipc").route is Route.STAGED
    for transport in LINKS:
        assert choose(sharing(3), layout, transport).route is Route.STAGED
    assert not list(cautions(sharing(3), "auto", is_device_named=True, route=Route.SLOTS))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_on_one_host_the_backend_does_it_all(size: int) -> None:
    for transport, because in (
        ("auto", "every rank has a device of its own, on one host"),
        ("nccl", "transport 'nccl' was asked for"),
    ):
        choice = choose(gpus(size), Layout((0,) * size), transport)
        assert choice == Choice(Route.BACKEND, False, because)
    assert str(choice) == "backend: transport 'nccl' was asked for"


@pytest.mark.parametrize(
    ("hosts", "route", "because"),
    [
        ((0, 0, 1, 1), Route.HIERARCHY, "every rank has a device of its own, 2 on every one of several hosts"),
        ((0, 1, 0, 1), Route.HIERARCHY, "every rank has a device of its own, 2 on every one of several hosts"),
        ((0, 1, 2, 3), Route.STAGED, "every host has one rank, so that there is nothing to do inside a host"),
        ((0, 0, 0, 1), Route.STAGED, "the hosts have unequal numbers of ranks, from 1 to 3"),
        ((0, 1, 1, 2), Route.STAGED, "the hosts have unequal numbers of ranks, from 1 to 2"),
    ],
)
def test_on_several_hosts_it_depends_on_how_they_are_shared(hosts: tuple[int, ...], route: Route, because: str) -> None:
    assert choose(FOUR, Layout(hosts), "auto") == Choice(route, False, because)
    assert choose(FOUR, Layout(hosts), "nccl").route is Route.BACKEND


@pytest.mark.parametrize("transport", LINKS)
def test_links_that_are_asked_for_carry_device_memory_too(transport: str) -> None:
    because = f"transport {transport!r} was asked for"
    assert choose(FOUR, Layout((0,) * 4), transport) == Choice(Route.STAGED, False, because)
    assert choose([gpu(0), NOTHING], Layout((0, 0)), transport) == Choice(Route.STAGED, True, because)
    assert choose([gpu(0), OLD], Layout((0, 1)), transport) == Choice(Route.STAGED, False, because)
    nobody = choose([NOTHING], Layout((0,)), transport)
    assert nobody == Choice(Route.STAGED, False, "no rank has a device (rank 0: no NVIDIA driver)")


def test_drivers_may_differ() -> None:
    assert choose([gpu(0), gpu(1, driver=12040)], Layout((0, 0)), "auto").route is Route.BACKEND


def test_ranks_of_a_group_are_named_as_in_the_world() -> None:
    assert "(rank 7: no NVIDIA driver)" in choose([gpu(0), NOTHING], Layout((0, 0)), "auto", (3, 7)).because


def test_a_sentence_stays_short_in_a_large_world() -> None:
    nobody = [DeviceReport(lack=f"reason {rank % 6}") for rank in range(600)]
    because = choose(nobody, Layout((0,) * 600), "auto").because
    assert "36, 42, 48, 54, 60, 66, 72, 78, 84, 90 and 84 more: reason 0; " in because
    assert because.endswith("reason 3; and 2 more)")
    assert len(because) < 500


@pytest.mark.parametrize("transport", ["auto", *LINKS, "nccl"])
def test_every_world_of_three_has_one_route_for_all(transport: str) -> None:
    kinds = (NOTHING, BARE, gpu(0), gpu(1), gpu(2), gpu(3, backend_version=22803))
    for reports in itertools.product(kinds, repeat=3):
        for hosts in ((0, 0, 0), (0, 0, 1), (0, 1, 2)):
            devices = [report.uuid for report in reports if report.kind]
            can = len(set(devices)) == 3 and {report.backend_version for report in reports} == {23207}
            if transport == "nccl" and not can:
                with pytest.raises(ConfigError, match=r"transport 'nccl' cannot work: .*; use 'auto'"):
                    choose(reports, Layout(hosts), transport)
                continue
            choice = choose(reports, Layout(hosts), transport)
            whole = transport == "nccl" or (transport == "auto" and can and hosts == (0, 0, 0))
            assert choice.route is (Route.BACKEND if whole else Route.STAGED)
            assert choice.mixed == (0 < len(devices) < 3)
            assert choice.because


@pytest.mark.parametrize(
    ("transports", "agreed"),
    [
        (["auto"], "auto"),
        (["auto", "auto"], "auto"),
        (["auto", "nccl", "nccl"], "nccl"),
        (["auto", "tcp"], "tcp"),
        (["shm", "tcp", "auto"], "shm"),
        (["tcp", "shm"], "tcp"),
        (["auto", "ipc", "auto"], "ipc"),
    ],
)
def test_transports_that_agree(transports: list[str], agreed: str) -> None:
    assert agree(transports) == agreed


@pytest.mark.parametrize(
    "transports", [["tcp", "nccl"], ["nccl", "auto", "tcp", "shm"], ["ipc", "nccl"], ["shm", "auto", "ipc"]]
)
def test_transports_that_contradict_each_other(transports: list[str]) -> None:
    first, other = transports[0], next(one for one in transports[1:] if one not in ("auto", transports[0]))
    rank = transports.index(other)
    with pytest.raises(ConfigError, match=f"'{first}' of rank 0 contradicts transport '{other}' of rank {rank}: "):
        agree(transports)


SLOW = "device memory goes through memory of the hosts, which is slower: "


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        (FOUR, []),
        ([NOTHING], []),
        ([gpu(0), NOTHING], []),
        (
            [gpu(0), OLD],
            [SLOW + "NCCL 2.32.7 on rank 0, NCCL 2.28.3 on rank 1; the version must be the same everywhere"],
        ),
        (
            [NOTHING, gpu(0), OLD],
            [SLOW + "NCCL 2.32.7 on rank 1, NCCL 2.28.3 on rank 2; the version must be the same everywhere"],
        ),
        (
            [gpu(0), gpu(1, driver=12040)],
            ["the drivers of the devices are not the same: 13.1 on rank 0, 12.4 on rank 1"],
        ),
    ],
)
@pytest.mark.parametrize("is_device_named", [False, True])
def test_cautions_about_a_world(reports: list[DeviceReport], told: list[str], is_device_named: bool) -> None:
    assert list(cautions(reports, "auto", is_device_named=is_device_named)) == told
    assert not list(cautions(reports, "tcp", is_device_named=is_device_named))


def test_shared_device_caution_needs_an_explicit_device() -> None:
    shared = [gpu(0), gpu(0)]
    assert not list(cautions(shared, "auto", is_device_named=False))
    (told,) = cautions(shared, "auto", is_device_named=True)
    assert told == SLOW + "ranks 0-1 share one device (GPU-0), and NCCL refuses two ranks on one"
