"""`agree` and `shrink`: those that live go on as a smaller world, on every link and in both interfaces."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

import kfcomm
from kfcomm import strategies
from kfcomm.core.membership import Tag
from kfcomm.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, EpochChanged, PeerLost, SessionClosed
from kfcomm.testing import run_ranks, run_threads, sync_world, world


async def until_lost(comm: Any) -> None:
    """This rank has heard of a loss, whatever the others do."""

    async def work() -> None:
        while True:
            await comm.barrier()

    with pytest.raises(PeerLost):
        await work()


async def total(comm: Any, name: str = "total") -> int:
    return int((await comm.all_reduce(np.ones(3), name=name))[0])


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("victims", [(0,), (2,), (1, 3)])
@pytest.mark.asyncio
async def test_survivors_continue(transport: Any, victims: tuple[int, ...]) -> None:
    async with world(4, transport=transport) as comms:
        births = tuple(rank for rank in range(4) if rank not in victims)

        async def main(comm: kfcomm.Communicator) -> None:
            assert await total(comm) == 4
            assert await comm.agree(True)
            waiting = comm.all_reduce(np.ones(3), name="never") if comm.rank == births[0] else None
            if comm.rank in victims:
                comms.kill(comm.rank)
                return
            await until_lost(comm)
            assert not await comm.agree(comm.rank != births[-1])
            after = await comm.shrink()
            assert (after.size, after.births, after.epoch) == (len(births), births, 1)
            assert births[after.rank] == comm.rank
            assert await total(after) == len(births)
            assert await after.agree(6 | after.rank) == 6
            if waiting is not None:
                with pytest.raises((PeerLost, EpochChanged)):
                    await waiting
            with pytest.raises(EpochChanged, match="epoch 0 is over") as failure:
                await comm.barrier()
            assert (failure.value.epoch, failure.value.members) == (1, births)
            with pytest.raises(EpochChanged):
                await comm.shrink()
            again = await after.shrink()
            assert (again.epoch, await total(again)) == (2, len(births))

        await run_ranks(comms, main)


def shown_by(comm: Any) -> Any:
    """From which memory this rank shows things to others."""
    network = comm._session.network
    return network._links._ranks[network._rank]._arena


def arena_of(comm: Any) -> int:
    """Mark that tells it from all others."""
    return os.fstat(shown_by(comm).descriptor).st_ino


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.asyncio
async def test_memory_goes_on_to_the_next_epoch_unless_the_lost_may_read_there(is_over: bool) -> None:
    async with world(3, transport="shm") as comms:
        all_have_it = asyncio.Barrier(3)

        async def main(comm: kfcomm.Communicator) -> None:
            x = np.full(1 << 20, comm.rank + 1.0)
            assert (await comm.all_reduce(x, name="x"))[-1] == 6
            before = arena_of(comm)
            if not is_over:
                shown_by(comm).is_doubtful = True
            await all_have_it.wait()
            if comm.rank == 2:
                comms.kill(2)
                return
            await until_lost(comm)
            after = await comm.shrink()
            for _ in range(4):
                assert (await after.all_reduce(x, name="x"))[-1] == 3
            assert (arena_of(after) == before) == is_over
            once_more = await after.shrink()
            assert (await once_more.all_reduce(x, name="x"))[-1] == 3
            assert (arena_of(once_more) == before) == is_over

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_calls_in_flight_raise_epoch_changed() -> None:
    async with world(3) as comms:
        waiting = [comm.all_reduce(np.ones(3), name="x") for comm in comms[:2]]
        message = comms[0].recv(1)
        await asyncio.gather(*(comm.shrink() for comm in comms))
        for handle in [*waiting, message]:
            with pytest.raises(EpochChanged, match="epoch 0 is over: ranks \\[0, 1, 2\\] go on as epoch 1") as failure:
                await handle
            assert failure.value.members == (0, 1, 2)


@pytest.mark.asyncio
async def test_a_name_of_a_strategy_goes_with_the_ranks_and_graphs_do_not() -> None:
    async with world(3) as comms:
        for strategy, expected in (("ring", "ring"), ([[(0, 1), (1, 2)]], "auto")):
            if isinstance(strategy, str):
                await run_ranks(comms, lambda comm, given=strategy: comm.set_strategy(given))
                after = await asyncio.gather(*(comm.shrink() for comm in comms))
                assert [comm.strategy.name for comm in after] == [expected] * 3
    async with world(3, strategy="star") as comms:
        # a change of which some have heard and others not
        comms[1]._group.plans = comms[1]._group._generations.plans(comms[1]._group.build("ring"), 1)
        after = await asyncio.gather(*(comm.shrink() for comm in comms))
        assert {comm.strategy.name for comm in after} == {"auto"}


@pytest.mark.asyncio
async def test_the_strategy_of_an_epoch_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds, while all wait; these ranks are in one process, and the latest choices are cached."""
    chosen: list[int] = []
    choose = strategies._auto.auto

    def counted(layout: Any) -> Any:
        chosen.append(layout.size)
        return choose(layout)

    strategies._auto.auto_before.cache_clear()
    monkeypatch.setattr(strategies._auto, "auto", counted)
    async with world(3) as comms:
        before = len(chosen)
        comms.kill(2)
        await run_ranks(comms[:2], lambda comm: comm.shrink())
        assert chosen[before:] == [2]


