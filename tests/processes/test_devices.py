"""Devices that ranks report to each other at join, and the routes that follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kfcomm.errors import ConfigError
from tests.processes import pretending, roles
from tests.processes.stage import World, start, unjoined
from tests.support import free_port


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two processes that have not joined, and are again in that state after each test."""
    with unjoined(2) as made:
        yield made


def gpu(number: int, version: int = 23207) -> dict[str, Any]:
    return {
        "kind": "cuda", "uuid": f"GPU-{number}", "model": "a model", "driver": 13010, "backend": "nccl",
        "backend_version": version,
    }  # fmt: skip


def routes(world: World, *settings: dict[str, Any]) -> list[str | None]:
    """The route on each rank, having joined with these settings of each, and left again."""
    calls = [actor.do(pretending.join, **own) for actor, own in zip(world, settings, strict=True)]
    found = [call.result() for call in calls]
    assert len(set(world.do(roles.all_reduce, name="x"))) == 1
    world.do(roles.leave)
    return found


def refused(world: World, *settings: dict[str, Any]) -> str:
    """The sentence with which every rank refuses to join with these settings."""
    calls = [actor.do(pretending.join, **own) for actor, own in zip(world, settings, strict=True)]
    (sentence,) = {call.failure(ConfigError).message for call in calls}
    return sentence


def test_all_ranks_take_the_same_route(world: World) -> None:
    whole = "backend: every rank has a device of its own, on one host"
    assert routes(world, {"device": gpu(0)}, {"device": gpu(1)}) == [whole] * 2
    assert world.do(pretending.closed) == [1, 1]
    mixed = "staged: some ranks have no device (rank 1: it pretends to have none)"
    assert routes(world, {"device": gpu(0)}, {}) == [mixed] * 2
    shared = "staged: ranks 0-1 share one device (GPU-0), and NCCL refuses two ranks on one"
    assert routes(world, {"device": gpu(0)}, {"device": gpu(0)}) == [shared] * 2
    assert routes(world, {}, {}) == [None] * 2


def test_one_rank_that_names_a_transport_decides_for_all(world: World) -> None:
    links = "staged: transport 'tcp' was asked for"
    assert routes(world, {"device": gpu(0)}, {"device": gpu(1), "transport": "tcp"}) == [links] * 2
    nccl = "backend: transport 'nccl' was asked for"
    assert routes(world, {"device": gpu(0), "transport": "nccl"}, {"device": gpu(1)}) == [nccl] * 2
    sharing = {"device": gpu(0) | {"shares": 1}}
    assert routes(world, sharing | {"transport": "nccl"}, sharing) == [nccl] * 2


def test_unavailable_nccl_is_same_error_on_all_ranks(world: World) -> None:
    asks = {"device": gpu(0), "transport": "nccl"}
    assert refused(world, asks, {"device": gpu(1, 22803)}) == (
        "transport 'nccl' cannot work: NCCL 2.32.7 on rank 0, NCCL 2.28.3 on rank 1; the version must be the same "
        "everywhere; use 'auto'"
    )
    assert world.do(pretending.closed) == [1, 1]
    contradiction = refused(world, asks, {"device": gpu(1), "transport": "unix"})
    assert "transport 'nccl' of rank 0 contradicts transport 'unix' of rank 1" in contradiction
    assert "some ranks have no device (rank 1: it pretends to have none)" in refused(world, asks, {})
    assert routes(world, {}, {}) == [None] * 2


def test_rank_0_serves_the_store_until_all_have_been_refused() -> None:
    free = free_port()
    with unjoined(3) as ranks:
        # no launcher keeps the store
        calls = start(ranks, pretending.join, store=f"http://127.0.0.1:{free}", serve=True, transport="nccl")
        (sentence,) = {call.failure(ConfigError).message for call in calls}
        assert "no rank has a device" in sentence


def test_rank_0_warns_of_what_costs_speed(world: World) -> None:
    routes(world, {"device": gpu(0)}, {"device": gpu(1, 22803)})
    assert "NCCL 2.32.7 on rank 0, NCCL 2.28.3 on rank 1" in world[0].log(
        "device memory goes through memory of the hosts"
    )
    assert not [line for line in world[1].logged() if "device" in line]


def test_a_forked_child_has_no_device(world: World) -> None:
    for rank, call in enumerate([actor.do(pretending.join, device=gpu(rank)) for rank, actor in enumerate(world)]):
        assert call.result(), rank
    assert world[1].do(pretending.in_a_child).result() == 0
    assert len(set(world.do(roles.all_reduce, name="x"))) == 1
    world.do(roles.leave)


def test_a_device_that_is_not_there_is_refused_before_joining(world: World) -> None:
    assert "cuda:9999" in world[0].do(roles.join, device="cuda:9999").failure(ConfigError).message
    assert start(world, roles.join, device="none")[1].result() == [1, 2, 0, 0]
    world.do(roles.leave)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("count", [3, 3_000_000])
def test_blocking_calls_for_device_memory(world: World, transport: str, count: int) -> None:
    sums = [3, 3 * count]
    expected = {"sum": sums, "many": sums, "later": sums, "joined": [1, 5], "message": [1, 2]}
    found = [call.result() for call in start(world, pretending.blocking, count=count, transport=transport)]
    assert found == [expected] * 2


@pytest.mark.parametrize(("transport", "slots"), [("shm", 1), ("tcp", 0)])
def test_staged_calls_use_a_slot_in_shared_memory(world: World, transport: str, slots: int) -> None:
    found = [call.result() for call in start(world, pretending.slots_of, count=100, transport=transport)]
    assert found == [slots] * 2
