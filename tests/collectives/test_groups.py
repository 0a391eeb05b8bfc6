"""Groups: nested, overlapping, concurrent, made again, split; and member lists that cannot work."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from kfcomm.core import collective, names
from kfcomm.errors import CollectiveAborted, CollectiveTimeout, ConfigError, PeerLost, SessionClosed
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns, works, world

SHORT_S = 0.05
X = np.arange(5)


async def _grouped(comms: Any, members: list[int], **options: Any) -> list[Any]:
    """The group's communicators, in the group's order."""
    return await everywhere([comms[rank] for rank in members], lambda comm: comm.group(members, **options))


@pytest.mark.asyncio
async def test_order_and_identity() -> None:
    async with world(5, hosts=2) as comms:
        for members in ([3, 0, 4], [2], [4, 3, 2, 1, 0]):
            group = await _grouped(comms, members)
            assert [one.rank for one in group] == list(range(len(members)))
            assert {one.size for one in group} == {len(members)}
            assert all(f"rank {place} of {len(members)}" in repr(one) for place, one in enumerate(group))
            got = await everywhere(group, lambda comm: comm.all_gather_object(comm._session.rank))
            assert got == [members] * len(members)
            got = await everywhere(group, lambda comm: comm.broadcast_object(comm._session.rank, comm.size - 1))
            assert got == [members[-1]] * len(members)
        hosts = [comm.layout.hosts for comm in await _grouped(comms, [4, 0, 3])]
        assert hosts == [(0, 1, 0)] * 3
        assert [(one.local_rank, one.local_size) for one in group] == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]


@pytest.mark.asyncio
async def test_all_subsets_at_once_with_the_same_names() -> None:
    """Overlapping groups work at the same time, posted in another order on every rank, under one name."""
    size = 4
    subsets = [list(members) for count in (1, 2, 3, 4) for members in itertools.combinations(range(size), count)]
    async with world(size) as comms:
        made = await asyncio.gather(*(_grouped(comms, members, name="g") for members in subsets))
        handles = []
        for rank in range(size):
            mine = [one for group in made for one in group if one._session.rank == rank]
            for one in mine[rank:] + mine[:rank]:
                handles += [one.all_reduce(np.array([2**rank]), "same"), one.all_gather([rank], concat=True)]
                assert one.size == len(one._group.view.members)
        for place, got in enumerate(await asyncio.gather(*handles)):
            assert got.size >= 1, place
        for members, group in zip(subsets, made, strict=True):
            got = await everywhere(group, lambda comm: comm.all_reduce(np.array([2**comm._session.rank]), "same"))
            assert [one.tolist() for one in got] == [[sum(2**rank for rank in members)]] * len(members)


@pytest.mark.asyncio
async def test_nested_groups_and_groups_made_again() -> None:
    async with world(4) as comms:
        outer = await _grouped(comms, [3, 2, 1])
        inner = await _grouped(outer, [2, 0])
        assert [one._session.rank for one in inner] == [1, 3]
        again = [await _grouped(outer, [2, 0]) for _ in range(3)]
        ids = {ranks[0]._group.view.id for ranks in (outer, inner, *again)}
        assert len(ids) == 5
        handles = [
            one.all_reduce(np.array([number]), "k") for number, ranks in enumerate((inner, *again)) for one in ranks
        ]
        assert [one.tolist() for one in await asyncio.gather(*handles)] == [[0], [0], [2], [2], [4], [4], [6], [6]]
        for ranks in (comms, outer, inner, *again):
            await works(ranks, "k")


@pytest.mark.asyncio
async def test_split() -> None:
    async with world(6) as comms:
        colors: list[Any] = ["a", None, "b", "a", "a", "b"]
        keys = [0, 0, 5, -1, 0, 4]
        parts = await everywhere(comms, lambda comm: comm.split(colors[comm.rank], keys[comm.rank]))
        assert parts[1] is None
        got = await everywhere([one for one in parts if one], lambda comm: comm.all_gather_object(comm._session.rank))
        assert got == [[3, 0, 4], [5, 2], [3, 0, 4], [3, 0, 4], [5, 2]]
        assert await everywhere(comms, lambda comm: comm.split(None)) == [None] * 6
        rows = await everywhere(comms, lambda comm: comm.split(comm.rank // 3))
        columns = await everywhere(comms, lambda comm: comm.split(comm.rank % 3, key=-comm.rank))
        assert [one.rank for one in rows] == [0, 1, 2, 0, 1, 2]
        assert [one.rank for one in columns] == [1, 1, 1, 0, 0, 0]
        for ranks in (rows[:3], rows[3:], [columns[3], columns[0]]):
            await works(ranks)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([1, 2], "not a member"),
        ([0, 0, 1], "once"),
        ([0, 3], "member 3"),
        ([0, -1], "member -1"),
        ([], "not a member"),
        (["0"], "member '0'"),
        ([0.0, 1], r"member 0\.0"),
    ],
)
async def test_member_lists_that_cannot_work(members: list[Any], says: str) -> None:
    async with world(3) as comms:
        with pytest.raises(ConfigError, match=says):
            await comms[0].group(members)
        for bad in ({"name": ""}, {"name": 3}, {"timeout": -1}, {"strategy": "rign"}):
            with pytest.raises(ConfigError):
                await comms[0].group([0], **bad)  # type: ignore[arg-type]
        await works(await _grouped(comms, [0, 1, 2]))


@pytest.mark.asyncio
async def test_member_lists_that_differ() -> None:
    async with world(3, aborted=True) as comms:
        lists = [[0, 1], [0, 1, 2], [0, 1, 2]]
        outcomes = await ends(comms, lambda comm: comm.group(lists[comm.rank], timeout=SHORT_S))
        assert_kinds(outcomes, CollectiveTimeout)
        assert outcomes[0].missing == (1,)
        assert outcomes[1].missing == outcomes[2].missing == (0,)
        # Each list is a group of its own: who comes late to one is told, then all meet at the next try.
        assert_kinds(await ends(comms[1:2], lambda comm: comm.group([0, 1])), CollectiveTimeout)
        assert_kinds(await ends(comms[:1], lambda comm: comm.group([0, 1, 2])), CollectiveTimeout)
        await works(await _grouped(comms, [0, 1]))
        await works(await _grouped(comms, [0, 1, 2]))


@pytest.mark.asyncio
async def test_a_group_that_is_closed() -> None:
    """In flight: aborted on the others. Later: missed there until the timeout. World and other groups go on."""
    async with world(3) as comms:
        group = await _grouped(comms, [0, 1, 2])
        twin = await _grouped(comms, [0, 1, 2])
        handles = [one.all_reduce(np.ones(1), "k") for one in group[:2]]
        joined = [one.all_gather(np.ones(1), "c", concat=True) for one in group[:2]]
        receive = group[0].recv(1, 7)
        sent = group[0].send(np.ones(3), 1, synchronous=True)
        await turns()
        await group[0].close()
        await group[0].close()
        assert "closed" in repr(group[0])
        assert_kinds(await asyncio.gather(*handles, *joined, sent, return_exceptions=True), CollectiveAborted)
        assert_kinds(await ends([group[2]], lambda comm: comm.all_reduce(np.ones(1), "k")), CollectiveAborted)
        assert_kinds(
            await ends([group[2]], lambda comm: comm.all_gather(np.ones(1), "c", concat=True)), CollectiveAborted
        )
        with pytest.raises(SessionClosed, match="closed"):
            await receive
        for call in (lambda: group[0].barrier(), lambda: group[0].recv(1), lambda: group[0].send(1.0, 1)):
            with pytest.raises(SessionClosed):
                call()
        with pytest.raises(CollectiveAborted):
            await group[1].recv(0)
        outcomes = await ends(group[1:], lambda comm: comm.barrier("later", timeout=SHORT_S))
        assert_kinds(outcomes, CollectiveTimeout)
        assert outcomes[0].missing == (0,)
        await works(twin)
        await works(comms)
        late = [one.all_reduce(np.ones(1), "end") for one in twin[:2]]
        receive = twin[0].recv(1)
        closing = [comm.close() for comm in comms]
        await asyncio.gather(*closing)
        assert_kinds(
            await asyncio.gather(*late, receive, return_exceptions=True),
            CollectiveAborted,
            CollectiveAborted,
            SessionClosed,
        )


@pytest.mark.asyncio
async def test_a_lost_peer_ends_its_groups_only() -> None:
    async with world(4, aborted=True) as comms:
        with_it = await _grouped(comms, [1, 2])
        without = await _grouped(comms, [0, 2, 3])
        waiting = with_it[1].recv(0)
        comms.kill(1)
        with pytest.raises(PeerLost):
            await waiting
        with pytest.raises(PeerLost):
            await with_it[1].barrier()
        for _ in range(3):
            await works(without)
        made = await _grouped(without, [0, 2])
        await works(made)
        assert_kinds(await ends([comms[0]], lambda comm: comm.group([0, 1])), PeerLost)


def _known(comm: Any) -> tuple[int, ...]:
    """How much one rank holds for groups: names on links, slots, records."""
    engine = comm._session.engine
    links, senders = engine.links.incoming, list(engine.links.by_peer.values())
    return (
        len(engine.router._groups),
        len(comm._session.groups.known),
        sum(len(sender.state.keys) + len(sender.state.known) for sender in senders),
        sum(len(incoming.keys) + len(incoming.arrivals) for incoming in links),
        sum(sender.link.slots.num_slots for sender in senders if sender.link.slots is not None),
        len(engine.slots._left),
    )


@pytest.mark.asyncio
async def test_a_group_that_all_have_closed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "MAX_LEFT", 2)
    monkeypatch.setattr(collective, "MAX_LEFT", 2)
    known = []
    async with world(3) as comms:
        for _ in range(6):
            group = await _grouped(comms, [2, 0, 1])
            for _ in range(5):
                got = await everywhere(group, lambda one: one.all_reduce(np.ones(4), "sum"))
                assert [one.tolist() for one in got] == [[3.0] * 4] * 3
            await everywhere(group, lambda one: one.send(X, (one.rank + 1) % 3))
            for one in group:
                assert np.array_equal(await one.recv((one.rank - 1) % 3), X)
            for place, one in enumerate(group):
                await one.close()
                statistics = one.statistics()
                assert {key.name: key.count for key in statistics.keys}["sum"] == 5
                assert statistics.rank == place
            await everywhere(comms, lambda comm: comm.barrier())
            await turns()
            known.append([_known(comm) for comm in comms])
            assert all(len(comm._session.engine.router.names) <= 7 for comm in comms)
        assert known[3] == known[4] == known[5]
        assert not any(key.name == "sum" for key in comms[0].statistics().keys)


@pytest.mark.asyncio
async def test_calls_fail_at_once_when_a_member_closes_the_group() -> None:
    async with world(3, aborted=True) as comms:
        group = await _grouped(comms, [0, 1, 2])
        await everywhere(group, lambda one: one.all_reduce(1, "x"))
        await everywhere(group, lambda one: one.all_reduce([1], "x"))
        waiting = [one.all_reduce(np.ones(100_000), "x") for one in group[:2]]
        await turns()
        await group[2].close()
        for one in waiting:
            with pytest.raises(CollectiveAborted, match=r"rank 2 (has left|closed) "):
                await one