@pytest.mark.asyncio
async def test_groups_end_with_their_epoch() -> None:
    async with world(3) as comms:
        groups = await asyncio.gather(*(comm.group([0, 2]) for comm in (comms[0], comms[2])))
        for verb in ("agree", "shrink"):
            with pytest.raises(ConfigError, match=f"{verb} is for all ranks"):
                await getattr(groups[0], verb)(*([True] if verb == "agree" else []))
        after = await asyncio.gather(*(comm.shrink() for comm in comms))
        with pytest.raises(EpochChanged):
            await groups[0].barrier()
        again = await asyncio.gather(*(comm.group([0, 2]) for comm in (after[0], after[2])))
        assert await asyncio.gather(*(total(comm) for comm in again)) == [2, 2]


@pytest.mark.asyncio
async def test_agree_takes_flags_and_whole_numbers() -> None:
    async with world(2) as comms:
        for value in (1.0, "yes", None, 1 << 63, [True]):
            with pytest.raises(ConfigError, match="a bool or a 64-bit integer"):
                await comms[0].agree(value)
        assert await asyncio.gather(comms[0].agree(np.bool_(True)), comms[1].agree(True)) == [True, True]
        assert await asyncio.gather(comms[0].agree(np.int64(-1)), comms[1].agree(12)) == [12, 12]
        for error in await asyncio.gather(comms[0].agree(1), comms[1].agree(True), return_exceptions=True):
            assert isinstance(error, CollectiveMismatch)
        assert await asyncio.gather(*(comm.agree(True) for comm in comms)) == [True, True]


@pytest.mark.asyncio
async def test_rank_that_does_not_call_is_named_and_may_call_later() -> None:
    async with world(2) as comms:
        with pytest.raises(CollectiveTimeout, match=r"shrink\(\) is not done after 0.01 s: ranks \[1\] have not"):
            await comms[0].shrink(timeout=0.01)
        after = await asyncio.gather(*(comm.shrink() for comm in comms))
        assert [comm.epoch for comm in after] == [1, 1]
    async with world(2) as comms:
        with pytest.raises(CollectiveTimeout):
            await comms[0].shrink(timeout=0.01)
        # it is closed while a entry is open


@pytest.mark.asyncio
async def test_rank_that_closes_meanwhile_is_not_awaited() -> None:
    async with world(3) as comms:
        waiting = [asyncio.ensure_future(comm.shrink()) for comm in comms[:2]]
        await asyncio.sleep(0)
        await asyncio.gather(comms[2].close(), *waiting)
        assert await asyncio.gather(*(total(one.result()) for one in waiting)) == [2, 2]
        with pytest.raises(SessionClosed):
            await comms[2].agree(True)


@pytest.mark.asyncio
async def test_closing_the_first_closes_the_last_and_figures_are_of_the_last() -> None:
    async with world(2) as comms:
        first = comms[0]
        after = await asyncio.gather(*(comm.shrink() for comm in comms))
        await asyncio.gather(*(total(comm, "mine") for comm in after))
        assert "mine" in str(first.statistics().keys)
        await asyncio.gather(*(comm.close() for comm in comms))
        with pytest.raises(SessionClosed):
            await after[0].barrier()


@pytest.mark.asyncio
async def test_a_world_of_one_shrinks_to_itself() -> None:
    async with kfcomm.init(rank=0, size=1) as comm:
        assert await comm.agree(3) == 3
        after = await comm.shrink()
        assert (after.size, after.epoch, await total(after)) == (1, 1, 1)


def test_blocking() -> None:
    with sync_world(3) as comms:

        def main(comm: kfcomm.sync.Communicator) -> tuple[int, ...]:
            assert comm.agree(comm.rank | 4) == 4
            if comm.rank == 1:
                comms.kill(1)
                return ()

            def work() -> None:
                while True:
                    comm.barrier()

            with pytest.raises(PeerLost):
                work()
            after = comm.shrink()
            assert int(after.all_reduce(np.ones(3))[0]) == 2
            with pytest.raises(EpochChanged):
                comm.all_reduce(np.ones(3))
            assert after.agree_async(True).wait()
            return after.births

        assert run_threads(comms, main) == [(0, 2), (), (0, 2)]


@pytest.mark.asyncio
async def test_continuing_rank_tells_the_decision_when_others_are_lost() -> None:
    """A rank that has not heard the decision may have lost all others that know it."""
    async with world(3) as comms:
        former = comms[0]._session
        await asyncio.gather(*(comm.shrink() for comm in comms))
        told: list[Any] = []
        former.agreements._tell = lambda _, message: told.append(message)
        former.on_peer_lost(2, "silent")
        ((tag, value),) = told
        assert tag is Tag.DECIDED
        assert [rank for rank, _ in value] == [0, 1, 2]
