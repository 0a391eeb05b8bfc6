"""Policies in a program whose ranks die, join and are released: shared state is equal on all surviving ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm import sync
from kfcomm.adapt import Adaptation, AutoStrategy, AvoidSlowLinks, Context, Hyperparameters, Policy, replay
from kfcomm.adapt.recording import lines_of
from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, State
from kfcomm.errors import ConfigError, EpochChanged, KfcommError, PeerLost
from kfcomm.testing import MemoryWorld, run_ranks, run_threads, sync_world, world
from kfcomm.world.communicator import Communicator
from tests.elastic.support import Died

LENGTH, BATCH = 240, 12
GIVEN = Hyperparameters(batch_size=BATCH, learning_rate=0.1, agreements=("sma", "ssgd"))


class Wanders(Policy):
    """Asks for different things again and again, by its state and the metrics."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.known = 0

    def on_start(self, ctx: Context) -> None:
        self.known = -1  # what it knew has to come from another rank, or be begun anew everywhere

    def state_dict(self) -> Any:
        return {"known": self.known}

    def load_state_dict(self, state: Any) -> None:
        self.known = state["known"]

    async def after_step(self, ctx: Context) -> None:
        assert ctx.metrics is not None
        self.known += 1
        chance = Random(f"{self.seed} {self.known} {ctx.size} {ctx.metrics.mean('place')} {ctx.hyperparameters}")
        for _ in range(chance.randrange(3)):
            asks = [
                lambda: ctx.set_batch_size(ctx.size * chance.randrange(1, 6)),
                lambda: ctx.set_learning_rate(chance.random()),
                lambda: ctx.set_agreement(chance.choice(["sma", "ssgd"])),
                lambda: ctx.set_strategy(chance.choice(["ring", "star", "clique"])),
                lambda: ctx.together("count", _count),
            ]
            request: Any = chance.choice(asks)()
            if chance.random() < 0.6:
                await request


async def _count(comm: Communicator) -> int:
    return int(await comm.all_reduce(1, "count"))


class Forgets(Policy):
    """Knows only what came since the ranks last changed."""

    def on_start(self, ctx: Context) -> None:
        self.count = 0

    def after_step(self, ctx: Context) -> None:
        self.count += 1
        if self.count == 3:
            ctx.set_learning_rate(0.3)


class Rank:
    """One rank's way: what held in its steps, by number of the step."""

    def __init__(self, comm: Any, birth: int, seed: int, on_loss: str) -> None:
        self.comm = ElasticCommunicator(comm)
        self.birth = birth
        self.held: dict[int, Any] = {}
        self.decisions: list[Any] = []
        self.off: list[str] = []
        self._seed = seed
        self._on_loss = on_loss

    async def run(self) -> None:
        comm, policies = self.comm, [Wanders(self._seed), AutoStrategy(("ring", "star")), Forgets()]
        sampler = ElasticSampler(LENGTH, BATCH)
        state = State(used=np.zeros(LENGTH))
        async with (
            Elastic(comm, state, on_loss=self._on_loss) as elastic,
            Adaptation(comm, policies, hyperparameters=GIVEN) as adaptation,
        ):
            async for step in elastic.steps(sampler):
                with step if self._on_loss == "restart_step" else contextlib.suppress(EpochChanged, PeerLost):
                    async with adaptation.step():
                        self.held[step.number] = (
                            comm.births, adaptation.num_steps, adaptation.hyperparameters, comm.strategy.name,
                            policies[0].known, policies[2].count,
                        )  # fmt: skip
                        mask = np.zeros(LENGTH)
                        mask[step.indices] = 1
                        adaptation.observe(place=len(step.batch) + comm.rank / 10)
                        mask = await comm.all_reduce(mask, "used")
                        await comm.all_reduce(np.ones(3000), "more")
                    state.used += mask
                    assert adaptation.batch_size is not None
                    sampler.batch = adaptation.batch_size
        self.decisions = [(one.step, one.policy, one.what) for one in adaptation.decisions]
        self.off = [one for _, _, one in self.decisions if "switched off" in one]


