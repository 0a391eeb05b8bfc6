"""Several hosts: the part inside each is in a slot, where memory is shared, and nobody can tell from the results."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kfcomm.communicator import Communicator
from kfcomm.core.graph import GraphPair
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout, PeerLost
from kfcomm.runtime.hosted import HOSTED_NBYTES, hub_of
from kfcomm.strategies import build
from kfcomm.types import Layout
from tests.conformance import oracle, worlds
from tests.conformance.oracle import CASES
from tests.conformance.worlds import assert_kinds, ends, everywhere, heard_of_the_end, on_loop, same_bits, turns, world

X = np.arange(6, dtype=np.float64)
USES = 6
STRATEGIES = ("binary_tree_star", "multi_binary_tree_star")
LENGTHS = (0, 1, 100, 4095, 9001, HOSTED_NBYTES // 4)
FIVE = {"size": 5, "hosts": 2, "strategy": "binary_tree_star"}
"""Ranks 0, 1, 2 on one host and 3, 4 on the other; 0 and 3 are hubs."""


def slots_of(comm: Communicator, name: str) -> list[Any]:
    """Those of a name that are in use."""
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


async def warm(comms: Any, name: str) -> None:
    for _ in range(3):
        await everywhere(comms, lambda comm: comm.all_reduce(X, name))


def test_the_hub_is_the_centre_of_all_stars() -> None:
    layout = Layout.of("aaabb")
    stars = build("multi_binary_tree_star", layout).pairs
    assert [hub_of(stars, layout.ranks_of(host)) for host in (0, 1)] == [0, 3]
    assert hub_of(build("ring", layout).pairs, (0, 1, 2)) is None
    assert hub_of(build("clique", layout).pairs, (3, 4)) is None
    assert hub_of(stars, (0,)) is None
    chain = GraphPair.of(build("binary_tree", Layout.even(5)).pairs[0].reduce)
    assert hub_of((chain,), (0, 1, 2)) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "hosts"), [(4, 2), (5, 2), (8, 3)])
@on_loop
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


@on_loop
async def test_long_messages_go_by_links() -> None:
    async with world(**FIVE) as comms:
        x = np.ones(HOSTED_NBYTES // 8 + 1)
        for _ in range(3):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(x, "x")):
                assert np.array_equal(result, 5 * x)
        assert not any(slots_of(comm, "x") for comm in comms)


@pytest.mark.parametrize(("dtype", "op"), CASES)
@on_loop
async def test_all_dtypes_and_ops_in_place_and_not(dtype: str, op: str) -> None:
    async with world(**FIVE) as comms:
        for length in (7, 9001):
            xs = [oracle.data(dtype, length, rank) for rank in range(5)]
            want = oracle.all_reduced(op, xs, comms[0].strategy, "x")
            for use in range(4):
                given = [x.copy() for x in xs]

                def call(comm: Communicator, given: list[Any] = given, use: int = use) -> Any:
                    x = given[comm.rank]
                    return comm.all_reduce(x, f"x{len(x)}", op=op, out=x if use % 2 else None)

                results = await everywhere(comms, call)
                assert all(same_bits(result, want) for result in results), (length, use)
                if not use % 2:
                    assert all(same_bits(x, kept) for x, kept in zip(xs, given, strict=True))


@pytest.mark.parametrize("late", range(5))
@on_loop
async def test_barriers_wait_for_all(late: int) -> None:
    async with world(**FIVE) as comms:
        for _ in range(USES):
            early = [comm.barrier("b") for comm in comms if comm.rank != late]
            await turns(20)
            assert not any(one.done() for one in early)
            await comms[late].barrier("b")
            await asyncio.gather(*early)


@on_loop
async def test_many_at_once_in_any_order() -> None:
    names = [f"n{number}" for number in range(60)]
    async with world(**FIVE) as comms:
        for use in range(USES):
            handles = {}
            for comm in comms:
                order = list(names)
                random.Random(use * 5 + comm.rank).shuffle(order)
                for name in order:
                    handles[comm.rank, name] = comm.all_reduce(X + len(name) + comm.rank, name)
            for (_, name), handle in handles.items():
                assert np.array_equal(await handle, 5 * (X + len(name)) + 10)
        assert is_hosted(comms, names[0]) == (worlds.LINKS == "shm")


@on_loop
async def test_groups_have_hubs_of_their_own() -> None:
    members = [4, 2, 1, 3]
    async with world(**FIVE) as comms:
        groups = await asyncio.gather(*(comms[rank].group(members, name="g") for rank in members))
        for _ in range(USES):
            for result in await everywhere(groups, lambda comm: comm.all_reduce(X + comm.rank, "x")):
                assert np.array_equal(result, 4 * X + 6)


@pytest.mark.parametrize("other", range(5))
@on_loop
async def test_who_goes_the_ordinary_way_takes_its_host_along(other: int) -> None:
    async with world(**FIVE) as comms:
        for _ in range(4):
            await everywhere(comms, lambda comm: comm.all_reduce(X))
        waiting = [comm.all_reduce(X + comm.rank) for comm in comms if comm.rank != other]
        await turns(5)
        first = comms[other].all_reduce(X + other)
        second = comms[other].all_reduce(2 * X)
        again = [comm.all_reduce(2 * X) for comm in comms if comm.rank != other]
        for handle in (*waiting, first):
            assert np.array_equal(await handle, 5 * X + 10)
        for handle in (*again, second):
            assert np.array_equal(await handle, 10 * X)
        for _ in range(3):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(X + comm.rank)):
                assert np.array_equal(result, 5 * X + 10)


@on_loop
async def test_one_host_may_use_its_slot_while_another_does_not() -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        for slot in slots_of(comms[4], "x"):
            slot.is_dead = True
        for _ in range(3):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(X + comm.rank, "x")):
                assert np.array_equal(result, 5 * X + 10)
        if worlds.LINKS == "shm":
            assert [len(slots_of(comm, "x")) for comm in comms] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(("who", "missing"), [(a, b) for a in range(5) for b in (0, 1, 3, 4) if a != b])
@on_loop
async def test_a_cancelled_use_fails_on_all_and_the_name_works_on(who: int, missing: int) -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        handles = {comm.rank: comm.all_reduce(X, "x") for comm in comms if comm.rank != missing}
        await turns(5)
        handles[who].cancel()
        await heard_of_the_end(comms[missing])
        late = comms[missing].all_reduce(X, "x")
        outcomes = await asyncio.gather(*handles.values(), late, return_exceptions=True)
        assert isinstance(outcomes[list(handles).index(who)], asyncio.CancelledError)
        assert_kinds([one for one in outcomes if not isinstance(one, asyncio.CancelledError)], CollectiveAborted)
        for result in await everywhere(comms, lambda comm: comm.all_reduce(X, "x")):
            assert np.array_equal(result, 5 * X)


@pytest.mark.parametrize("missing", range(5))
@on_loop
async def test_a_timeout_says_who_is_missing(missing: int) -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        present = [comm for comm in comms if comm.rank != missing]
        outcomes = await ends(present, lambda comm: comm.all_reduce(X, "x", timeout=0.1))
        outcomes += await ends([comms[missing]], lambda comm: comm.all_reduce(X, "x"))
        assert_kinds(outcomes, CollectiveTimeout)
        assert all(one.missing == (missing,) for one in outcomes)
        for result in await everywhere(comms, lambda comm: comm.all_reduce(X, "x")):
            assert np.array_equal(result, 5 * X)


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
@on_loop
async def test_a_lost_peer_fails_what_waits(lost: int) -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        handles = [comm.all_reduce(X, "x") for comm in comms if comm.rank != lost]
        await turns(5)
        comms.kill(lost)
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, PeerLost)


@pytest.mark.parametrize("other", range(5))
@on_loop
async def test_ranks_that_disagree_find_out(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.core.deadlines.QUIET_AFTER_S", 0.01)
    async with world(**FIVE) as comms:
        for _ in range(3):
            await everywhere(comms, lambda comm: comm.all_reduce(X))
            await everywhere(comms, lambda comm: comm.all_reduce(X[:3]))
        outcomes = await ends(comms, lambda comm: comm.all_reduce(X if comm.rank != other else X[:3]))
        assert_kinds(outcomes, CollectiveMismatch)
        assert all("shape" in str(one) for one in outcomes)
        for result in await everywhere(comms, lambda comm: comm.all_reduce(X)):
            assert np.array_equal(result, 5 * X)


@on_loop
async def test_strategies_may_change_and_come_again() -> None:
    async with world(**FIVE) as comms:
        await warm(comms, "x")
        for name in ("ring", "binary_tree_star", "direct", "multi_binary_tree_star", "binary_tree_star"):
            await everywhere(comms, lambda comm, name=name: comm.set_strategy(name))
            for _ in range(4):
                for result in await everywhere(comms, lambda comm: comm.all_reduce(X + comm.rank, "x")):
                    assert np.array_equal(result, 5 * X + 10)


@pytest.mark.parametrize("hub", [0, 3])
@on_loop
async def test_what_cannot_be_folded_fails_everywhere(
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
        for result in await everywhere(comms, lambda comm: comm.all_reduce(X, "x")):
            assert np.array_equal(result, 5 * X)
