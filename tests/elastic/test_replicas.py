"""Copies of what is a rank's own: who holds them, what deaths at any place of a commit leave, and who inherits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.dispatcher import Dispatcher
from kfcomm.elastic.replicas import Replicas
from kfcomm.errors import ConfigError, EpochChanged
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from tests.elastic.support import Died, die

Body = Callable[[Any, Any, State], Awaitable[Any]]


def own_of(birth: int) -> State:
    """Each rank's has other shapes."""
    return State(m=np.full((2, birth + 1), 10.0 * birth), few={"v": [np.zeros(birth, np.float32), "text"]}, steps=0)


async def train(comms: Any, body: Callable[..., Awaitable[Any]], *, steps: int = 4, **options: Any) -> list[Any]:
    """Results of ``body(elastic, comm, own, number)`` in the steps of each rank; None for a dead rank."""

    async def main(comm: Any) -> Any:
        own, found = own_of(comm.rank), []
        try:
            async with Elastic(comm, State(), own=own, **options) as elastic:
                async for step in elastic.steps(ElasticSampler(4 * steps, 4, seed=None)):
                    own.m += 1
                    own.steps += 1
                    found.append(await body(elastic, comm, own, step.number))
        except Died:
            return None
        return found

    return await run_ranks(comms, main)


def seen(elastic: Any) -> Any:
    """Heirs, and of the inherited states, by uid, the value of all elements and the number of steps."""
    return elastic.heirs, {birth: (one["m"][0, 0], one["steps"]) for birth, one in elastic.inherited.items()}


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.asyncio
async def test_the_next_rank_inherits_what_was_committed(transport: Any) -> None:
    async with world(4, elastic=True, transport=transport) as comms:

        async def body(elastic: Any, comm: Any, own: State, number: int) -> Any:
            complete = await elastic.commit() if number in (0, 3) else None
            if comm.births[comm.rank] == 3 and number == 1:
                die(comms, comm)
            if number == 2 and comm.births[comm.rank] == 0:
                (values,) = elastic.inherited.values()
                assert values["m"].shape == (2, 4)
                assert values["few"]["v"][0].dtype == np.float32
                assert values["few"]["v"][1] == "text"
            await comm.barrier()
            return complete, *seen(elastic)

        found = await train(comms, body)
        heirs: dict[int, int] = {3: 0}
        kept = [(True, {}, {}), (None, {}, {}), (None, heirs, {}), (True, {}, {}), (None, {}, {})]
        first = [*kept[:2], (None, heirs, {3: (31.0, 1)}), *kept[3:]]
        assert found == [first, kept, kept, None]


@pytest.mark.parametrize(("copies", "lost"), [(2, {1, 2}), (1, {1, 2}), (7, {0, 1, 2})])
@pytest.mark.asyncio
async def test_as_many_may_die_at_once_as_there_are_copies(copies: int, lost: set[int]) -> None:
    async with world(5, elastic=True) as comms:

        async def body(elastic: Any, comm: Any, own: State, number: int) -> Any:
            if number == 0:
                assert await elastic.commit()
            if number == 1 and comm.births[comm.rank] in lost:
                die(comms, comm)
            await comm.barrier()
            return seen(elastic)

        found = await train(comms, body, copies=copies)
        heirs = {1: 3 if copies > 1 else None, 2: 3} | ({0: 3} if 0 in lost else {})
        assert [one and one[-1][0] for one in found] == [None if birth in lost else heirs for birth in range(5)]
        inherited = {birth: (10.0 * birth + 1, 1) for birth, heir in heirs.items() if heir == 3}
        assert found[3][-1][1] == inherited
        assert found[4][-1][1] == {}


@pytest.mark.asyncio
async def test_the_next_holder_inherits_from_an_heir_that_dies() -> None:
    async with world(4, elastic=True) as comms:

        async def body(elastic: Any, comm: Any, own: State, number: int) -> Any:
            if number == 0:
                assert await elastic.commit()
            if number == comm.births[comm.rank] in (1, 2):
                die(comms, comm)
            await comm.barrier()
            return seen(elastic)

        found = await train(comms, body, copies=2)
        assert found[1] is found[2] is None
        assert [one[0] for one in found[0]][:4] == [{}, {}, {1: 2}, {1: 3, 2: 3}]
        assert found[3][-1][1] == {1: (11.0, 1), 2: (21.0, 1)}


PLACES = ["before", "told", "sent", "after"]


def dying(monkeypatch: pytest.MonkeyPatch, comms: Any, place: str) -> None:
    """Rank 2 is killed at this place of its second commit."""
    gathered, exchanged, begun = Dispatcher.gather, Replicas._exchanged, []

    async def gather(self: Dispatcher, value: Any, about: str) -> Any:
        here = self.log.comm
        if is_mine := here.births[here.rank] == 2 and about.startswith("commit"):
            begun.append(about)
        if is_mine and (place, begun.count(about)) == ({"commit": "before", "committed": "sent"}[about], 2):
            die(comms, here)
        found = await gathered(self, value, about)
        if is_mine and (place, about, begun.count(about)) == ("after", "committed", 2):
            die(comms, here)
        return found

    async def exchange(self: Replicas, *args: Any) -> Any:
        if self._comm.births[self._comm.rank] == 2 and (place, begun.count("commit")) == ("told", 2):
            die(comms, self._comm)
        return await exchanged(self, *args)

    monkeypatch.setattr(Dispatcher, "gather", gather)
    monkeypatch.setattr(Replicas, "_exchanged", exchange)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.asyncio
