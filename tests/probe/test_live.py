"""A live probe: schedule of the pairs, results on every rank, and failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from kfcomm import Communicator
from kfcomm.errors import (
    CollectiveAborted,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    PeerLost,
    SessionClosed,
)
from kfcomm.probe import Probe, live, pairs
from kfcomm.probe.live import slots_of
from kfcomm.testing import run_threads, sync_world
from kfcomm.types import Layout
from tests.conformance import worlds
from tests.conformance.worlds import ends, everywhere, until, works, world
from tests.strategies.layouts import LAYOUTS


@given(LAYOUTS.filter(lambda layout: layout.size <= 24))
def test_every_two_ranks_meet_once_and_no_two_pairs_share_a_port(layout: Layout) -> None:
    slots = slots_of(layout)
    met = Counter(frozenset(pair) for slot in slots for pair in slot)
    assert set(met.values()) <= {1}
    assert len(met) == layout.size * (layout.size - 1) // 2
    for slot in slots:
        assert slot
        across = [layout.hosts[rank] for a, b in slot for rank in (a, b) if layout.hosts[a] != layout.hosts[b]]
        inside = [layout.hosts[a] for a, b in slot if layout.hosts[a] == layout.hosts[b]]
        assert len(set(across)) == len(across)
        assert len(set(inside)) == len(inside)
        assert not (across and inside)


@pytest.mark.parametrize(
    ("size", "hosts", "number"), [(1, 1, 0), (2, 2, 1), (4, 1, 6), (8, 8, 7), (7, 7, 7), (8, 2, 22)]
)
def test_how_many_slots(size: int, hosts: int, number: int) -> None:
    assert len(slots_of(Layout.even(size, hosts))) == number


SHORT_S = 0.2


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages grow no further than tests need; the links of these worlds are quick."""
    monkeypatch.setattr(pairs, "LONG_ENOUGH_S", 0.0)


@pytest.fixture(params=["memory", "shm"])
def links(request: pytest.FixtureRequest) -> Iterator[None]:
    before, worlds.LINKS = worlds.LINKS, request.param
    yield
    worlds.LINKS = before


def quick(comm: Communicator, **more: Any) -> Any:
    return comm.probe(**{"nbytes": 4096, "rounds": 1, **more})


def assert_alike(probes: list[Probe]) -> None:
    for one in probes:
        assert np.array_equal(one.latency_s, probes[0].latency_s)
        assert np.array_equal(one.bandwidth, probes[0].bandwidth)
        assert one.layout == probes[0].layout


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (2, 1), (3, 3), (4, 2), (5, 2), (8, 8)])
@pytest.mark.usefixtures("links")
async def test_every_rank_gets_the_same_matrices(size: int, hosts: int) -> None:
    async with world(size, hosts=hosts) as comms:
        for _ in range(2):
            probes = await everywhere(comms, quick)
            assert_alike(probes)
            assert probes[0].layout == comms[0].layout
            off = ~np.eye(size, dtype=bool)
            assert (probes[0].latency_s[off] > 0).all()
            assert np.isfinite(probes[0].bandwidth[off]).all()


@pytest.mark.asyncio
async def test_messages_grow_until_they_take_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "LONG_ENOUGH_S", 1e9)
    monkeypatch.setattr(pairs, "MOST_NBYTES", 1 << 16)
    lengths = []
    original = pairs.OneWay.send

    def send(self: pairs.OneWay, data: Any, *chunk: int) -> Any:
        lengths.append(data.nbytes)
        return original(self, data, *chunk)

    monkeypatch.setattr(pairs.OneWay, "send", send)
    async with world(2) as comms:
        await everywhere(comms, lambda comm: quick(comm, nbytes=1 << 10, rounds=3))
    messages = [nbytes for nbytes in lengths if nbytes > pairs.TRAIN]
    assert messages == [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 16, 1 << 16] * 2


@pytest.mark.asyncio
async def test_no_probe_uses_more_numbers_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "LONG_ENOUGH_S", 1e9)
    monkeypatch.setattr(pairs, "MOST_NBYTES", 1 << 12)
    used = []
    original = pairs.OneWay._post

    def post(self: pairs.OneWay, *data: Any) -> Any:
        used.append(self.next_seq)
        return original(self, *data)

    monkeypatch.setattr(pairs.OneWay, "_post", post)
    async with world(2) as comms:
        await everywhere(comms, lambda comm: comm.probe(nbytes=1, rounds=pairs.MOST_ROUNDS))
        growths = 6  # from 1 byte to 4 KiB; to 32 MiB there are 13, of two messages each
        assert max(used) + 2 * (13 - growths) < pairs.TOGETHER_FROM