class Stage:
    """A world of such ranks, and what befalls it."""

    def __init__(self, seed: int, on_loss: str) -> None:
        chance = Random(seed)
        size = chance.randrange(2, 5)
        self.seed = seed
        self.world = MemoryWorld(size, timeout=30.0)
        self.ranks: dict[int, Rank] = {}
        self.dead: set[int] = set()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._on_loss = on_loss
        for comm in list(self.world):
            self._enter(comm, comm.rank)
        victims = chance.sample(range(size), chance.randrange(size))
        others = [self._kill(victim, chance.randrange(1500)) for victim in victims]
        others += [self._join(size + more, chance.randrange(600)) for more in range(chance.randrange(3))]
        others += [self._ask(chance.randrange(1, 6), chance.randrange(1000)) for _ in range(chance.randrange(2))]
        self.others = [asyncio.create_task(one) for one in others]

    def _enter(self, comm: Any, birth: int) -> None:
        self.ranks[birth] = one = Rank(comm, birth, self.seed, self._on_loss)
        self.tasks[birth] = asyncio.create_task(one.run())

    async def _after(self, turns: int) -> bool:
        for _ in range(turns):
            await asyncio.sleep(0)
        return not any(task.done() for birth, task in self.tasks.items() if birth not in self.dead)

    async def _kill(self, victim: int, turns: int) -> None:
        if await self._after(turns) and self.ranks[victim].comm.size > 1:
            self.dead.add(victim)
            self.world.kill(victim)
            self.tasks[victim].cancel()

    async def _join(self, birth: int, turns: int) -> None:
        if await self._after(turns):
            self._enter(await self.world.join(birth), birth)

    async def _ask(self, size: int, turns: int) -> None:
        if await self._after(turns):
            await self.world[0]._session.network.membership.want_size(size)

    async def run(self) -> list[Rank]:
        try:
            waited: set[int] = set()
            while left := set(self.tasks) - waited:
                birth = min(left)
                waited.add(birth)
                try:
                    await asyncio.wait_for(asyncio.shield(self.tasks[birth]), 60)
                except asyncio.CancelledError:
                    assert birth in self.dead
                except (KfcommError, TimeoutError) as error:
                    if birth not in self.dead:
                        raise AssertionError(f"seed {self.seed}: rank {birth} ended with {error!r}") from error
        finally:
            tasks = [*self.others, *self.tasks.values()]
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for one in self.ranks.values():
                with contextlib.suppress(Exception):
                    await one.comm.end()
            await self.world.close()
        # an event may come too late for this world; any other error would mean that none of its kind happens
        for error in ends[: len(self.others)]:
            if isinstance(error, Exception) and not isinstance(error, KfcommError):
                raise error
        return [one for birth, one in self.ranks.items() if birth not in self.dead]


