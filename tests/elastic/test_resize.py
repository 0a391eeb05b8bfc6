"""Other numbers of ranks: by a call of all, without an Elastic; and by requests, for ranks that are to go."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import CollectiveTimeout, ConfigError, PeerLost
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from tests.elastic.support import Died


async def total(comm: Any) -> float:
    return float((await comm.all_reduce(np.full(3, comm.births[comm.rank] + 1.0), "x"))[0])


def die_at_the_agreement(comms: Any, rank: int) -> None:
    """Kill a rank when it is about to agree on the next epoch, and has the plan."""

    async def open_entry(epoch: int) -> Any:
        comms.kill(rank)
        raise Died

    comms[rank]._session.network.open_entry = open_entry


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.asyncio
async def test_more_and_fewer(transport: Any) -> None:
    async with world(2, elastic=True, transport=transport) as comms:

        async def old(comm: Any) -> Any:
            assert await comm.resize(2)
            assert comm.epoch == 0  # nothing was to be done
            assert await comm.resize(4)
            found = [comm.size, comm.epoch, await total(comm)]
            return [*found, comm.size, await total(comm)] if await comm.resize(1) else found

        async def new(birth: int) -> Any:
            comm: Any = await comms.join(birth)
            found = [comm.size, comm.epoch, await total(comm)]
            assert not await comm.resize(1)
            return found

        members = list(comms)
        said = await asyncio.gather(*map(old, members), *map(new, (5, 7)))
        assert said == [[4, 1, 17.0, 1, 1.0], *[[4, 1, 17.0]] * 3]


@pytest.mark.asyncio
async def test_resize_times_out_without_joining_ranks() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> float:
            with pytest.raises(CollectiveTimeout, match=r"resize\(3\): 0 of 1 new ranks have come within 1 s"):
                await comm.resize(3, timeout=1.0)
            return await total(comm)

        assert await run_ranks(comms, main) == [3.0, 3.0]


@pytest.mark.asyncio
async def test_a_rank_dies_in_its_midst() -> None:
    """Of two that were to go one is dead by the time of the agreement."""
    async with world(4, elastic=True) as comms:
        die_at_the_agreement(comms, 3)

        async def main(comm: Any) -> Any:
            if comm.rank == 3:
                with pytest.raises(Died):
                    await comm.resize(2)
                return None
            stays = await comm.resize(2)
            return stays, comm.births if stays else None

        assert await run_ranks(comms, main) == [(True, (0, 1)), (True, (0, 1)), (False, None), None]


@pytest.mark.asyncio
async def test_invalid_sizes_are_refused() -> None:
    async with world(1, elastic=True) as comms:
        comm: Any = comms[0]
        for size in (0, -1, True, "2"):
            with pytest.raises(ConfigError, match="a size is a whole number"):
                await comm.resize(size)
        async with Elastic(comm, State()):
            with pytest.raises(ConfigError, match="while an Elastic is open"):
                await comm.resize(2)


@pytest.mark.asyncio
async def test_requests_are_carried_out_where_all_ranks_call_it() -> None:
    async with world(2, elastic=True) as comms:

        async def until_changed(comm: Any) -> list[Any]:
            epoch = comm.epoch
            while await comm.follow_requests():
                if comm.epoch != epoch:
                    return [comm.births, await total(comm)]
            return []

        async def old(comm: Any) -> Any:
            assert await comm.follow_requests()
            assert comm.epoch == 0  # nothing was asked
            if comm.rank == 1:
                await comm.propose_size(3)
            found = await until_changed(comm)
            if comm.rank == 0:
                await comm.propose_replacement(1)
            return found + await until_changed(comm)

        async def new(birth: int) -> Any:
            comm: Any = await comms.join(birth)
            assert await total(comm) == 9.0
            return await until_changed(comm)

        said = await asyncio.gather(*map(old, list(comms)), new(5))
        assert said == [[(0, 1, 5), 9.0, (0, 5), 7.0], [(0, 1, 5), 9.0], [(0, 5), 7.0]]


@pytest.mark.parametrize("has_plan", [True, False])
@pytest.mark.asyncio
async def test_requests_are_carried_out_though_a_rank_dies_meanwhile(has_plan: bool) -> None:
    """At once if it died with the plan, which the others have too; else after they have shrunk."""
    async with world(3, elastic=True) as comms:
        if has_plan:
            die_at_the_agreement(comms, 2)
        else:
            comms.kill(2)

        async def main(comm: Any) -> Any:
            if comm.rank == 0:
                await comm.propose_size(1)
            epochs, stays = [comm.epoch], True
            while stays and comm.size > 1:
                try:
                    stays = await comm.follow_requests()
                except PeerLost:
                    await comm.shrink()
                epochs += [comm.epoch] * (comm.epoch != epochs[-1])
            return epochs, comm.births if stays else None

        said = await asyncio.gather(*map(main, list(comms)[: 2 + has_plan]), return_exceptions=True)
        assert list(map(type, said[2:])) == [Died] * has_plan
        first, second = ([0, 1], [0]) if has_plan else ([0, 1, 2], [0, 1])
        assert said[:2] == [(first, (0,)), (second, None)]


@pytest.mark.asyncio
async def test_requests_are_the_business_of_an_open_elastic() -> None:
    async with world(1, elastic=True) as comms:
        comm: Any = comms[0]
        async with Elastic(comm, State()):
            with pytest.raises(ConfigError, match="while an Elastic is open"):
                await comm.follow_requests()


def test_requests_without_a_loop() -> None:
    with sync_world(3, elastic=True) as comms:

        def main(comm: Any) -> Any:
            if comm.rank == 1:
                comm.propose_size(2)
            comm.barrier()
            while comm.size == 3:
                if not comm.follow_requests():
                    return None
            return comm.all_reduce(np.ones(1))[0]

        assert run_threads(list(comms), main) == [2.0, 2.0, None]


def test_without_a_loop() -> None:
    with sync_world(3, elastic=True) as comms:

        def main(comm: Any) -> Any:
            return comm.resize(2) and comm.all_reduce(np.ones(1))[0]

        assert run_threads(list(comms), main) == [2.0, 2.0, False]


LENGTH = 400


async def train(comm: Any) -> tuple[bool, set[float], tuple[int, ...]]:
    """Train one pass; whether this rank was released, how often samples were used, and who was there in the end."""
    state = State(used=np.zeros(LENGTH))
    async with Elastic(comm, state) as elastic:
        async for step in elastic.steps(ElasticSampler(LENGTH, 4), used_in="used"):
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            state.used += await comm.all_reduce(mask, "used")
    return elastic.is_released, set(state.used.tolist()), comm.births


@pytest.mark.parametrize(
    ("size", "leavers", "joiners", "left"),
    [
        (4, (2, 3), (), (0, 1)),
        (4, (0, 2), (5, 6), (1, 3, 5, 6)),
        (1, (0, 1), (), (2,)),
        (4, (0, 1, 2, 3), (), (0,)),
        (4, (0, 1, 2, 3), (7,), (7,)),
    ],
    ids=["of one host", "from one host to another", "and fewer", "all but who has the state", "until others have it"],
)
@pytest.mark.asyncio
async def test_replaced_rank_leaves(
    size: int, leavers: tuple[int, ...], joiners: tuple[int, ...], left: tuple[int, ...]
) -> None:
    async with world(4, elastic=True) as comms:
        comms.store.set_size(size, leavers)

        async def new(birth: int) -> Any:
            return await train(await comms.join(birth))

        members = {birth: asyncio.ensure_future(train(comms[birth])) for birth in range(4)}
        members |= {birth: asyncio.ensure_future(new(birth)) for birth in joiners}
        said = dict(zip(members, await asyncio.gather(*members.values()), strict=True))
        for birth, (is_released, used, births) in said.items():
            assert is_released == (birth not in left)
            if not is_released:
                assert (used, births) == ({1.0}, left)
