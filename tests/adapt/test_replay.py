"""A recorded run, shown to its policies again: they decide the same. And what cannot be shown."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import (
    Adaptation,
    AutoStrategy,
    AvoidSlowLinks,
    Context,
    Decision,
    Hyperparameters,
    Policy,
    StepMetrics,
    replay,
)
from kfcomm.adapt.recording import decoded, encoded, lines_of
from kfcomm.errors import ConfigError
from kfcomm.probe import Probe
from kfcomm.strategies import build
from kfcomm.types import Layout
from kfcomm.world.communicator import Communicator
from tests.adapt.scripted import Cost, ScriptedMeter, steady
from tests.conformance.worlds import assert_kinds, ends, world

GIVEN = Hyperparameters(batch_size=64, learning_rate=0.1, agreements=("sma", "ssgd"))
SECONDS = {"ring": 2.0, "binary_tree": 3.0, "star": 9.0, "clique": 1.0}


async def recorded(
    path: Path, make: Callable[[], Sequence[Policy]], *, cost: Cost = steady, steps: int = 30, strategy: str = "star",
    body: Callable[[Adaptation], Any] = lambda adaptation: None,
) -> list[Decision]:  # fmt: skip
    """Run steps; what was decided."""
    async with world(4, hosts=4, strategy=strategy, aborted=True) as comms:

        async def main(comm: Communicator) -> list[Decision]:
            meter = ScriptedMeter(comm, cost)
            async with Adaptation(comm, make(), meter=meter, hyperparameters=GIVEN, record=path) as adaptation:
                for _ in range(steps):
                    async with adaptation.step():
                        body(adaptation)
            return adaptation.decisions

        return (await asyncio.gather(*map(main, comms)))[0]


def of(policy: Policy, decisions: Sequence[Decision]) -> list[Decision]:
    return [one for one in decisions if one.policy == policy.name]


class Noisy(Policy):
    """Decides by all metrics, in many ways."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed

    @property
    def name(self) -> str:
        return self._name

    async def after_step(self, ctx: Context) -> None:
        metrics = ctx.metrics
        assert metrics is not None
        told = [ctx.step, ctx.size, ctx.strategy.name, ctx.hyperparameters, sorted(ctx.set_by.items()), _plain(metrics)]
        ctx.decide("sees", told=repr(told))
        chance = random.Random(f"{self._seed} {told}")
        for _ in range(chance.randrange(3)):
            ask = chance.choice([
                lambda: ctx.set_batch_size(4 * chance.randrange(1, 40)),
                lambda: ctx.set_learning_rate(chance.random(), chance=chance.random()),
                lambda: ctx.set_agreement(chance.choice(["sma", "ssgd"])),
                lambda: ctx.set_strategy(chance.choice(["ring", "star"])),
                lambda: ctx.together("count", _count),
                lambda: ctx.set_strategy(build("ring", ctx.layout)),
            ])  # fmt: skip
            request: Any = ask()
            if chance.random() < 0.5:
                ctx.decide("goes on", found=await request)
        if chance.random() < 0.01:
            raise ValueError("oops")


def _plain(metrics: StepMetrics) -> Any:
    return (
        metrics.step, metrics.strategy.name, metrics.seconds, metrics.busy_s, metrics.nbytes, metrics.waited_s,
        metrics.observed, metrics.hyperparameters.as_json(), metrics.throughputs,
    )  # fmt: skip


async def _count(comm: Communicator) -> int:
    return int(await comm.all_reduce(1, "count"))


def noisy_cost(rank: int, step: int, strategy: str) -> tuple[float, float]:
    chance = random.Random(f"{rank} {step} {strategy}")
    return chance.random(), chance.random() / 3


def observes(adaptation: Adaptation) -> None:
    rank, step = adaptation.comm.rank, adaptation.num_steps
    adaptation.observe(loss=1 / (1 + step + rank), bad=math.nan if rank else math.inf)
    if step > 7:
        adaptation.observe(late=0.1 * rank)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.asyncio
async def test_several_policies_that_disturb_each_other(seed: int, tmp_path: Path) -> None:
    def make() -> list[Policy]:
        return [Noisy("First", seed), Noisy("Second", seed + 100), Noisy("Third", seed + 200)]

    path = tmp_path / "run.jsonl"
    decisions = await recorded(path, make, cost=noisy_cost, body=observes, steps=40)
    assert any("overruled" in one.what for one in decisions)
    for policy in make():
        found = await asyncio.to_thread(replay, policy, path)
        assert found == of(policy, decisions)
    written = [one for line in lines_of(path) for one in line.get("decisions", ())]
    assert written == [[one.policy, one.what, one.why] for one in decisions[: len(written)]]