@pytest.mark.parametrize("on_loss", ["finish", "raise", "restart_step"])
@pytest.mark.parametrize("first", range(0, 12, 4))
@pytest.mark.asyncio
async def test_shared_state_is_equal_on_all_surviving_ranks(
    first: int, on_loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for seed in range(first, first + 4):
        await one_story(seed, on_loss)


async def one_story(seed: int, on_loss: str) -> int:
    """A run of a seed, compared; how often the ranks were others."""
    living = await Stage(seed, on_loss).run()
    by_step: dict[int, Any] = {}
    for one in living:
        assert not one.off, f"seed {seed}: {one.off}"
        for number, held in one.held.items():
            assert by_step.setdefault(number, held) == held, f"seed {seed}, step {number}, rank {one.birth}"
    return len({held[0] for held in by_step.values()})


@pytest.mark.asyncio
async def test_joining_rank_receives_the_state_of_the_policies() -> None:
    class Counts(Policy):
        def on_start(self, ctx: Context) -> None:
            self.sizes = getattr(self, "sizes", [])
            self.sizes.append(ctx.size)
            self.steps: list[int] = []

        def after_step(self, ctx: Context) -> None:
            self.steps.append(ctx.step)
            if ctx.step == 1:
                ctx.set_batch_size(24)

        def state_dict(self) -> Any:
            return self.steps

        def load_state_dict(self, state: Any) -> None:
            self.steps = list(state)

    async with world(2, elastic=True) as comms:
        may_come = asyncio.Event()

        async def main(comm: Any, is_new: bool = False) -> Any:
            policy, sampler = Counts(), ElasticSampler(BATCH << 20, BATCH)
            given = Hyperparameters(batch_size=BATCH)
            async with (
                Elastic(comm, State()) as elastic,
                Adaptation(comm, [policy], hyperparameters=given) as adaptation,
            ):
                seen: list[Any] = []
                async for step in elastic.steps(sampler):
                    async with adaptation.step():
                        seen.append((adaptation.num_steps, len(step.batch), adaptation.local_batch_size))
                        await comm.barrier()
                        if step.number == 3:
                            may_come.set()
                    sampler.batch = adaptation.batch_size or 0
                    if len(seen) > 1 and seen[-2][-1] == 8:
                        break
            return seen, policy.steps, policy.sizes

        async def new() -> Any:
            await may_come.wait()
            return await main(await comms.join(7), True)

        one, other, joined = await asyncio.gather(*map(main, list(comms)), new())
        assert one == other
        # Training continues while the epoch of the joining rank is prepared.
        joined_at = len(one[0]) - 2
        assert joined_at > 3
        assert one[0][:3] == [(0, 12, 6), (1, 12, 6), (2, 12, 6)]
        assert one[0][3:joined_at] == [(step, 24, 12) for step in range(3, joined_at)]
        assert one[0][joined_at:] == joined[0] == [(joined_at, 24, 8), (joined_at + 1, 24, 8)]
        assert joined[1] == one[1] == list(range(joined_at + 2))
        assert one[2] == [2, 3]
        assert joined[2] == [3]


@pytest.mark.asyncio
async def test_a_policy_asks_for_fewer_and_for_more_ranks(tmp_path: Path) -> None:
    class Resizes(Policy):
        async def after_step(self, ctx: Context) -> None:
            if ctx.step == 1:
                assert await ctx.resize(2, because=1.5)
            if ctx.step == 4:
                await ctx.resize(3)

    async with world(3, elastic=True) as comms:
        may_come = asyncio.Event()

        async def main(comm: Any) -> Any:
            sizes: list[int] = []
            async with Elastic(comm, State()) as elastic:
                record = tmp_path / "run.jsonl"
                async with Adaptation(comm, [Resizes()], record=record) as adaptation:
                    async for step in elastic.steps(ElasticSampler(1 << 20, 1)):
                        async with adaptation.step():
                            sizes.append(comm.size)
                            await comm.barrier()
                            if step.number == 4:
                                may_come.set()
                        if step.number > 4 and sizes[-2:] == [3, 3]:
                            break
            return sizes, [(one.step, one.what) for one in adaptation.decisions], elastic.is_released

        async def new() -> Any:
            await may_come.wait()
            return await main(await comms.join(9))

        first, second, last, joined = await asyncio.gather(*map(main, list(comms)), new())
        # What is asked for after step k is agreed on after step k + 1. Ranks leave after step k + 2; others join when
        # their epoch is prepared.
        assert first == second
        sizes, decisions, is_released = first
        assert sizes == [3, 3, 3, 3, *[2] * (len(sizes) - 6), 3, 3]
        assert len(sizes) >= 8
        assert decisions == [(2, "asks for 2 ranks instead of 3"), (5, "asks for 3 ranks instead of 2")]
        assert not is_released
        assert last == ([3, 3, 3, 3], first[1][:1], True)
        assert joined == ([3, 3], [], False)
    found = await asyncio.to_thread(replay, Resizes(), tmp_path / "run.jsonl")
    assert [(one.step, one.what) for one in found] == first[1]
    assert [line["begins"] for line in lines_of(tmp_path / "run.jsonl") if "format" in line] == [
        0,
        4,
        len(first[0]) - 2,
    ]


@pytest.mark.asyncio
async def test_a_size_that_the_job_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class TooMany(Policy):
        caught = 0

        async def after_step(self, ctx: Context) -> None:
            if ctx.step == 0:
                with pytest.raises(ConfigError, match=r"outside the job's range 2\.\.4"):
                    await ctx.resize(9)
                TooMany.caught += 1
                ctx.resize(9)

    async def refuse(self: Any, size: int) -> None:
        raise ConfigError(f"size {size} is outside the job's range 2..4")

    monkeypatch.setattr(ElasticCommunicator, "propose_size", refuse)
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            async with Elastic(comm, State()) as elastic, Adaptation(comm, [TooMany()]) as adaptation:
                async for _ in elastic.steps(ElasticSampler(5, 1)):
                    async with adaptation.step():
                        await comm.barrier()
            return [one.what for one in adaptation.decisions]

        outcomes = await run_ranks(comms, main)
    what = "size 9 is outside the job's range 2..4"
    assert TooMany.caught == 2
    assert outcomes == [[f"switched off: it raised on every rank: ConfigError in its request: {what}"]] * 2


@pytest.mark.asyncio
async def test_unsendable_policy_state_switches_it_off_everywhere() -> None:
    class Odd(Policy):
        def state_dict(self) -> Any:
            return {1, 2}

    class Shy(Policy):
        def state_dict(self) -> Any:
            return 3

        def load_state_dict(self, state: Any) -> None:
            raise ValueError("oops")

    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            policies = [Odd(), Shy(), AutoStrategy(("ring",)), AvoidSlowLinks()]
            with contextlib.suppress(Died):
                async with Elastic(comm, State()) as elastic, Adaptation(comm, policies) as adaptation:
                    async for step in elastic.steps(ElasticSampler(6, 1)):
                        async with adaptation.step():
                            if step.number == 1 and comm.rank == 2:
                                comms.kill(2)
                                raise Died
                            await comm.barrier()
            return adaptation.policies == tuple(policies[2:]), [one.what for one in adaptation.decisions[-2:]]

        outcomes = await run_ranks(comms, main)
        assert outcomes[0] == outcomes[1]
        stays, (odd, shy) = outcomes[0]
        assert stays
        assert "switched off: it raised on every rank: ConfigError in state_dict: " in odd
        assert shy == "switched off: it raised on every rank: ValueError in load_state_dict: oops"


@pytest.mark.asyncio
async def test_without_an_open_elastic_it_ends_with_its_ranks() -> None:
    async with world(3, elastic=True) as comms:

        async def main(comm: Any) -> None:
            async with Adaptation(comm, []) as adaptation:
                async with adaptation.step():
                    await comm.barrier()
                if not await comm.resize(2):
                    return
                with pytest.raises(ConfigError, match="only inside an open Elastic: make another"):
                    async with adaptation.step():
                        raise AssertionError

        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_an_elastic_that_is_opened_after_it() -> None:
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> None:
            async with Adaptation(comm, []) as adaptation, Elastic(comm, State()) as elastic:
                async for _ in elastic.steps(ElasticSampler(2, 1)):
                    with pytest.raises(ConfigError, match="open the Elastic before the Adaptation"):
                        async with adaptation.step():
                            raise AssertionError

        await run_ranks(comms, main)


def test_a_blocking_program_loses_a_rank() -> None:
    class Grows(Policy):
        def after_step(self, ctx: Context) -> None:
            if ctx.size == 2 and ctx.hyperparameters.batch_size == 12:
                ctx.set_batch_size(24)

    with sync_world(3, elastic=True) as comms:

        def main(comm: Any) -> Any:
            given, seen, sampler = Hyperparameters(batch_size=12), [], ElasticSampler(96, 12)
            with (
                contextlib.suppress(Died),
                sync.Elastic(comm, State()) as elastic,
                sync.Adaptation(comm, [Grows()], hyperparameters=given) as adaptation,
            ):
                for step in elastic.steps(sampler):
                    with adaptation.step():
                        if step.number == 1 and comm.rank == 2:
                            comms.kill(2)
                            raise Died
                        comm.all_reduce(np.ones(3))
                        seen.append((comm.size, len(step.batch)))
                    sampler.batch = adaptation.batch_size
            return seen

        first, second, last = run_threads(list(comms), main)
        assert first == second
        assert last == [(3, 12)]
        assert first[:4] == [(3, 12), (3, 12), (2, 12), (2, 12)]
        assert first[4] == (2, 24)
