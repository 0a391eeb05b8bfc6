"""Guarded steps of an ``Elastic``: samples are given again, wrong ones are set aside, and the state returns."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Adaptation, Context, GuardSteps, Policy, replay
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.testing import world

LENGTH, BATCH = 24, 6


def marks(indices: Any, wrong: Any = ()) -> np.ndarray[Any, Any]:
    """Marks of a rank's samples; NaN where a wrong one is among them."""
    found = np.zeros(LENGTH)
    found[indices] = math.nan if set(map(int, indices)) & set(wrong) else 1.0
    return found


async def train(comm: Any, guard: GuardSteps, wrong: Any, *, spoil: Any = None, **options: Any) -> Any:
    """Two passes; how often each sample counted, samples aside, and the decisions."""
    state, sampler = State(used=np.zeros(LENGTH), steps=0), ElasticSampler(LENGTH, BATCH)
    async with (
        Elastic(comm, state, **options) as elastic,
        Adaptation(comm, [guard]) as adaptation,
    ):
        async for step in elastic.steps(sampler, passes=2):
            async with adaptation.step(step) as now:
                found = marks(step.indices, wrong)
                if spoil is not None:
                    spoil(adaptation.num_steps, comm, state, found)
                state.used = state.used + await now.guarded(found, op="sum")
                state.steps += 1
    assert adaptation.num_samples == state.used.sum() or spoil is not None
    return state.used, sampler.aside, adaptation.decisions, state.steps


async def on_all(size: int, options: dict[str, Any], *args: Any, **more: Any) -> Any:
    async with world(size, elastic=True) as comms:
        found = await asyncio.gather(*(train(comm, GuardSteps(**options), *args, **more) for comm in comms))
    for used, aside, decisions, steps in found:
        assert np.array_equal(used, found[0][0])
        assert (aside, decisions, steps) == found[0][1:]
    return found[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_wrong_samples_are_set_aside_and_the_others_used_once_a_pass(size: int) -> None:
    used, aside, decisions, _ = await on_all(size, {"set_aside_after": 3}, (5, 17))
    assert {5, 17} <= set(aside)
    assert used[5] == used[17] == 0
    assert (np.delete(used, aside) == 2).all()
    assert sum("set aside" in one.evidence for one in decisions) >= 1


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [2, 4])
async def test_few_samples_beside_a_wrong_one_are_set_aside(size: int) -> None:
    """Samples of a void step are given again dealt out among the ranks, so that suspects part."""
    _, aside, _, _ = await on_all(size, {"set_aside_after": 4}, (5,))
    assert 5 in aside
    assert len(aside) <= 2


@pytest.mark.asyncio
async def test_state_returns_after_void_steps_in_a_row() -> None:
    """The state goes wrong in a good step: all later steps are void, until the kept state is restored."""

    def spoil(number: int, comm: Any, state: Any, found: Any) -> None:
        if number == 3:
            state.steps += 1000
        if state.steps > 1000 and number > 3:
            found[comm.rank] = math.nan

    options = {"roll_back_after": 2, "keep_every": 2, "set_aside_after": None}
    used, _, decisions, steps = await on_all(2, options, (), spoil=spoil)
    assert steps < 1000
    assert (used == 2).all()
    assert [one.what for one in decisions if "restores" in one.what] == ["restores the kept state"]


@pytest.mark.asyncio
async def test_without_a_copy_in_memory_training_continues(tmp_path: Path) -> None:
    """After the loss of all ranks the guard knows good steps, and the kept state is lost."""
    path, told = tmp_path / "kept.npz", []
    for run in range(2):
        async with world(2, elastic=True) as comms:

            async def main(comm: Any, run: int = run) -> Any:
                guard = GuardSteps(roll_back_after=1, keep_every=100)
                adaptation = Adaptation(comm, [guard])
                state = State(adaptation=adaptation, used=np.zeros(LENGTH))
                async with Elastic(comm, state, checkpoint=path, checkpoint_every=1) as elastic, adaptation:
                    async for step in elastic.steps(ElasticSampler(LENGTH, BATCH), passes=2):
                        async with adaptation.step(step) as now:
                            found = marks(step.indices, step.indices if run and step.number == 5 else ())
                            state.used = state.used + await now.guarded(found, op="sum")
                        if step.number == 3 and not run:
                            break
                return state.used, adaptation.decisions

            told.append(await asyncio.gather(*map(main, comms)))
    (used, decisions), (_, others) = told[1]
    assert (used == 2).all()
    assert decisions == others
    assert "cannot restore the state: " in decisions[-1].what


@pytest.mark.asyncio
async def test_policies_keep_restore_and_set_aside(tmp_path: Path) -> None:
    """Any policy can ask for the actions of the guard; a replay decides alike."""

    class Asks(Policy):
        def after_step(self, ctx: Context) -> None:
            if ctx.step == 0:
                ctx.keep(because="it begins")
            if ctx.step == 3:
                ctx.roll_back()
            if ctx.step == 5:
                ctx.set_aside([4, 2], loss=9.0)

    path = tmp_path / "run.jsonl"
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            state, sampler, counts = State(count=0), ElasticSampler(LENGTH, BATCH, seed=None), []
            async with Elastic(comm, state) as elastic, Adaptation(comm, [Asks()], record=path) as adaptation:
                async for step in elastic.steps(sampler, passes=3):
                    async with adaptation.step(step):
                        await comm.barrier()
                        state.count += 1
                        counts.append(state.count)
            return counts, sampler.aside, adaptation.decisions

        one, other = await asyncio.gather(*map(main, comms))
    assert one == other
    counts, aside, decisions = one
    assert counts[:7] == [1, 2, 3, 4, 5, 3, 4]  # kept after the second step, restored after the fifth
    assert aside == [2, 4]
    assert [str(one) for one in decisions] == [
        "step 1: Asks: keeps the state (because it begins)",
        "step 4: Asks: restores the kept state",
        "step 6: Asks: sets 2 samples aside (samples [2, 4], loss 9)",
    ]
    assert await asyncio.to_thread(replay, Asks(), path) == decisions


@pytest.mark.asyncio
async def test_replay_sets_the_same_samples_aside(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with world(2, elastic=True) as comms:

        async def main(comm: Any) -> Any:
            sampler = ElasticSampler(LENGTH, BATCH)
            async with Elastic(comm, State()) as elastic, Adaptation(comm, [GuardSteps()], record=path) as adaptation:
                async for step in elastic.steps(sampler, passes=2):
                    async with adaptation.step(step) as now:
                        await now.guarded(marks(step.indices, (5, 17)), op="sum")
            return adaptation.decisions

        decisions = (await asyncio.gather(*map(main, comms)))[0]
    assert sum("set aside" in one.evidence for one in decisions) >= 1
    assert await asyncio.to_thread(replay, GuardSteps(), path) == decisions


@pytest.mark.asyncio
@pytest.mark.parametrize("action", ["keep", "roll_back", "set_aside"])
async def test_actions_need_an_elastic(action: str) -> None:
    class Asks(Policy):
        def after_step(self, ctx: Context) -> None:
            getattr(ctx, action)(*([[1]] if action == "set_aside" else []))

    async with world(2) as comms:

        async def main(comm: Any) -> Any:
            async with Adaptation(comm, [Asks()]) as adaptation:
                for _ in range(2):
                    async with adaptation.step():
                        pass
            return [one.what for one in adaptation.decisions]

        found = await asyncio.gather(*map(main, comms))
    assert f"{action} was asked for: that needs an open Elastic" in found[0][0]
    assert found[0] == found[1]