@pytest.mark.asyncio
async def test_a_slow_way_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages from one rank to another take longer than the rest, by its clock."""

    async def timed(self: pairs.OneWay, data: Any, chunk: int | None = None) -> float:
        await self.send(data, chunk)
        return 1e-5 + data.nbytes / (1e6 if (self.source, self.target) == (2, 0) else 1e8)

    monkeypatch.setattr(pairs.OneWay, "timed", timed)
    async with world(3) as comms:
        probes = await everywhere(comms, lambda comm: quick(comm, nbytes=1 << 16))
    assert probes[0].slowest(1) == [(2, 0)]
    assert probes[0].bandwidth[2, 0] == pytest.approx(1e6, rel=0.02)
    others = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2)]
    assert all(probes[0].bandwidth[pair] == pytest.approx(1e8, rel=0.02) for pair in others)
    assert probes[0].overhead_s[2, 0] == pytest.approx((pairs.TRAIN - 1) / 1e6 / (pairs.TRAIN - 1))


@pytest.mark.asyncio
async def test_pairs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a pair measures, no other uses the ports of its hosts."""
    busy: dict[int, tuple[int, int]] = {}
    original = live.lead
    together = 0

    async def lead(way: pairs.OneWay, *more: Any) -> Any:
        nonlocal together
        layout = comms[0].layout
        hosts = {layout.hosts[way.source], layout.hosts[way.target]}
        assert not hosts & busy.keys(), (busy, way.source, way.target)
        busy.update(dict.fromkeys(hosts, (way.source, way.target)))
        together = max(together, len(busy))
        found = await original(way, *more)
        for host in hosts:
            del busy[host]
        return found

    monkeypatch.setattr(live, "lead", lead)
    async with world(8, hosts=4) as comms:
        await everywhere(comms, quick)
        assert together == 4
        assert not busy


@pytest.mark.asyncio
@pytest.mark.usefixtures("links")
async def test_names_and_strategies_of_the_user_are_not_disturbed() -> None:
    """Collectives go on, strategies are swapped, several probes are asked for at once, and names stay few."""
    x = np.ones(5000)
    async with world(4, hosts=2) as comms:
        await everywhere(comms, quick)
        names = [comm._session.engine.router.num_keys for comm in comms]
        probing = [asyncio.ensure_future(quick(comm)) for comm in comms for _ in range(3)]
        for name in ("ring", "star", "clique"):
            swaps = [comm.set_strategy(name) for comm in comms]
            sums = await everywhere(comms, lambda comm: comm.all_reduce(x, "probe"))
            assert all((one == 4).all() for one in sums)
            await asyncio.gather(*swaps)
        probes = await asyncio.gather(*probing)
        for number in range(3):
            assert_alike(probes[number::3])
        after = [comm._session.engine.router.num_keys for comm in comms]
        assert [late - early for early, late in zip(names, after, strict=True)] == [2] * 4  # "probe", and the swaps


@pytest.mark.asyncio
async def test_strategies_of_a_probe_can_be_set() -> None:
    async with world(4, hosts=4) as comms:
        found = (await everywhere(comms, quick))[0]
        for strategy in (found.packed_trees(), found.minimum_spanning_tree()):
            await everywhere(comms, lambda comm, strategy=strategy: comm.set_strategy(strategy))
            sums = await everywhere(comms, lambda comm: comm.all_reduce(np.ones(10_000), "x"))
            assert all((one == 4).all() for one in sums)
            assert comms[0].strategy is strategy


@pytest.mark.asyncio
async def test_groups_probe_their_own_ranks() -> None:
    async with world(4, hosts=2) as comms:
        group = await everywhere([comms[3], comms[1]], lambda comm: comm.group([3, 1]))
        probes = await everywhere(group, quick)
        assert probes[0].size == 2
        assert_alike(probes)
        await everywhere(comms, quick)


def test_blocking() -> None:
    with sync_world(3) as comms:
        assert_alike(run_threads(comms, lambda comm: comm.probe(nbytes=4096, rounds=1)))
        handles = [comm.probe_async(nbytes=4096, rounds=1) for comm in comms]
        assert_alike([handle.wait() for handle in handles])


# ---------------------------------------------------------------- failures


@pytest.mark.asyncio
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.usefixtures("links")
async def test_a_rank_that_does_not_answer_is_named_and_the_communicator_lives(victim: int) -> None:
    async with world(4, hosts=4, aborted=True) as comms:
        present = [comm for comm in comms if comm.rank != victim]
        errors = await ends(present, lambda comm: quick(comm, timeout=SHORT_S))
        assert all(isinstance(error, (CollectiveTimeout, CollectiveAborted)) for error in errors), errors
        timeouts = [error for error in errors if isinstance(error, CollectiveTimeout)]
        assert timeouts
        assert any(error.missing == (victim,) for error in timeouts), [error.missing for error in timeouts]
        (late,) = await ends([comms[victim]], quick)
        assert isinstance(late, CollectiveError)
        await works(comms)
        assert_alike(await everywhere(comms, quick))


