"""Stragglers are replaced: who is found, when another is asked for, and that a real world of ranks does it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Adaptation, Context, Policy, Reading, ReplaceStragglers, replay
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world
from tests.adapt.scripted import adapted

LENGTH = 60


class Meter:
    """The own seconds of each rank follow from its uid, without a clock."""

    def __init__(self, comm: Any, own_s: dict[int, float]) -> None:
        self._comm = comm
        self._own_s = own_s
        self._num_reads = 0
        self._seconds = self._busy_s = 0.0

    def read(self) -> Reading:
        self._num_reads += 1
        if self._num_reads % 2 == 0:
            own_s = self._own_s.get(self._comm.births[self._comm.rank], 1.0)
            self._seconds += 5.0
            self._busy_s += 5.0 - own_s
        return Reading(self._seconds, self._busy_s, 0, 0, (0.0,) * self._comm.size)


async def train(comm: Any, policies: list[Policy], own_s: dict[int, float], record: Path | None = None) -> Any:
    """Ranks of each step, decisions with their evidence, and whether this rank was released."""
    state, births = State(used=np.zeros(LENGTH)), []
    async with (
        Elastic(comm, state) as elastic,
        Adaptation(comm, policies, meter=Meter(comm, own_s), record=record) as adaptation,
    ):
        async for step in elastic.steps(ElasticSampler(LENGTH, 3), used_in="used"):
            births.append(comm.births)
            async with adaptation.step():
                mask = np.zeros(LENGTH)
                mask[step.indices] = 1
                state.used += await comm.all_reduce(mask, "used")
    if not elastic.is_released:
        assert set(state.used.tolist()) == {1.0}, "each sample once"
    return births, adaptation.decisions, elastic.is_released


@pytest.mark.asyncio
async def test_a_straggler_goes_and_another_comes_in_its_place(tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    own_s = {1: 4.0}
    async with world(3, elastic=True) as comms:

        async def new() -> Any:
            return await train(await comms.join(7), [ReplaceStragglers(patience=4)], own_s)

        members = [
            train(comm, [ReplaceStragglers(patience=4)], own_s, record if comm.rank == 0 else None) for comm in comms
        ]
        comms.store.set_size(3)  # the newcomer is a spare, until somebody goes
        first, slow, last, joined = await asyncio.gather(*members, new())
    births, decisions, _ = first
    (asked,) = decisions
    assert (asked.policy, asked.what) == ("ReplaceStragglers", "asks for another in place of rank 1")
    assert asked.evidence == {
        "steps_s": 0.25, "median": 1.0, "threshold": 0.8, "slow_in_steps": 4,
    }  # fmt: skip
    assert births == last[0]
    assert [births[0], births[-1]] == [(0, 1, 2), (0, 2, 7)]
    assert set(births) == {(0, 1, 2), (0, 2, 7)}, "at one boundary"
    # slow in steps 2 to 5, asked for by all at the end of step 6, which the next boundary tells; the one after prepares
    # the epoch of the newcomer, and a later one begins it
    begun = births.index((0, 2, 7))
    assert asked.step == 6
    assert begun > 8
    assert (slow[2], first[2], last[2], joined[2]) == (True, False, False, False)
    assert joined[0] == births[begun:]
    found = await asyncio.to_thread(replay, ReplaceStragglers(patience=4), record)
    assert [(one.step, one.what, one.evidence) for one in found] == [(6, asked.what, asked.evidence)]


@pytest.mark.asyncio
async def test_the_first_rank_is_replaced_too_and_the_next_one_only_after_a_rest() -> None:
    own_s = {0: 4.0, 2: 3.0}
    async with world(4, elastic=True) as comms:
        policies = [ReplaceStragglers(patience=2, rest=6) for _ in range(4)]
        outcomes = await run_ranks(comms, lambda comm: train(comm, [policies[comm.rank]], own_s))
    births, decisions, _ = outcomes[1]
    assert [(one.step, one.what) for one in decisions] == [
        (4, "asks for another in place of rank 0"), (10, "asks for another in place of rank 1"),
    ]  # fmt: skip
    assert births[-1] == (1, 3), "no rank has come, and the others continue"
    assert [outcome[2] for outcome in outcomes] == [True, False, True, False]


@pytest.mark.asyncio
async def test_a_bad_moment_is_no_reason() -> None:
    def cost(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return (8.0 if rank == 1 and step == 5 else 1.0), 1.0

    decisions, _ = await adapted(lambda _: [ReplaceStragglers(patience=20)], steps=30, cost=cost)
    assert decisions == []


@pytest.mark.asyncio
async def test_policy_is_switched_off_if_ranks_cannot_change() -> None:
    def cost(rank: int, step: int, strategy: str) -> tuple[float, float]:
        return (8.0 if rank == 1 else 1.0), 1.0

    decisions, _ = await adapted(lambda _: [ReplaceStragglers(patience=2)], cost=cost)
    assert len(decisions) == 1
    assert "another was asked for in place of rank 1, but these cannot change: open an Elastic" in decisions[0].what


@pytest.mark.asyncio
async def test_invalid_arguments_are_refused() -> None:
    for bad in ({"patience": 0}, {"rest": 0}, {"threshold": 1.0}, {"weight": 0.0}, {"warmup": 0}):
        with pytest.raises(ConfigError, match=r"at least 1|between 0 and 1"):
            ReplaceStragglers(**bad)

    class Odd(Policy):
        def after_step(self, ctx: Context) -> None:
            for bad in (-1, ctx.size, True, 1.0):
                with pytest.raises(ConfigError, match="a rank is a whole number from 0 to 1, not"):
                    ctx.replace(bad)  # type: ignore[arg-type]

    async with world(2, elastic=True) as comms:
        for _, decisions, _ in await run_ranks(comms, lambda comm: train(comm, [Odd()], {})):
            assert decisions == []
    async with world(2, elastic=True) as comms:
        with pytest.raises(ConfigError, match="a rank is a whole number from 0 to 1, not 2"):
            await comms[0].propose_replacement(2)
