"""Several hosts: the part inside each is in a slot, where memory is shared, and the results are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.core.graph import GraphPair
from kfcomm.engine.executors import HOSTED_NBYTES, hub_of
from kfcomm.errors import PeerLost
from kfcomm.strategies import build
from kfcomm.types import Layout
from kfcomm.world.communicator import Communicator
from tests.collectives import scenarios
from tests.collectives.scenarios import USES, X, sums_are_right, warm
from tests.conformance import oracle, worlds
from tests.conformance.oracle import CASES
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, turns, world

STRATEGIES = ("binary_tree_star", "multi_binary_tree_star")
LENGTHS = (0, 1, 100, 4095, 9001, HOSTED_NBYTES // 4)
FIVE = {"size": 5, "hosts": 2, "strategy": "binary_tree_star"}
"""Ranks 0, 1, 2 on one host and 3, 4 on the other; 0 and 3 are hubs."""


def slots_of(comm: Communicator, name: str) -> list[Any]:
    """The slots of a name that are in use."""
    key = comm._group.engine.router.names.key(comm._group.view.id, name)
    return [slot for slot in (key.slots or {}).values() if not slot.is_dead]


def is_hosted(comms: Any, name: str) -> bool:
    """Whether on all hosts the next use of a name is in a slot of that host."""
    layout = comms[0].layout
    for comm in comms:
        here = [comms[rank]._session.rank for rank in layout.ranks_of(layout.hosts[comm.rank])]
        if [slot.members for slot in slots_of(comm, name)] != [here]:
            return False
    return True


def test_the_hub_is_the_centre_of_all_stars() -> None:
    layout = Layout.of("aaabb")
    stars = build("multi_binary_tree_star", layout).pairs
    assert [hub_of(stars, layout.ranks_of(host)) for host in (0, 1)] == [0, 3]
    assert hub_of(build("ring", layout).pairs, (0, 1, 2)) is None
    assert hub_of(build("clique", layout).pairs, (3, 4)) is None
    assert hub_of(stars, (0,)) is None
    chain = GraphPair.of(build("binary_tree", Layout.even(5)).pairs[0].reduce)
    assert hub_of((chain,), (0, 1, 2)) is None


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "hosts"), [(4, 2), (5, 2), (8, 3)])
async def test_every_use_of_a_name_gives_the_same(size: int, hosts: int, strategy: str) -> None:
    async with world(size, hosts=hosts, strategy=strategy) as comms:
        for length in LENGTHS:
            xs = [oracle.data("float32", length, rank) for rank in range(size)]
            want = oracle.all_reduced("sum", xs, comms[0].strategy, f"x{length}")
            for use in range(USES):
                results = await everywhere(comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], f"x{len(xs[0])}"))
                assert all(same_bits(result, want) for result in results), (length, use)
        if size % hosts == 0:  # else a host may have one rank alone
            assert all(is_hosted(comms, f"x{length}") == (worlds.LINKS == "shm") for length in LENGTHS)


@pytest.mark.asyncio
async def test_long_messages_go_by_links() -> None:
    async with world(**FIVE) as comms:
        x = np.ones(HOSTED_NBYTES // 8 + 1)
        for _ in range(3):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(x, "x")):
                assert np.array_equal(result, 5 * x)
        assert not any(slots_of(comm, "x") for comm in comms)


@pytest.mark.asyncio
@pytest.mark.parametrize(("dtype", "op"), CASES)
async def test_all_dtypes_and_ops_in_place_and_not(dtype: str, op: str) -> None:
    async with world(**FIVE) as comms:
        await scenarios.all_uses_are_alike(comms, dtype, op)


@pytest.mark.asyncio
@pytest.mark.parametrize("late", range(5))
async def test_barriers_wait_for_all(late: int) -> None:
    async with world(**FIVE) as comms:
        await scenarios.barriers_wait(comms, late)


@pytest.mark.asyncio
async def test_many_at_once_in_any_order() -> None:
    async with world(**FIVE) as comms:
        await scenarios.many_at_once(comms, [f"n{number}" for number in range(60)])
        assert is_hosted(comms, "n0") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
async def test_groups_have_hubs_of_their_own() -> None:
    members = [4, 2, 1, 3]
    async with world(**FIVE) as comms:
        groups = await asyncio.gather(*(comms[rank].group(members, name="g") for rank in members))
        await sums_are_right(groups, "x", USES)


@pytest.mark.asyncio
@pytest.mark.parametrize("other", range(5))
async def test_rank_that_sends_chunks_makes_its_host_do_so(other: int) -> None:
    async with world(**FIVE) as comms:
        await scenarios.uses_overlap(comms, other)


@pytest.mark.asyncio
async def test_one_host_may_use_its_slot_while_another_does_not() -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        for slot in slots_of(comms[4], "x"):
            slot.is_dead = True
        await sums_are_right(comms, "x", 3)
        if worlds.LINKS == "shm":
            assert [len(slots_of(comm, "x")) for comm in comms] == [1, 1, 1, 0, 0]


@pytest.mark.asyncio
@pytest.mark.parametrize(("who", "missing"), [(a, b) for a in range(5) for b in (0, 1, 3, 4) if a != b])
async def test_a_cancelled_use_fails_on_all_and_the_name_works_on(who: int, missing: int) -> None:
    async with world(**FIVE) as comms:
        await scenarios.one_cancels(comms, who, missing)


@pytest.mark.asyncio
@pytest.mark.parametrize("missing", range(5))
async def test_a_timeout_says_who_is_missing(missing: int) -> None:
    async with world(**FIVE) as comms:
        await scenarios.one_is_missing(comms, missing, 0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [1, 2, 3, 4])
async def test_a_lost_peer_fails_what_waits(lost: int) -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        handles = [comm.all_reduce(X, "x") for comm in comms if comm.rank != lost]
        await turns(5)
        comms.kill(lost)
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, PeerLost)


@pytest.mark.asyncio
@pytest.mark.parametrize("other", range(5))
async def test_ranks_that_disagree_find_out(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.core.deadlines.QUIET_AFTER_S", 0.01)
    async with world(**FIVE) as comms:
        await scenarios.one_disagrees(comms, other)


@pytest.mark.asyncio
async def test_strategies_may_change_and_come_again() -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        for name in ("ring", "binary_tree_star", "direct", "multi_binary_tree_star", "binary_tree_star"):
            await everywhere(comms, lambda comm, name=name: comm.set_strategy(name))
            await sums_are_right(comms, "x", 4)


@pytest.mark.asyncio
@pytest.mark.parametrize("hub", [0, 3])
async def test_failing_fold_fails_everywhere(
    hub: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        for slot in slots_of(comms[hub], "x"):

            def broken(place: int) -> Any:
                raise MemoryError("no room")

            monkeypatch.setattr(type(slot), "given", lambda self, place: broken(place))
            outcomes = await ends(comms, lambda comm: comm.all_reduce(X, "x"))
            assert "no room" in str(outcomes[0])
            assert "could not carry out" in caplog.text
            caplog.clear()  # the error's frames hold the slot
            monkeypatch.undo()
        await sums_are_right(comms, "x")