@pytest.mark.asyncio
@pytest.mark.parametrize("at", ["lead", "follow"])
@pytest.mark.usefixtures("links")
async def test_a_rank_that_stops_in_the_middle(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where it should measure with another, and does nothing: both and all others learn of it."""
    stopped = asyncio.Event()
    again = asyncio.Event()
    original = getattr(live, at)

    async def stop(way: pairs.OneWay, *more: Any) -> Any:
        me = way.source if at == "lead" else way.target
        if me == 2 and not stopped.is_set():
            stopped.set()
            await again.wait()
        return await original(way, *more)

    monkeypatch.setattr(live, at, stop)
    async with world(4, hosts=4, aborted=True) as comms:
        probing = [asyncio.ensure_future(quick(comm, timeout=1.0)) for comm in comms]
        await asyncio.wait([*probing[:2], probing[3]])
        again.set()
        errors = await asyncio.gather(*probing, return_exceptions=True)
        assert all(isinstance(error, CollectiveError) for error in errors), errors
        timeouts = [error for error in errors if isinstance(error, CollectiveTimeout)]
        assert {error.missing for error in timeouts} == {(2,)}
        assert any(str(error).endswith(" and rank 2: rank 2 did not answer within 1.0 s") for error in timeouts)
        assert all("rank 2 did not answer within 1.0 s" in str(error) for error in errors)
        await works(comms)
        assert_alike(await everywhere(comms, quick))


@pytest.mark.asyncio
@pytest.mark.usefixtures("links")
async def test_a_dead_peer_is_named() -> None:
    async with world(4, hosts=4, quiet=False) as comms:
        await everywhere(comms, quick)
        group = await everywhere(comms[:3], lambda comm: comm.group([0, 1, 2]))
        comms.kill(3)
        errors = await ends(comms[:3], quick)
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, 3)] * 3
        assert all("rank 3" in str(error) for error in errors)
        assert_alike(await everywhere(group, quick))


@pytest.mark.asyncio
async def test_a_peer_that_dies_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    original = live.follow

    async def follow(way: pairs.OneWay, *more: Any) -> Any:
        if way.target == 1:
            comms.kill(1)
            await asyncio.Event().wait()
        return await original(way, *more)

    monkeypatch.setattr(live, "follow", follow)
    async with world(3, hosts=3, quiet=False) as comms:
        probing = [asyncio.ensure_future(quick(comm)) for comm in comms]
        errors = await asyncio.gather(probing[0], probing[2], return_exceptions=True)
        assert [(type(error), getattr(error, "rank", None)) for error in errors] == [(PeerLost, 1)] * 2
        probing[1].cancel()
        await asyncio.wait(probing[1:2])


@pytest.mark.asyncio
@pytest.mark.usefixtures("links")
async def test_a_cancelled_probe_ends_everywhere() -> None:
    async with world(3, hosts=3, aborted=True) as comms:
        present = [asyncio.ensure_future(quick(comm)) for comm in comms[:2]]
        await until(lambda: all(comm._session.engine.router.live for comm in comms[:2]))
        present[0].cancel()
        first, second = await asyncio.gather(*present, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError)
        assert isinstance(second, CollectiveAborted)
        (late,) = await ends(comms[2:], quick)
        assert isinstance(late, CollectiveAborted)
        assert_alike(await everywhere(comms, quick))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nbytes": 0}, "messages of 1 to 33554432 bytes, not of 0"),
        ({"nbytes": 1 << 26}, "messages of 1 to 33554432 bytes, not of 67108864"),
        ({"nbytes": 1.5}, "not of 1.5"),
        ({"rounds": 0}, "a probe has 1 to 32 rounds, not 0"),
        ({"rounds": 33}, "a probe has 1 to 32 rounds, not 33"),
        (
            {"timeout": "soon"},
            "a timeout is a number of seconds from 0 on, a timedelta, or None for the default, not 'soon'",
        ),
        ({"timeout": -1}, "a timeout is a number of seconds from 0 on, a timedelta, or None for the default, not -1"),
    ],
)
async def test_arguments_that_cannot_work_fail_all(wrong: dict[str, Any], message: str) -> None:
    async with world(3, aborted=True) as comms:
        errors = await ends(comms, lambda comm: quick(comm, **(wrong if comm.rank == 1 else {})))
        assert isinstance(errors[1], ConfigError)
        assert message in str(errors[1])
        for error in (errors[0], errors[2]):
            assert isinstance(error, CollectiveAborted)
            assert message in str(error)
        assert_alike(await everywhere(comms, quick))


@pytest.mark.asyncio
async def test_unlike_arguments_are_a_mismatch() -> None:
    async with world(3, aborted=True) as comms:
        errors = await ends(comms, lambda comm: quick(comm, rounds=1 + (comm.rank == 1)))
        assert {type(error) for error in errors} == {CollectiveMismatch}
        assert "counts (4096, 1)" in str(errors[0])
        assert_alike(await everywhere(comms, quick))


@pytest.mark.asyncio
async def test_a_closed_group_measures_nothing() -> None:
    async with world(2, quiet=False) as comms:
        group = await everywhere(comms, lambda comm: comm.group([0, 1]))
        probing = asyncio.ensure_future(quick(group[0]))
        await until(lambda: comms[0]._session.engine.router.live)
        await group[0].close()
        (error,) = await asyncio.gather(probing, return_exceptions=True)
        assert isinstance(error, CollectiveError)
        with pytest.raises(SessionClosed):
            await quick(group[0])
