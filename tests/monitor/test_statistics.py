"""Statistics of a communicator: exact bytes, calls by key, late ranks; on any thread, at any time."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
import pytest

import kfcomm
from kfcomm import testing
from kfcomm.errors import CollectiveAborted, ConfigError
from kfcomm.monitor import KeyStatistics, PeerStatistics, Statistics, TcpPath
from tests.conformance.worlds import ends, everywhere, until, works, world
from tests.search.traffic import disagreements

X = np.ones(1000, np.float32)
LARGE = np.ones(1 << 16, np.float32)
"""So large that every graph pair of a strategy gets a part of it."""


def key(statistics: Statistics, name: str) -> KeyStatistics:
    """The record of one name."""
    (found,) = [one for one in statistics.keys if one.name == name]
    return found


def peer(statistics: Statistics, rank: int) -> PeerStatistics:
    """The record of one peer."""
    (found,) = [one for one in statistics.peers if one.rank == rank]
    return found


# ---------------------------------------------------------------- bytes


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", ["ring", "clique", "binary_tree"])
@pytest.mark.parametrize("elements", [1, 1000, 1 << 20])
async def test_sent_and_received_bytes_are_equal(links: str, strategy: str, elements: int) -> None:
    x = np.ones(elements, np.float32)
    async with world(4, strategy=strategy) as comms:
        for _ in range(3):
            await everywhere(comms, lambda comm: comm.all_reduce(x, "x"))
            await everywhere(comms, lambda comm: comm.all_gather(x[: 5000 * comm.rank], concat=True))
        await until(lambda: not disagreements(comms))
        assert {one.link for comm in comms for one in comm.statistics().peers} == {links}


@pytest.mark.asyncio
async def test_payloads_in_memory_are_counted_to_the_byte() -> None:
    async with world(4, strategy="ring") as comms:
        await everywhere(comms, lambda comm: comm.all_reduce(LARGE, "x"))
        said = [comm.statistics() for comm in comms]
        # a ring sends 2(n-1)/n of the message from each rank, all of it to the next
        assert [sum(one.sent_nbytes for one in each.peers) for each in said] == [2 * 3 * LARGE.nbytes // 4] * 4
        assert all(peer(said[rank], (rank + 1) % 4).sent_nbytes == 2 * 3 * LARGE.nbytes // 4 for rank in range(4))


SHARED = {
    "all_reduce": (lambda comm: comm.all_reduce(X, "x"), lambda giver, reader: X.nbytes),
    "all_reduce in parts": (
        lambda comm: comm.all_reduce(LARGE, "x"),
        lambda giver, reader: 4 * (PARTS[giver] + PARTS[reader]),
    ),
    "broadcast": (lambda comm: comm.broadcast(X, 1, "x"), lambda giver, reader: X.nbytes if giver == 1 else 0),
    "reduce": (lambda comm: comm.reduce(X, 1, name="x"), lambda giver, reader: X.nbytes if reader == 1 else 0),
    "gather": (lambda comm: comm.gather(X, 1, "x"), lambda giver, reader: X.nbytes if reader == 1 else 0),
    "all_gather": (lambda comm: comm.all_gather(X, "x"), lambda giver, reader: X.nbytes),
    "reduce_scatter": (
        lambda comm: comm.reduce_scatter(X[:999], "x"),
        lambda giver, reader: 999 * 4 // 3,
    ),
    "barrier": (lambda comm: comm.barrier("x"), lambda giver, reader: 0),
}
"""Calls that are carried out in slots, and the bytes that one rank reads of another in each."""
PARTS = (21846, 21845, 21845)
"""Elements of LARGE that each of three ranks folds."""


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", SHARED)
async def test_slot_traffic_is_counted(verb: str) -> None:
    call, nbytes = SHARED[verb]
    async with testing.world(3, transport="shm") as comms:
        while min(comm.statistics().slots for comm in comms) == 0:
            await everywhere(comms, call)
        before = [comm.statistics() for comm in comms]
        for _ in range(10):
            await everywhere(comms, call)
        now = [comm.statistics() for comm in comms]
        assert disagreements(comms) == []
        for giver in range(3):
            for reader in {0, 1, 2} - {giver}:
                then, one = moved(before[giver], reader), moved(now[giver], reader)
                assert one - then == 10 * nbytes(giver, reader), (giver, reader)


@pytest.mark.asyncio
async def test_slot_traffic_of_a_closed_group_is_counted() -> None:
    async with testing.world(2, transport="shm") as comms:
        groups = await everywhere(comms, lambda comm: comm.group([0, 1]))
        for _ in range(10):
            await everywhere(groups, lambda comm: comm.all_reduce(X, "x"))
        before = [moved(comm.statistics(), 1 - comm.rank) for comm in comms]
        assert min(before) >= 8 * X.nbytes
        await everywhere(groups, lambda comm: comm.close())
        assert all(moved(comm.statistics(), 1 - comm.rank) >= then for comm, then in zip(comms, before, strict=True))


def moved(statistics: Statistics, rank: int) -> int:
    """Bytes sent to a rank, over all links."""
    return sum(one.sent_nbytes for one in statistics.peers if one.rank == rank)


@pytest.mark.asyncio
async def test_forwarded_bytes_are_counted_at_the_forwarding_rank(links: str) -> None:
    chain = kfcomm.strategies.from_parents([0, 0, 1], name="chain")
    async with world(3, strategy=chain) as comms:
        await everywhere(comms, lambda comm: comm.broadcast(X, 0, "x"))
        await everywhere(comms, lambda comm: comm.gather(X, 0, "y"))
        await until(lambda: not disagreements(comms))
        said = [comm.statistics() for comm in comms]
        assert peer(said[1], 2).sent_nbytes >= X.nbytes
        assert peer(said[1], 0).sent_nbytes >= 2 * X.nbytes  # the share of rank 2 as well as its own
        assert peer(said[2], 1).sent_nbytes < 2 * X.nbytes
        assert 2 not in [one.rank for one in said[0].peers]


@pytest.mark.asyncio
async def test_sums_outlive_their_links(links: str) -> None:
    async with world(3, quiet=False) as comms:
        await works(comms, "x")
        before = [comm.statistics() for comm in comms]
        comms.unplug(1)
        while any(not isinstance(one, np.ndarray) for one in await ends(comms, lambda comm: comm.all_reduce(X, "y"))):
            pass
        for old, comm in zip(before, comms, strict=True):
            now = comm.statistics()
            for then in old.peers:
                one = peer(now, then.rank)
                assert one.sent_nbytes >= then.sent_nbytes
                assert one.received_messages >= then.received_messages


@pytest.mark.asyncio
async def test_rates_are_of_the_last_window(links: str) -> None:
    async with world(2) as comms:
        begun_s = time.monotonic()
        await everywhere(comms, lambda comm: comm.all_reduce(X, "x"))
        passed_s = time.monotonic() - begun_s  # before they are read: this test may pause at any line
        one = peer(comms[0].statistics(), 1)
        assert one.send_rate > 0
        assert one.send_rate * passed_s < one.sent_nbytes * 1.01
        again = comms[0].statistics()  # another reader
        assert peer(again, 1).send_rate > 0
        # without traffic they come down to nothing, whoever reads or not
        await until(lambda: peer(comms[0].statistics(), 1).send_rate == 0.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.asyncio
async def test_the_kernel_measures_tcp_connections(links: str) -> None:
    async with world(2) as comms:
        await everywhere(comms, lambda comm: comm.all_reduce(LARGE, "x"))

        def paths() -> list[TcpPath | None]:
            return [peer(one.statistics(), 1 - one.rank).path for one in comms]

        if links != "tcp":
            assert paths() == [None, None]
            return
        await until(lambda: all(path and path.acked_nbytes >= LARGE.nbytes // 2 for path in paths()))
        for comm in comms:
            now = comm.statistics()
            path = peer(now, 1 - comm.rank).path
            assert path is not None
            assert 0 < path.round_trip_s < 1
            assert path.delivery_rate > 0
            assert path.busy_s > 0
            assert path.mean_rate == pytest.approx(path.acked_nbytes / path.busy_s)
            assert path.acked_nbytes <= peer(now, 1 - comm.rank).sent_nbytes + 1000  # and what the handshake takes
            assert Statistics.from_json(json.loads(json.dumps(now.as_json()))) == now
    assert peer(comms[0].statistics(), 1).path is None  # closed


# ---------------------------------------------------------------- calls


@pytest.mark.asyncio
async def test_calls_are_counted_by_name(links: str) -> None:
    async with world(3, aborted=True) as comms:
        for _ in range(7):
            await everywhere(comms, lambda comm: comm.all_reduce(X, "grad/0"))
        await everywhere(comms, lambda comm: comm.all_reduce(X))
        await everywhere(comms, lambda comm: comm.barrier("end"))
        await asyncio.gather(comms[0].send(X, 1, tag=5), comms[1].recv(0, tag=5))
        await asyncio.gather(comms[0].send(X, 2, tag=5), comms[2].recv(0, tag=5))
        await everywhere(comms, lambda comm: comm.all_gather_object(comm.rank, "who"))
        said = comms[0].statistics()
        assert [one.name for one in said.keys] == ["grad/0", "", "end", "who", "who (data)", "tag 5"] or [
            one.name for one in said.keys
        ] == ["grad/0", "", "end", "tag 5", "who", "who (data)"]
        one = key(said, "grad/0")
        assert (one.count, one.nbytes, one.failures) == (7, 7 * X.nbytes, 0)
        assert 0 < one.p50_s <= one.p99_s <= one.max_s <= one.total_s
        assert (key(said, "").count, key(said, "end").nbytes) == (1, 0)
        assert (key(said, "tag 5").count, key(said, "tag 5").nbytes) == (2, 2 * X.nbytes)
        assert key(comms[1].statistics(), "tag 5").nbytes == X.nbytes
        assert said.others is None


@pytest.mark.asyncio
async def test_failed_calls_are_counted_separately(links: str) -> None:
    async with world(2, aborted=True) as comms:
        with pytest.raises(ConfigError):
            comms[0].all_reduce("no array", "bad")
        with pytest.raises(CollectiveAborted):
            await comms[1].all_reduce(X, "bad")
        handle = comms[0].all_reduce(X, "cancelled")
        handle.cancel()
        with pytest.raises(CollectiveAborted):
            await comms[1].all_reduce(X, "cancelled")
        first, second = comms[0].all_reduce(X, "twice"), comms[0].all_reduce(X, "twice")
        await asyncio.gather(first, second, comms[1].all_reduce(X, "twice"), return_exceptions=True)
        for name in ("bad", "cancelled"):
            assert [(one.count, one.failures) for one in (key(c.statistics(), name) for c in comms)] == [(0, 1)] * 2
        assert (key(comms[0].statistics(), "twice").count, key(comms[0].statistics(), "twice").failures) == (1, 1)


@pytest.mark.asyncio
async def test_a_group_has_its_own_keys_and_strategies(links: str) -> None:
    async with world(3, strategy="ring") as comms:
        await everywhere(comms, lambda comm: comm.all_reduce(X, "x"))
        subs = await asyncio.gather(*(comms[rank].group([2, 0], "pair", strategy="star") for rank in (0, 2)))
        await everywhere(subs, lambda comm: comm.all_reduce(X, "y"))
        await everywhere(subs, lambda comm: comm.monitored_all_reduce(X, "y"))
        sub, whole = subs[0].statistics(), comms[0].statistics()
        assert (sub.rank, sub.size, sub.strategy) == (1, 2, "star")
        assert (whole.rank, whole.size, whole.strategy) == (0, 3, "ring")
        assert [one.name for one in sub.keys] == ["group", "y"]
        assert [one.name for one in whole.keys] == ["x"]
        assert [one.name for one in sub.strategies] == ["star"]
        assert whole.strategies == ()
        assert [one.rank for one in sub.peers] == [one.rank for one in whole.peers] == [1, 2]


# ---------------------------------------------------------------- who is slow


@pytest.mark.asyncio
@pytest.mark.parametrize("late", [0, 2])
async def test_a_rank_that_posts_late_is_the_one_that_was_waited_for(links: str, late: int) -> None:
    async with world(4, strategy="clique") as comms:
        await everywhere(comms, lambda comm: comm.all_reduce(LARGE, "before"))
        begin_s = time.monotonic()
        before = [comm.statistics() for comm in comms]
        handles = {rank: comms[rank].all_reduce(LARGE, "x") for rank in range(4) if rank != late}
        operations = [handle.operation.collective for handle in handles.values()]
        await until(lambda: all(len(one.arrived_ranks()) == 3 for one in operations))
        here_s = time.monotonic()
        # for as long as all that came before it, and more: then it stands out
        await until(lambda: time.monotonic() - here_s > 2 * (here_s - begin_s) + 0.01)
        late_s = time.monotonic()
        handles[late] = comms[late].all_reduce(LARGE, "x")
        await asyncio.gather(*handles.values())
        for rank, comm in enumerate(comms):
            waited = {one.rank: one.waited_s - peer(before[rank], one.rank).waited_s for one in comm.statistics().peers}
            if rank == late:  # all that it needed of the others was there
                assert sum(waited.values()) < late_s - here_s + time.monotonic() - late_s
            else:
                # in shared memory one look serves the ranks by turns: those before pass on what has come
                earlier = set(range(rank)) if links == "shm" and late else set()
                told = {late, *earlier}
                assert max(waited, key=waited.__getitem__) in told
                assert sum(waited[one] for one in told if one != rank) >= late_s - here_s


# ---------------------------------------------------------------- throughput


@pytest.mark.asyncio
async def test_a_monitored_all_reduce_is_an_all_reduce(links: str) -> None:
    async with world(3, strategy="ring") as comms:
        out = np.empty_like(X)
        for _ in range(2):  # anew, and as one before
            results = await everywhere(comms, lambda comm: comm.monitored_all_reduce(X * comm.rank, "x", op="max"))
            assert all((one == 2).all() for one in results)
        mixed = [comms[0].monitored_all_reduce(X, "y", out=out), *(comm.all_reduce(X, "y") for comm in comms[1:])]
        assert (await asyncio.gather(*mixed))[0] is out
        assert (out == 3).all()
        await everywhere(comms, lambda comm: comm.monitored_all_reduce(X.tolist(), "z"))
        await everywhere(comms, lambda comm: comm.monitored_all_reduce(X, "w", wire_dtype="float16"))
        (one,) = comms[0].statistics().strategies
        assert (one.name, one.count, one.nbytes) == ("ring", 5, 4 * X.nbytes + 8 * X.size)
        assert one.throughput > 0
        assert one.reference > 0
        (other,) = comms[1].statistics().strategies
        assert other.count == 4


@pytest.mark.asyncio
async def test_calls_that_fail_have_no_throughput(links: str) -> None:
    async with world(2, aborted=True) as comms:
        for bad in ("no array", object()):
            with pytest.raises(ConfigError):
                comms[0].monitored_all_reduce(bad, "x")
            with pytest.raises(CollectiveAborted):
                await comms[1].monitored_all_reduce(X, "x")
        assert [one.count for comm in comms for one in comm.statistics().strategies] in ([], [0])


@pytest.mark.asyncio
async def test_each_strategy_has_its_own_throughput(links: str) -> None:
    async with world(3, strategy="ring") as comms:
        await everywhere(comms, lambda comm: comm.monitored_all_reduce(X, "x"))
        outcomes = [comm.set_strategy("star") for comm in comms]
        handles = [comm.monitored_all_reduce(X, "x") for comm in comms]  # waits for the outcome
        await asyncio.gather(*outcomes, *handles)
        said = comms[0].statistics()
        assert said.strategy == "star"
        assert [(one.name, one.count) for one in said.strategies] == [("ring", 1), ("star", 1)]


# ---------------------------------------------------------------- reading


@pytest.mark.asyncio
async def test_a_record_goes_through_json(links: str) -> None:
    async with world(2) as comms:
        await everywhere(comms, lambda comm: comm.monitored_all_reduce(X, "x"))
        said = comms[0].statistics()
        assert Statistics.from_json(json.loads(json.dumps(said.as_json()))) == said
        assert said.peak_memory_nbytes > 1 << 20
        assert said.loop_lag_s >= 0.0
        assert abs(said.time_s - time.time()) < 3600


@pytest.mark.asyncio
async def test_it_can_be_read_on_any_thread_while_all_is_busy(links: str) -> None:
    async with world(3) as comms:
        stop = False

        def read() -> int:
            reads = last = 0
            while not stop:
                now = comms[0].statistics()
                total = sum(one.count for one in now.keys) + sum(one.sent_messages for one in now.peers)
                assert total >= last
                last = total
                reads += 1
            return reads

        readers = [asyncio.create_task(asyncio.to_thread(read)) for _ in range(2)]
        for number in range(15):
            await everywhere(comms, lambda comm, name=f"name/{number}": comm.all_reduce(X, name))
        stop = True
        assert all([await reader > 0 for reader in readers])


@pytest.mark.asyncio
async def test_it_can_be_read_when_all_is_over() -> None:
    async with world(2) as comms:
        await works(comms, "x")
    assert key(comms[0].statistics(), "x").count == 1


@pytest.mark.asyncio
async def test_without_monitoring_there_is_nothing_to_read() -> None:
    async with world(2, monitor=False) as comms:
        assert comms[0]._session.engine.meter is None
        await everywhere(comms, lambda comm: comm.monitored_all_reduce(X, "x"))
        await works(comms)
        with pytest.raises(ConfigError, match="monitoring is off: set monitor=True, or KFCOMM_MONITOR=1"):
            comms[0].statistics()


def test_blocking_communicators_have_it_too() -> None:
    with testing.sync_world(2) as comms:
        testing.run_threads(comms, lambda comm: comm.monitored_all_reduce(X, "x"))
        testing.run_threads(comms, lambda comm: comm.monitored_all_reduce_async(X, "x").wait())
        said = comms[0].statistics()
        assert key(said, "x").count == said.strategies[0].count == 2
        with kfcomm.sync.init() as alone:
            alone.all_reduce(X, "y")
            said = alone.statistics()
            assert (said.peers, said.size, key(said, "y").count) == ((), 1, 1)
