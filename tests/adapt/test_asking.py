"""Requests of policies for hyperparameters and sizes, precedence between policies, and observations of the program."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kfcomm.adapt import Adaptation, Context, Decision, Hyperparameters, Policy
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.world.communicator import Communicator
from tests.adapt.scripted import ScriptedMeter, steady, words
from tests.conformance.worlds import assert_kinds, ends, works, world

GIVEN = Hyperparameters(batch_size=64, learning_rate=0.1, agreements=("sma", "ssgd"), wire_dtypes=("bfloat16",))

Body = Callable[[Adaptation], Any]


class Asks(Policy):
    """Does something after some of the steps."""

    def __init__(self, name: str, *at: int, do: Callable[[Context], Any]) -> None:
        self._name = name
        self._at = at
        self._do = do

    @property
    def name(self) -> str:
        return self._name

    def after_step(self, ctx: Context) -> Any:
        return self._do(ctx) if ctx.step in self._at else None


async def trained(
    make: Callable[[Communicator], Sequence[Policy]], body: Body, *, steps: int = 6, size: int = 4,
    given: Hyperparameters = GIVEN,
) -> tuple[list[Decision], list[Any]]:  # fmt: skip
    """Run steps; the decisions and what ``body`` gives in each step, which are the same on every rank."""
    async with world(size) as comms:

        async def main(comm: Communicator) -> tuple[list[Decision], list[Any]]:
            meter = ScriptedMeter(comm, steady)
            seen = []
            async with Adaptation(comm, make(comm), meter=meter, hyperparameters=given) as adaptation:
                for _ in range(steps):
                    async with adaptation.step():
                        seen.append(body(adaptation))
            return adaptation.decisions, seen

        outcomes = await asyncio.gather(*map(main, comms))
        await works(comms)
    assert all(one == outcomes[0] for one in outcomes)
    return outcomes[0]


def held(adaptation: Adaptation) -> Any:
    return adaptation.batch_size, adaptation.learning_rate, adaptation.agreement, adaptation.wire_dtype


@pytest.mark.asyncio
async def test_each_holds_from_the_step_after_the_ranks_have_met() -> None:
    def ask(ctx: Context) -> None:
        ctx.set_batch_size(128, noise_scale=100.0)
        ctx.set_learning_rate(0.2)
        ctx.set_agreement("ssgd")
        ctx.set_wire_dtype("bfloat16")

    decisions, seen = await trained(lambda comm: [Asks("All", 1, do=ask)], held, steps=4)
    assert seen == [(64, 0.1, "sma", None)] * 3 + [(128, 0.2, "ssgd", "bfloat16")]
    assert words(decisions) == [
        (2, "All", "batch size 64 -> 128"),
        (2, "All", "learning rate 0.1 -> 0.2"),
        (2, "All", "agreement sma -> ssgd"),
        (2, "All", "wire dtype None -> bfloat16"),
    ]
    assert str(decisions[0]) == "step 2: All: batch size 64 -> 128 (noise scale 100)"


@pytest.mark.asyncio
async def test_a_policy_sees_what_held_in_the_step_and_what_holds_next() -> None:
    seen = []

    def look(ctx: Context) -> None:
        assert ctx.metrics is not None
        seen.append((ctx.metrics.hyperparameters.batch_size, ctx.hyperparameters.batch_size, dict(ctx.set_by)))

    await trained(
        lambda comm: [Asks("Ask", 0, do=lambda ctx: ctx.set_batch_size(8) and None), Asks("Look", 0, 1, 2, do=look)],
        lambda adaptation: adaptation.local_batch_size, steps=3, size=2,
    )  # fmt: skip
    assert seen[::2] == [(64, 64, {}), (64, 8, {"batch_size": "Ask"}), (8, 8, {"batch_size": "Ask"})]


@pytest.mark.asyncio
async def test_the_share_of_a_rank() -> None:
    async with world(3) as comms:
        given = Hyperparameters(batch_size=8)
        shares = [Adaptation(comm, [], hyperparameters=given).local_batch_size for comm in comms]
        assert shares == [3, 3, 2]
        assert Adaptation(comms[0], []).local_batch_size is None


@pytest.mark.asyncio
async def test_of_two_that_ask_for_the_same_thing_the_first_has_its_way_and_both_know() -> None:
    went_on = []

    def make(comm: Communicator) -> list[Policy]:
        def asks(name: str, batch_size: int) -> Policy:
            async def ask(ctx: Context) -> None:
                had_its_way = await ctx.set_batch_size(batch_size)
                went_on.append((name, had_its_way, ctx.hyperparameters.batch_size, ctx.set_by["batch_size"]))

            return Asks(name, 1, do=ask)

        return [asks("First", 128), asks("Second", 256), asks("Third", 128)]

    decisions, seen = await trained(make, lambda adaptation: adaptation.batch_size, steps=4)
    assert seen == [64, 64, 64, 128]
    assert words(decisions) == [
        (2, "Second", "asks for batch size 256: overruled by First, which comes before it"),
        (2, "First", "batch size 64 -> 128"),
    ]
    assert decisions[0].evidence == {"First asks for": "batch size 128"}
    assert sorted(set(went_on)) == [
        ("First", True, 128, "First"), ("Second", False, 128, "First"), ("Third", True, 128, "Third"),
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_later_request_wins_whichever_policy_makes_it() -> None:
    policies = [
        Asks("First", 0, do=lambda ctx: ctx.set_learning_rate(0.2) and None),
        Asks("Second", 2, do=lambda ctx: ctx.set_learning_rate(0.3) and None),
    ]
    decisions, seen = await trained(lambda comm: policies, lambda adaptation: adaptation.learning_rate, steps=5)
    assert seen == [0.1, 0.1, 0.2, 0.2, 0.3]
    assert words(decisions) == [(1, "First", "learning rate 0.1 -> 0.2"), (3, "Second", "learning rate 0.2 -> 0.3")]


@pytest.mark.asyncio
async def test_of_one_policys_own_wishes_the_last_holds() -> None:
    def ask(ctx: Context) -> None:
        ctx.set_batch_size(128)
        ctx.set_batch_size(32)

    _, seen = await trained(lambda comm: [Asks("Two", 0, do=ask)], lambda adaptation: adaptation.batch_size, steps=3)
    assert seen == [64, 64, 32]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda ctx: ctx.set_strategy("rnig"), "unknown strategy 'rnig'; did you mean ring?"),
        (lambda ctx: ctx.set_batch_size(30), "a batch of 30 does not divide among 4 ranks; 28 or 32 would"),
        (lambda ctx: ctx.set_learning_rate(math.nan), "a learning rate is a finite number"),
        (lambda ctx: ctx.set_agreement("smaa"), "the program knows no agreement 'smaa'; did you mean sma?"),
        (lambda ctx: ctx.set_wire_dtype("int8"), "the program knows no wire dtype 'int8'"),
        (lambda ctx: ctx.resize(8), "8 ranks were asked for, but these cannot change: that needs an open Elastic"),
        (lambda ctx: ctx.resize(0), "a size is a whole number from 1 on, not 0"),
    ],
)
@pytest.mark.asyncio
async def test_invalid_request_switches_the_policy_off_everywhere(ask: Callable[[Context], Any], says: str) -> None:
    decisions, seen = await trained(lambda comm: [Asks("Bad", 1, do=lambda ctx: ask(ctx) and None)], held, steps=4)
    assert decisions[0].what.startswith("switched off: it raised on every rank: ConfigError in after_step: ")
    assert says in decisions[0].what
    assert set(seen) == {(64, 0.1, "sma", None)}


@pytest.mark.asyncio
async def test_a_policy_that_raises_right_after_its_change_has_it_undone_and_no_others() -> None:
    async def ask(ctx: Context) -> None:
        await asyncio.gather(ctx.set_batch_size(128), ctx.set_strategy("ring"))
        raise ValueError("oops")

    async def good(ctx: Context) -> None:
        await ctx.set_learning_rate(0.2)

    def look(adaptation: Adaptation) -> Any:
        return adaptation.batch_size, adaptation.learning_rate, adaptation.comm.strategy.name

    policies = [Asks("Bad", 1, do=ask), Asks("Good", 1, do=good)]
    _, seen = await trained(lambda comm: policies, look, steps=5)
    assert seen[-1] == (64, 0.2, "auto")


@pytest.mark.asyncio
async def test_ranks_with_other_hyperparameters() -> None:
    async with world(2, aborted=True) as comms:

        async def main(comm: Communicator) -> None:
            given = Hyperparameters(batch_size=8 << comm.rank)
            async with Adaptation(comm, [], hyperparameters=given):
                raise AssertionError

        outcomes = await ends(comms, main)
        assert_kinds(outcomes, CollectiveMismatch)
        assert "rank 0 has no policies, every 1 steps, batch_size 8; rank 1 has" in str(outcomes[0])
        assert "batch_size 16" in str(outcomes[0])
        with pytest.raises(ConfigError, match="hyperparameters are kfcomm"):
            Adaptation(comms[0], [], hyperparameters={"batch_size": 3})  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is observed


@pytest.mark.asyncio
async def test_observations_of_one_rank_reach_all() -> None:
    seen: list[Any] = []

    class Look(Policy):
        def after_step(self, ctx: Context) -> None:
            assert ctx.metrics is not None
            seen.append({name: list(values) for name, values in ctx.metrics.observed.items()})

    def body(adaptation: Adaptation) -> None:
        rank, step = adaptation.comm.rank, adaptation.num_steps
        adaptation.observe(loss=100.0)
        adaptation.observe(loss=step + rank / 10)
        if step == 2 and rank == 1:
            adaptation.observe(noise=7, signal=math.inf)
        if step == 3 and rank == 0:
            adaptation.observe(signal=math.nan)

    await trained(lambda comm: [Look()], body, steps=4, size=2)
    nan = math.nan
    wanted: list[dict[str, list[float | None]]] = [
        {"loss": [0.0, 0.1]},
        {"loss": [1.0, 1.1]},
        {"loss": [2.0, 2.1], "noise": [None, 7.0], "signal": [None, math.inf]},
        {"loss": [3.0, 3.1], "noise": [None, None], "signal": [nan, None]},
    ]
    assert [str(one) for one in seen[::2]] == [str(one) for one in wanted]
    assert [str(one) for one in seen[1::2]] == [str(one) for one in wanted]


@pytest.mark.asyncio
async def test_invalid_observations_are_refused() -> None:
    async with world(1) as comms:
        adaptation = Adaptation(comms[0], [])
        for bad in ("3", None, [1.0]):
            with pytest.raises(ConfigError, match=r"what is observed is a number: x is"):
                adaptation.observe(x=bad)  # type: ignore[arg-type]
        adaptation.observe(**{f"x{number}": 1.0 for number in range(64)})
        adaptation.observe(x0=2.0)
        with pytest.raises(ConfigError, match="a rank observes up to 64 names"):
            adaptation.observe(x64=1.0)
