"""Algorithms that are kept while ranks join and die, whatever the program hands to the new ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import ConfigError, EpochChanged
from kfcomm.testing import world
from kfcomm.train import SMA, Agreement, Algorithm, ElasticAveraging, PairAveraging, SynchronousSGD, leaves
from tests.elastic.support import Died
from tests.train.reference import RATE, first_model, gradient

KINDS: dict[str, Algorithm] = {
    "ssgd": Algorithm("ssgd"),
    "sma": Algorithm("sma", alpha=0.2),
    "ea-sgd": Algorithm("ea-sgd", alpha=0.5, every=2),
    "local-sgd": Algorithm("local-sgd", every=3),
    "diloco": Algorithm("diloco", every=3),
    "local-adaalter": Algorithm("local-adaalter", every=3),
    "adasgd": Algorithm("adasgd", after=100),
    "pair-averaging": Algorithm("pair-averaging"),
}
JOINS_AT, ENDS_AFTER = 4, 8
"""Step in which a rank asks to join, and number of steps after it is there."""

Way = Callable[[int], Agreement]
"""Algorithm of each step."""


class Run:
    """A training of ranks on one loop; a rank of uid 9 joins.

    Attributes:
        states: of each rank at the end.
    """

    def __init__(self, comms: Any, make: Callable[[Any], tuple[dict[str, Any], Way]], **options: Any) -> None:
        self.comms, self.make, self.options = comms, make, options
        self.states: dict[int, State] = {}
        self.ways: dict[int, Way] = {}
        self.dies_at: int | None = None

    async def all(self) -> None:
        self.tasks = [asyncio.ensure_future(self.one(comm)) for comm in self.comms]
        while self.tasks:
            await self.tasks.pop()

    async def one(self, comm: Any) -> None:
        handed, way = self.make(comm)
        state = State(model=first_model(), number=0, since=0, **handed)
        uid = comm.births[comm.rank]
        self.states[uid], self.ways[uid] = state, way
        try:
            async with Elastic(comm, state, **self.options) as elastic:
                async for step in elastic.steps(ElasticSampler(1 << 12, 1)):
                    with step if self.options else contextlib.nullcontext():
                        await self.step(comm, state, way(state.number))
                        state.number += 1
                        state.since += 9 in comm.births
                    if state.since == ENDS_AFTER:
                        return
        except Died:
            del self.states[uid]

    async def step(self, comm: Any, state: State, way: Agreement) -> None:
        if comm.rank == 0 and state.number == JOINS_AT:
            self.tasks.append(asyncio.ensure_future(self.join()))
        if comm.births[comm.rank] == 1 and state.number == self.dies_at:
            self.comms.kill(1)
            raise Died
        pending = way.parameters(state.model)
        try:
            along = await way.gradients(gradient(state.model, state.number, comm.rank))
        except EpochChanged:
            with contextlib.suppress(EpochChanged):
                await pending
            raise
        state.model = await pending - RATE * along

    async def join(self) -> None:
        await self.one(await self.comms.join(9))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.asyncio
async def test_joining_rank_takes_over_what_the_program_does_not_hand_over(kind: str) -> None:
    def make(comm: Any) -> tuple[dict[str, Any], Way]:
        way = KINDS[kind].made(comm, first_model())
        return {}, lambda _: way

    async with world(2, elastic=True, timeout=60) as comms:
        run = Run(comms, make)
        await run.all()
        assert run.states.keys() == {0, 1, 9}
        said = {uid: way(0).state_dict() for uid, way in run.ways.items()}
        if kind == "pair-averaging":
            return
        assert {state["num_steps"] for state in said.values()} == {run.states[0].number}
        for key in said[0].keys() - run.ways[0](0).merging().keys():
            for name, x in leaves(said[0][key]).items():
                assert all(np.array_equal(x, leaves(state[key])[name]) for state in said.values()), key


@pytest.mark.parametrize("is_handed", [True, False])
@pytest.mark.parametrize("dies_at", [6, 7])
@pytest.mark.asyncio
async def test_switch_is_made_again_in_a_step_that_is_made_again(dies_at: int, is_handed: bool) -> None:
    """A rank dies in the step of the switch, or in the next: the models of before are back, and differ."""
    switches_at = 6

    def make(comm: Any) -> tuple[dict[str, Any], Way]:
        first, then = SMA(comm, 0.3), SynchronousSGD(comm)
        handed = {"first": first, "then": then} if is_handed else {}
        return handed, lambda number: first if number < switches_at else then

    async with world(3, elastic=True, timeout=60) as comms:
        run = Run(comms, make, on_loss="restart_step")
        run.dies_at = dies_at
        await run.all()
        models = [state.model for state in run.states.values()]
        assert run.states.keys() == {0, 2, 9}
        assert all(np.allclose(x, models[0], rtol=1e-13, atol=1e-13) for x in models)


@pytest.mark.asyncio
async def test_elastic_averaging_follows_the_number_of_ranks() -> None:
    async with world(4) as comms:
        with pytest.raises(ConfigError, match=r"alpha is above 0 and at most 0.25, not 0.4"):
            ElasticAveraging(comms[0], np.zeros(2), 0.4)
    async with world(4, elastic=True) as comms:
        with pytest.raises(ConfigError, match=r"alpha is above 0"):
            ElasticAveraging(comms[0], np.zeros(2), 1.4)
    async with world(4, elastic=True) as comms:
        ways = [ElasticAveraging(comm, np.zeros(2), 0.4) for comm in comms]

        async def main(way: Any, rank: int) -> Any:
            return await way.parameters(np.full(2, float(rank)))

        found = await asyncio.gather(*(main(way, rank) for rank, way in enumerate(ways)))
        assert np.array(found)[:, 0].tolist() == [0.0, 0.75, 1.5, 2.25]
        assert ways[0].center.tolist() == [1.5, 1.5]

        async def on(way: Any, comm: Any) -> Any:
            return await way.parameters(np.full(2, float(comm.rank))) if await comm.resize(2) else None

        found = await asyncio.gather(*(on(way, comm) for way, comm in zip(ways, comms, strict=True)))
        assert [one[0] for one in found[:2]] == pytest.approx([0.6, 1.2])
        assert ways[0].center[0] == pytest.approx(1.5 + 0.4 * (1 - 3))


@pytest.mark.asyncio
async def test_plain_communicator_of_survivors_is_assigned() -> None:
    async with world(3, timeout=60) as comms:

        async def main(comm: Any) -> Any:
            way, x = SMA(comm, 1.0), np.full(2, float(comm.rank))
            await way.parameters(x)
            if comm.rank == 2:
                comms.kill(2)
                return None
            way.comm = await comm.shrink()
            found = await way.parameters(x)
            then = SynchronousSGD(way.comm)
            return way.comm.size, found.tolist(), (await then.parameters(x)).tolist()

        said = await asyncio.gather(*map(main, comms))
        assert said[:2] == [(2, [0.5, 0.5], [0.5, 0.5])] * 2


@pytest.mark.parametrize("peers", ["random", "round-robin"])
@pytest.mark.asyncio
async def test_pairs_ask_the_ranks_that_are_there(peers: str) -> None:
    """One dies, one joins: each of the others is a peer, and the models stay near each other."""

    def make(comm: Any) -> tuple[dict[str, Any], Way]:
        way = PairAveraging(comm, first_model(), peers=peers)
        return {"way": way}, lambda _: way

    async with world(3, elastic=True, timeout=60) as comms:
        run = Run(comms, make)
        run.dies_at = 6
        await run.all()
        assert run.states.keys() == {0, 2, 9}
        models = [state.model for state in run.states.values()]
        assert np.max(np.ptp(models, axis=0)) < 2