def network(rank: int, step: int, strategy: str) -> tuple[float, float]:
    slower = 4.0 if step >= 40 and strategy == "clique" else 1.0
    return 1.0, SECONDS.get(strategy, 2.0) * slower


@pytest.mark.asyncio
async def test_auto_strategy_and_avoid_slow_links(tmp_path: Path) -> None:
    async def measure(comm: Communicator) -> Probe:
        bandwidth = np.full((4, 4), 100e6)
        bandwidth[2, :] = bandwidth[:, 2] = 25e6
        return Probe(comm.layout, np.full((4, 4), 1e-4), bandwidth)

    for make in (lambda: AutoStrategy(("ring", "clique"), rest=10), lambda: AvoidSlowLinks(measure=measure)):
        path = tmp_path / "run.jsonl"  # of the second run, too: begun anew
        decisions = await recorded(path, lambda make=make: [make()], cost=network, steps=80, strategy="clique")  # type: ignore[misc]
        assert len(decisions) >= 3
        assert await asyncio.to_thread(replay, make(), path) == decisions


@pytest.mark.asyncio
async def test_a_policy_that_was_not_in_the_run(tmp_path: Path) -> None:
    class Halves(Policy):
        def after_step(self, ctx: Context) -> None:
            size = ctx.hyperparameters.batch_size or 0
            if size > 8:
                ctx.set_batch_size(size // 2)

    path = tmp_path / "run.jsonl"
    await recorded(path, list, steps=5)
    found = await asyncio.to_thread(replay, Halves(), path)
    assert [(one.step, one.what) for one in found] == [
        (1, "batch size 64 -> 32"), (1, "batch size 32 -> 16"), (3, "batch size 16 -> 8"),
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_a_policy_that_was_switched_off(tmp_path: Path) -> None:
    class Breaks(Policy):
        def __init__(self, rank: int | None = None) -> None:
            self.rank = rank

        def after_step(self, ctx: Context) -> None:
            if ctx.step == 2:
                raise ValueError("oops")

    path = tmp_path / "run.jsonl"
    decisions = await recorded(path, lambda: [Breaks()], steps=5)
    found = await asyncio.to_thread(replay, Breaks(), path)
    assert found == decisions
    assert "switched off" in found[0].what


@pytest.mark.asyncio
async def test_unrecorded_result_is_a_config_error(tmp_path: Path) -> None:
    class Together(Policy):
        async def after_step(self, ctx: Context) -> None:
            if ctx.step == 1:
                await ctx.together("look", self._look)

        async def _look(self, comm: Communicator) -> Any:
            return {1, 2}

    path = tmp_path / "run.jsonl"
    await recorded(path, lambda: [Together()], steps=4)
    with pytest.raises(ConfigError, match="no result of 'look' for Together: set cannot be recorded"):
        await asyncio.to_thread(replay, Together(), path)
    await recorded(path, list, steps=4)
    with pytest.raises(ConfigError, match=r"no result of 'look' for Together$"):
        await asyncio.to_thread(replay, Together(), path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "this is not a record of an Adaptation"),
        ("[1]\n", "line 1: this is not a record"),
        ('{"format":2}\n', "line 1: format 2; 1 is known"),
        ('{"step":1}\n', "this is not a record"),
        ('{"format":1}\nxyz\n', "line 2: "),
    ],
)
def test_other_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"run.jsonl.*{says}"):
        replay(Policy(), path)


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> None:
            async with Adaptation(comm, [], record=tmp_path / "nowhere" / "run.jsonl"):
                raise AssertionError

        outcomes = await ends(comms, main)
        assert_kinds(outcomes, ConfigError)
        assert "the steps cannot be recorded: " in str(outcomes[0])
        assert str(outcomes[1]).startswith("rank 0: the steps cannot be recorded: ")


@pytest.mark.asyncio
async def test_a_disk_that_is_full_ends_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(json, "dumps", full)
    await recorded(tmp_path / "run.jsonl", list, steps=3)
    assert [one.getMessage() for one in caplog.records] == ["no more steps are recorded: no space left"]


def test_numbers_come_back_as_they_were() -> None:
    values = [0.1, 1 / 3, math.inf, -math.inf, 5, True, "text", None, {"a": [1.5]}]
    assert decoded(json.loads(json.dumps(encoded(values), allow_nan=False))) == values
    assert encoded((None, Layout.even(2).hosts)) == [None, [0, 0]]
    assert math.isnan(decoded(json.loads(json.dumps(encoded(math.nan), allow_nan=False))))
    with pytest.raises(ConfigError, match="set cannot be recorded"):
        encoded({1})
