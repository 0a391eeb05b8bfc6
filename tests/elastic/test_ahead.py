"""Epochs that are prepared while training continues, and what happens to them when ranks die or requests change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State, ahead, entering
from kfcomm.testing import world
from kfcomm.testing.network import _RankNetwork
from kfcomm.world.prepared import PreparedEpoch

LENGTH = 400


class Job:
    """Two ranks that train until a third has taken part in ten steps, and what is done in between."""

    def __init__(self, comms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.comms = comms
        self.while_prepared: Callable[[Any, Any], None] = lambda _comm, _step: None
        self.lets_in = asyncio.Event()
        self.prepared: list[PreparedEpoch] = []
        self.begun: list[Any] = []  # communicators of prepared epochs that have begun
        self.joined: dict[int, asyncio.Task[Any]] = {}
        self.sizes: list[int] = []  # of the steps of rank 0
        plain, taken = entering.set_up, ahead.Preparation.taken

        async def set_up(comm: Any, num_old: int) -> bool:
            await self.lets_in.wait()
            return await plain(comm, num_old)

        async def noted(preparation: Any, *args: Any) -> Any:
            found = await taken(preparation, *args)
            if found is not None:
                self.begun.append(found)
            return found

        monkeypatch.setattr(entering, "set_up", set_up)
        monkeypatch.setattr(ahead, "set_up", set_up)
        monkeypatch.setattr(ahead.Preparation, "taken", noted)

    def join(self, birth: int) -> None:
        async def joined() -> Any:
            return await self.main(await self.comms.join(birth))

        self.joined[birth] = asyncio.create_task(joined())

    async def main(self, comm: Any) -> Any:
        me, common = comm.births[comm.rank], 0
        state = State(w=np.full(2, float(me)), used=np.zeros(LENGTH), count=0)
        async with Elastic(comm, state) as elastic:
            async for step in elastic.steps(ElasticSampler(LENGTH, 4, seed=None), used_in="used"):
                preparation: Any = elastic._walks._preparation  # type: ignore[union-attr]
                if comm.rank == 0:
                    self.sizes.append(comm.size)
                    if step.number == 3:
                        self.join(2)
                if preparation._epoch is not None:
                    self.prepared.append(preparation._epoch)
                    self.while_prepared(comm, step)
                mask = np.zeros(LENGTH)
                mask[step.indices] = 1
                state.used += await comm.all_reduce(mask, name="used")
                state.w += 1
                state.count += 1
                common += comm.births == (0, 1, 2)
                if (await comm.all_reduce(np.array([common]), name="common", op="max"))[0] == 10:
                    break
                await asyncio.sleep(0.001)
        return elastic.is_released, comm.births, state.w.tolist(), state.count, sorted(set(state.used.tolist()))

    async def run(self, *, killed: int | None = None) -> dict[int, Any]:
        """Results by uid, without that of a rank that is killed."""
        old = {birth: asyncio.create_task(self.main(comm)) for birth, comm in enumerate(list(self.comms))}
        ranks = {**old, **self.joined}
        if killed in old:
            del ranks[killed]
        found = {birth: await task for birth, task in ranks.items()}
        for birth, task in self.joined.items():
            if birth != killed:
                found[birth] = await task
        for task in (*old.values(), *self.joined.values()):
            task.cancel()
        await asyncio.gather(*old.values(), *self.joined.values(), return_exceptions=True)
        return found


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.asyncio
async def test_training_continues_while_the_next_epoch_is_prepared(transport: Any, monkeypatch: Any) -> None:
    async with world(2, elastic=True, transport=transport) as comms:
        job = Job(comms, monkeypatch)

        def later(comm: Any, step: Any) -> None:
            if comm.rank == 0 and job.sizes.count(2) == 30:
                job.lets_in.set()

        job.while_prepared = later
        found = await job.run()
        count = len(job.sizes)
        assert job.sizes.count(2) >= 30
        assert job.sizes.count(3) == 10
        assert found == {birth: (False, (0, 1, 2), [float(count)] * 2, count, [0.0, 1.0]) for birth in range(3)}
        # The epoch that was prepared is the one that has begun.
        assert len(job.begun) == 2
        assert {comms[0].current, comms[1].current} == {one.comm for one in job.begun}


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.asyncio
async def test_joining_rank_learns_from_the_others_that_the_epoch_has_begun(transport: Any, monkeypatch: Any) -> None:
    """The store never tells it that it was admitted."""
    asked: list[int] = []

    async def silent(network: Any) -> None:
        asked.append(network.births[network._rank])
        await asyncio.Event().wait()

    monkeypatch.setattr(_RankNetwork, "admission", silent)
    async with world(2, elastic=True, transport=transport) as comms:
        job = Job(comms, monkeypatch)
        job.lets_in.set()
        found = await asyncio.wait_for(job.run(), 60)
        assert asked == [2]
        assert job.sizes.count(3) == 10
        count = len(job.sizes)
        assert found == {birth: (False, (0, 1, 2), [float(count)] * 2, count, [0.0, 1.0]) for birth in range(3)}
        assert len(job.begun) == 2


@pytest.mark.parametrize("killed", [0, 1, 2])
@pytest.mark.asyncio
async def test_a_rank_that_dies_meanwhile_ends_the_preparation(killed: int, monkeypatch: Any) -> None:
    async with world(3 if killed < 2 else 2, elastic=True) as comms:
        job = Job(comms, monkeypatch)
        if killed < 2:
            job.join = _joined_as(job, 3)  # type: ignore[method-assign]
        is_dead = False

        def kill(comm: Any, step: Any) -> None:
            nonlocal is_dead
            if not is_dead and step.number >= 8:
                is_dead = True
                comms.kill(killed)
                job.lets_in.set()

        job.while_prepared = kill
        newcomer = 3 if killed < 2 else 2
        survivors = tuple(one for one in range(newcomer + (newcomer == 3)) if one != killed)
        found = await asyncio.wait_for(_until(job, survivors, killed), 60)
        assert is_dead
        counts = {row[3] for row in found.values()}
        assert len(counts) == 1
        assert {row[1] for row in found.values()} == {survivors}


def _joined_as(job: Job, birth: int) -> Callable[[int], None]:
    plain = job.join
    return lambda _: plain(birth)


async def _until(job: Job, survivors: tuple[int, ...], killed: int) -> dict[int, Any]:
    """Run the job with an end that suits these ranks."""

    async def main(comm: Any) -> Any:
        me, common = comm.births[comm.rank], 0
        state = State(w=np.full(2, float(me)), count=0)
        async with Elastic(comm, state) as elastic:
            async for step in elastic.steps(ElasticSampler(LENGTH, 1, seed=None), passes=1 << 30):
                if comm.rank == 0 and step.number == 3 and not job.joined:
                    job.join(2)
                preparation: Any = elastic._walks._preparation  # type: ignore[union-attr]
                if preparation._epoch is not None:
                    job.while_prepared(comm, step)
                state.w += 1
                state.count += 1
                common += comm.births == survivors and step.number > 20
                if (await comm.all_reduce(np.array([common]), name="common", op="max"))[0] == 10:
                    break
                await asyncio.sleep(0.001)
        return elastic.is_released, comm.births, state.w.tolist(), state.count

    job.main = main  # type: ignore[method-assign]
    return await job.run(killed=killed)


@pytest.mark.asyncio
async def test_joining_rank_that_is_not_ready_in_time_joins_as_without_preparation(monkeypatch: Any) -> None:
    monkeypatch.setattr(ahead, "READY_WITHIN_S", 0.05)
    async with world(2, elastic=True) as comms:
        job = Job(comms, monkeypatch)
        found = await job.run()
        assert job.prepared
        assert not job.begun
        assert {row[:2] for row in found.values()} == {(False, (0, 1, 2))}
        assert {row[3] for row in found.values()} == {len(job.sizes)}


@pytest.mark.asyncio
async def test_rank_that_is_released_with_a_preparation_under_way(monkeypatch: Any) -> None:
    """The request to replace rank 1 comes after the epoch of ranks 0, 1 and 2 was prepared."""
    async with world(2, elastic=True) as comms:
        job = Job(comms, monkeypatch)

        def replace(comm: Any, step: Any) -> None:
            if comm.rank == 0 and not job.lets_in.is_set():
                job.lets_in.set()
                comms.store.set_size(-1, (1,))

        job.while_prepared = replace
        main = job.main

        async def bounded(comm: Any) -> Any:
            state = State(count=0)
            async with Elastic(comm, state) as elastic:
                async for step in elastic.steps(ElasticSampler(LENGTH, 1, seed=None)):
                    if comm.rank == 0 and step.number == 3:
                        job.join(2)
                    preparation: Any = elastic._walks._preparation  # type: ignore[union-attr]
                    if preparation._epoch is not None:
                        job.while_prepared(comm, step)
                    state.count += 1
                    await comm.barrier()
                    await asyncio.sleep(0.001)
            return elastic.is_released, comm.births, state.count

        assert main is not None
        job.main = bounded  # type: ignore[method-assign]
        found = await asyncio.wait_for(job.run(), 60)
        assert found[0] == (False, (0, 2), LENGTH)
        assert found[1][0]
        assert found[2] == (False, (0, 2), LENGTH)


@pytest.mark.asyncio
async def test_loop_that_ends_before_the_epoch_begins_leaves_nothing(monkeypatch: Any) -> None:
    async with world(2, elastic=True) as comms:
        job = Job(comms, monkeypatch)
        monkeypatch.setattr(job, "while_prepared", lambda _comm, _step: None)

        async def short(comm: Any) -> Any:
            async with Elastic(comm, State(count=0)) as elastic:
                seen = 0
                async for step in elastic.steps(ElasticSampler(LENGTH, 1, seed=None)):
                    if comm.rank == 0 and step.number == 3:
                        job.join(2)
                    preparation: Any = elastic._walks._preparation  # type: ignore[union-attr]
                    seen += preparation._epoch is not None
                    if (await comm.all_reduce(np.array([seen]), name="seen", op="max"))[0] == 5:
                        break
                    await asyncio.sleep(0.001)
            return comm.births

        found = await asyncio.gather(*map(short, list(comms)))
        assert found == [(0, 1)] * 2
        assert not job.joined[2].done()
        job.joined[2].cancel()
        await asyncio.gather(*job.joined.values(), return_exceptions=True)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.asyncio
async def test_ranks_join_loops_with_few_steps_a_pass(num_steps: int) -> None:
    """Most of their boundaries are ends of passes."""
    async with world(1, elastic=True) as comms:
        joined: list[asyncio.Task[Any]] = []

        async def main(comm: Any) -> tuple[int, int]:
            state, most = State(count=0, passes=0), 0
            async with Elastic(comm, state) as elastic:
                sampler = ElasticSampler(4 * num_steps, 4, seed=None)
                async for step in elastic.steps(sampler, passes=10_000):
                    if step.number == 3 and not joined:
                        joined.append(asyncio.create_task(other()))
                    most += comm.size == 2
                    state.count += 1
                    state.passes = sampler.passes
                    if (await comm.all_reduce(np.array([most]), name="most", op="max"))[0] == 10:
                        break
                    await asyncio.sleep(0.001)
            return comm.size, state.count - num_steps * state.passes

        async def other() -> Any:
            return await main(await comms.join(1))

        size, rest = await asyncio.wait_for(main(comms[0]), 60)
        assert (size, await joined[0]) == (2, (2, rest))
        assert 0 < rest <= num_steps