async def test_commit_during_a_death_is_complete_or_dropped(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    async with world(3, elastic=True) as comms:
        dying(monkeypatch, comms, place)

        async def body(elastic: Any, comm: Any, own: State, number: int) -> Any:
            complete = await elastic.commit() if number < 2 else None
            if number == 1:
                before = own.m.copy()
                elastic.restore()
                assert (own.steps, own.m[0, 0]) == ((2, before[0, 0]) if complete else (1, before[0, 0] - 1))
            await comm.barrier()
            return complete, *seen(elastic)

        first, second, third = await train(comms, body)
        assert third is None
        assert [one[0] for one in first] == [one[0] for one in second]
        is_complete = first[1][0]
        # before it had told what it has, the others commit among themselves; and a copy that was sent counts
        assert is_complete is {"before": True, "told": False, "sent": True, "after": True}[place]
        if place == "before":
            assert first[-1][1:] == second[-1][1:] == ({}, {})
        else:
            assert second[-1][1:] == ({2: 0}, {})
            assert first[-1][1:] == ({2: 0}, {2: (22.0, 2) if is_complete else (21.0, 1)})


@pytest.mark.asyncio
async def test_a_copy_that_came_damaged_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(2, elastic=True) as comms:
        exchanged = Replicas._exchanged

        async def exchange(self: Any, mine: Any, offers: Any) -> Any:
            wrong = [(form, right + (self._last is not None)) for form, right in offers]
            return await exchanged(self, mine, wrong)

        monkeypatch.setattr(Replicas, "_exchanged", exchange)

        async def body(elastic: Any, comm: Any, own: State, number: int) -> Any:
            complete = await elastic.commit()
            elastic.restore()
            return complete, own.steps

        assert await train(comms, body, steps=2) == [[(True, 1), (False, 1)]] * 2


@pytest.mark.asyncio
async def test_joining_ranks_take_part_in_the_next_commit() -> None:
    async with world(2, elastic=True) as comms:
        comers: list[asyncio.Task[Any]] = []

        async def main(comm: Any) -> Any:
            own, sizes = own_of(comm.births[comm.rank]), []
            async with Elastic(comm, State(), own=own) as elastic:
                async for step in elastic.steps(ElasticSampler(60, 4)):
                    assert elastic.heirs == {}
                    assert await elastic.commit()
                    assert elastic._replicas is not None
                    assert elastic._replicas._last is not None
                    sizes.append(sorted(elastic._replicas._last.copies))
                    if step.number == 1 and comm.rank == 0:
                        comers.append(asyncio.create_task(join()))
                    await asyncio.sleep(0.001)
            return sizes[-1]

        async def join() -> Any:
            return await main(await comms.join(5))

        assert await run_ranks(list(comms), main) == [[0, 5], [0, 1]]
        assert await comers[0] == [1, 5]


@pytest.mark.asyncio
async def test_a_step_that_runs_again_begins_with_the_own_that_it_had() -> None:
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            own = State(x=np.zeros(2))
            try:
                async with Elastic(comm, State(), own=own, on_loss="restart_step") as elastic:
                    async for step in elastic.steps(ElasticSampler(12, 4)):
                        with step:
                            own.x += 1
                            if step.number == 1 and comm.births[comm.rank] == 0:
                                die(comms, comm)
                            await comm.all_reduce(np.ones(1), "x")
            except (Died, EpochChanged):
                return None
            return own.x.tolist()

        assert await run_ranks(comms, main) == [None, [3.0, 3.0], [3.0, 3.0]]


@pytest.mark.asyncio
async def test_invalid_uses_of_commit_are_refused() -> None:
    async with world(1, elastic=True) as comms:
        comm = comms[0]
        with pytest.raises(ConfigError, match=r"own is a kfcomm\.elastic\.State, not dict"):
            Elastic(comm, State(), own={})
        for copies in (0, True, "1"):
            with pytest.raises(ConfigError, match="copies is a number of ranks from 1 on"):
                Elastic(comm, State(), own=State(), copies=copies)
        async with Elastic(comm, State()) as elastic:
            assert (elastic.heirs, elastic.inherited) == ({}, {})
            with pytest.raises(ConfigError, match=r"give Elastic\(\.\.\., own=State"):
                await elastic.commit()
        own = State(x=np.zeros(2))
        elastic = Elastic(comm, State(), own=own)
        with pytest.raises(ConfigError, match="with block"):
            elastic.restore()
        async with elastic:
            with pytest.raises(ConfigError, match="no commit is complete"):
                elastic.restore()
            assert await elastic.commit()
            own.x[:] = 1
            elastic.restore()
            assert (own.x == 0).all()
            own.x = np.zeros(3)
            with pytest.raises(ConfigError, match="other shapes than at the last commit"):
                elastic.restore()


def test_without_a_loop() -> None:
    with sync_world(2, elastic=True) as comms:

        def main(comm: Any) -> Any:
            own = State(x=np.full(3, comm.rank))
            with Elastic(comm, State(), own=own) as elastic:
                complete = elastic.commit()
                own.x[:] = 7
                elastic.restore()
                return complete, own.x.tolist(), elastic.heirs, elastic.inherited

        assert run_threads(list(comms), main) == [(True, [0] * 3, {}, {}), (True, [1] * 3, {}, {})]
