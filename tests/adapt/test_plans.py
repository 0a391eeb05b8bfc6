"""Epochs, samples, ends, schedules, free hyperparameters, and the rule against flapping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kfcomm import adapt, sync
from kfcomm.adapt import Adaptation, Context, Free, Hyperparameters, Policy, Schedule, StopAt, replay
from kfcomm.adapt.flapping import RecentChanges
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import ConfigError
from kfcomm.testing import run_threads, sync_world
from kfcomm.testing import world as memory_world
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import until, works, world

GIVEN = Hyperparameters(
    batch_size=4, learning_rate=0.1,
    free={"momentum": Free(0.9, low=0.0, high=0.999), "steps": Free(50, low=1), "nesterov": True, "warm": 2.5},
)  # fmt: skip


async def run(
    policies: Callable[[], list[Policy]], *, steps: int = 10, size: int = 2, **options: Any
) -> tuple[list[tuple[Any, ...]], list[adapt.Decision]]:
    """The hyperparameters that the program sees in each step; the same on all ranks, and in a replay."""
    async with world(size) as comms:

        async def main(comm: Communicator) -> tuple[list[tuple[Any, ...]], list[adapt.Decision]]:
            seen = []
            async with Adaptation(comm, policies(), hyperparameters=GIVEN, **options) as adaptation:
                for _ in range(steps):
                    async with adaptation.step():
                        seen.append((adaptation.batch_size, adaptation.value("momentum"), comm.strategy.name))
                    if adaptation.is_over:
                        break
            return seen, adaptation.decisions

        found = await asyncio.gather(*map(main, comms))
        await works(comms)
    assert all(one == found[0] for one in found)
    return found[0]


def of(policy: Policy, decisions: list[adapt.Decision]) -> list[adapt.Decision]:
    return [one for one in decisions if one.policy == policy.name]


# ---------------------------------------------------------------- schedules and ends


@pytest.mark.asyncio
async def test_schedule_by_steps(tmp_path: Path) -> None:
    def policies() -> list[Policy]:
        return [Schedule("batch_size", "4:3,8:2,4:2,16:1"), Schedule("momentum", [(0.9, 1), (0.5, 100)])]

    path = tmp_path / "run.jsonl"
    seen, decisions = await run(policies, record=path)
    assert [batch for batch, _, _ in seen] == [4] * 3 + [8] * 2 + [4] * 2 + [16] * 3
    assert [momentum for _, momentum, _ in seen] == [0.9] + [0.5] * 9
    assert [(one.step, one.what) for one in decisions if one.policy == "Schedule of batch_size"] == [
        (2, "batch size 4 -> 8"), (4, "batch size 8 -> 4"), (6, "batch size 4 -> 16"),
    ]  # fmt: skip
    for policy in policies():
        assert await asyncio.to_thread(replay, policy, path) == of(policy, decisions)


@pytest.mark.asyncio
async def test_schedule_of_the_strategy_and_another_first_value() -> None:
    seen, _ = await run(lambda: [Schedule("strategy", "ring:4,star:1"), Schedule("batch_size", "8:100")], steps=6)
    assert [strategy for *_, strategy in seen][1:] == ["ring"] * 3 + ["star"] * 2
    assert [batch for batch, *_ in seen] == [4] + [8] * 5


@pytest.mark.asyncio
async def test_schedule_that_stops() -> None:
    seen, decisions = await run(lambda: [Schedule("batch_size", "4:3,8:2", stops=True)])
    assert len(seen) == 5
    assert decisions[-1].what == "stops: the schedule of batch_size is over"


@pytest.mark.asyncio
@pytest.mark.parametrize("every", [1, 3])
async def test_schedule_with_every(every: int) -> None:
    seen, _ = await run(lambda: [Schedule("batch_size", "4:3,8:100")], every=every, steps=7)
    assert [batch for batch, *_ in seen] == [4] * 3 + [8] * 4


@pytest.mark.parametrize("plan", ["", "4", "4:", "4:0", ":5", "4:1.5", "4:-1", "4:3,", [], [(4, 0)], [(4, True)]])
def test_wrong_schedules(plan: Any) -> None:
    with pytest.raises(ConfigError, match="'4:1000,8:2000'"):
        Schedule("batch_size", plan)


@pytest.mark.asyncio
async def test_schedule_of_something_unknown_is_switched_off() -> None:
    _, decisions = await run(lambda: [Schedule("momentun", "0.5:3")], steps=2)
    assert "switched off" in decisions[-1].what
    assert "did you mean momentum?" in decisions[-1].what


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("total", "steps"), [({"num_steps": 6}, 6), ({"num_samples": 21}, 6), ({"num_samples": 20}, 5)]
)
async def test_stop_at_a_total(total: Any, steps: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    seen, decisions = await run(lambda: [StopAt(**total)], record=path)
    assert len(seen) == steps
    assert await asyncio.to_thread(replay, StopAt(**total), path) == decisions


@pytest.mark.parametrize("totals", [{}, {"num_steps": 0}, {"num_samples": 1.5}, {"num_epochs": True}])
def test_wrong_totals(totals: Any) -> None:
    if totals == {"num_epochs": True}:
        totals = {"num_epochs": "3"}
    with pytest.raises(ConfigError, match="each at least 1"):
        StopAt(**totals)


# ---------------------------------------------------------------- free hyperparameters


class Doing(Policy):
    """Does something after given steps."""

    def __init__(self, name: str, do: dict[int, Callable[[Context], Any]]) -> None:
        self._name, self._do = name, do

    @property
    def name(self) -> str:
        return self._name

    async def after_step(self, ctx: Context) -> None:
        if ctx.step in self._do:
            await self._do[ctx.step](ctx)


@pytest.mark.asyncio
async def test_policies_set_free_hyperparameters(tmp_path: Path) -> None:
    def policies() -> list[Policy]:
        return [Doing("Sets", {1: lambda ctx: ctx.set("momentum", 0.5, loss=2.0), 3: lambda ctx: ctx.set("steps", 10)})]

    path = tmp_path / "run.jsonl"
    seen, decisions = await run(policies, record=path, steps=6)
    assert [momentum for _, momentum, _ in seen] == [0.9] * 3 + [0.5] * 3
    assert [str(one) for one in decisions] == [
        "step 2: Sets: momentum 0.9 -> 0.5 (loss 2)", "step 4: Sets: steps 50 -> 10",
    ]  # fmt: skip
    assert await asyncio.to_thread(replay, policies()[0], path) == decisions


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("momentum", 1.5, "momentum is a finite number from 0 to 0.999, not 1.5"),
        ("momentum", float("nan"), "finite"), ("momentum", "high", "finite"), ("momentum", True, "finite"),
        ("steps", 0, "steps is a whole number from 1 to inf, not 0"), ("steps", 2.5, "whole number"),
        ("nesterov", 1, "True or False"), ("momentun", 0.5, "did you mean momentum?"),
    ],
)  # fmt: skip
async def test_values_out_of_bounds_switch_the_policy_off(name: str, value: Any, why: str) -> None:
    _, decisions = await run(lambda: [Doing("Sets", {0: lambda ctx: ctx.set(name, value)})], steps=3)
    assert "switched off" in decisions[-1].what
    assert why in decisions[-1].what


def test_free_hyperparameters_survive_msgpack_and_json() -> None:
    told = msgpack.unpackb(msgpack.packb(GIVEN.as_json()))
    assert Hyperparameters.from_json(told) == GIVEN
    told.pop("free")
    assert Hyperparameters.from_json(told).free == {}
    assert GIVEN.having("steps", 7).value("steps") == 7
    assert GIVEN.value("steps") == 50
    assert GIVEN.checked("warm", 3, 2) == 3.0
    with pytest.raises(ConfigError, match="follows no 'size'"):
        GIVEN.value("size")


@pytest.mark.parametrize(
    "free", [{"size": 3}, {"batch_size": 3}, {"a b": 1}, {"a": "text"}, {"a": Free(5, high=4)}, {"a": None}, {1: 2}]
)
def test_wrong_free_hyperparameters(free: Any) -> None:
    with pytest.raises(ConfigError):
        Hyperparameters(free=free)


def test_choices() -> None:
    given = Hyperparameters(free={"mode": Free("slow", choices=("slow", "fast")), "k": Free(2, choices=[1, 2, 4])})
    assert given.checked("mode", "fast", 1) == "fast"
    with pytest.raises(ConfigError, match="k is one of 1, 2, 4, not 3"):
        given.checked("k", 3, 1)


# ---------------------------------------------------------------- flapping


@pytest.mark.asyncio
async def test_policies_that_undo_each_other_are_stopped(tmp_path: Path) -> None:
    class Wants(Policy):
        def __init__(self, size: int, turn: int) -> None:
            self._size, self._turn = size, turn

        @property
        def name(self) -> str:
            return f"Wants{self._size}"

        def after_step(self, ctx: Context) -> None:
            if ctx.step % 2 == self._turn and ctx.hyperparameters.batch_size != self._size:
                ctx.set_batch_size(self._size)

    def policies() -> list[Policy]:
        return [Wants(8, 0), Wants(4, 1)]

    path = tmp_path / "run.jsonl"
    _, decisions = await run(policies, steps=30, record=path, rest=10)
    changes = [one for one in decisions if one.what.startswith("batch size")]
    assert 2 <= len(changes) <= 6
    refused = [one for one in decisions if "refused" in one.what]
    assert refused[0].policy == "Wants8"
    assert refused[0].what == "asks for batch size 8: refused, since that was taken back 2 steps ago"
    for policy in policies():
        assert await asyncio.to_thread(replay, policy, path) == of(policy, decisions)
    _, decisions = await run(policies, steps=30, rest=0)
    assert not any("refused" in one.what for one in decisions)
    assert len([one for one in decisions if one.what.startswith("batch size")]) > 20


def test_rule_of_changes() -> None:
    changes = RecentChanges(rest=5)
    changes.note("x", 0, 1, 2)
    assert changes.steps_since("x", 1, 3) is None  # it may be taken back
    changes.note("x", 3, 2, 1)
    assert changes.steps_since("x", 2, 4) == 1  # but not set again
    assert changes.steps_since("x", 3, 4) is None
    assert changes.steps_since("y", 2, 4) is None
    assert changes.steps_since("x", 2, 8) is None
    other = RecentChanges(rest=5)
    other.state = msgpack.unpackb(msgpack.packb(changes.state))
    assert other.steps_since("x", 2, 4) == 1


# ---------------------------------------------------------------- epochs


class Story(Policy):
    """Notes hooks, with step, epoch and samples."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, int]] = []

    def _note(self, hook: str, ctx: Context) -> None:
        self.calls.append((hook, ctx.epoch, ctx.step, ctx.num_samples))
        ctx.decide(f"{hook} {ctx.epoch}", samples=ctx.num_samples)

    def on_epoch_start(self, ctx: Context) -> None:
        self._note("starts", ctx)

    def on_epoch_end(self, ctx: Context) -> None:
        self._note("ends", ctx)

    def after_step(self, ctx: Context) -> None:
        self.calls.append(("step", ctx.epoch, ctx.step, ctx.num_samples))


CALLS = [
    ("starts", 0, 0, 0), ("step", 0, 0, 4), ("step", 0, 1, 8), ("ends", 0, 2, 8),
    ("starts", 1, 2, 8), ("step", 1, 2, 12), ("step", 1, 3, 16), ("ends", 1, 4, 16),
]  # fmt: skip


@pytest.mark.asyncio
async def test_epochs_marked_by_hand(tmp_path: Path) -> None:
    path, stories = tmp_path / "run.jsonl", [Story(), Story()]
    async with world(2) as comms:

        async def main(comm: Communicator) -> list[adapt.Decision]:
            async with Adaptation(comm, [stories[comm.rank]], hyperparameters=GIVEN, record=path) as adaptation:
                for _ in range(2):
                    async with adaptation.epoch():
                        for _ in range(2):
                            async with adaptation.step():
                                pass
                async with adaptation.epoch():  # without steps
                    with pytest.raises(ConfigError, match="an epoch is under way"):
                        async with adaptation.epoch():
                            pass
            return adaptation.decisions

        decisions = (await asyncio.gather(*map(main, comms)))[0]
    assert [one.calls for one in stories] == [CALLS, CALLS]
    again = Story()
    assert await asyncio.to_thread(replay, again, path) == decisions
    assert again.calls == CALLS


def test_epochs_in_the_blocking_form() -> None:
    def main(comm: sync.Communicator) -> list[Any]:
        story = Story()
        with sync.Adaptation(comm, [story], hyperparameters=GIVEN) as adaptation:
            for _ in range(2):
                with adaptation.epoch():
                    for _ in range(2):
                        with adaptation.step():
                            pass
        assert adaptation.num_samples == 16
        assert not adaptation.is_over
        return story.calls

    with sync_world(2) as comms:
        assert run_threads(comms, main) == [CALLS] * 2


@pytest.mark.asyncio
async def test_passes_of_a_sampler_are_epochs_also_for_joining_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    async with memory_world(2, elastic=True) as comms:
        may_come = asyncio.Event()

        async def main(comm: Any, *, is_new: bool = False) -> Any:
            story = Story()
            async with Elastic(comm, State()) as elastic, Adaptation(comm, [story], record=path) as adaptation:
                async for step in elastic.steps(ElasticSampler(16, 4), passes=3):
                    async with adaptation.step(step):
                        await comm.barrier()
                        if step.number == 4 and comm.rank == 0 and not is_new:
                            may_come.set()
                            await until(lambda: elastic._requests._candidates)
            return story.calls, adaptation.decisions

        async def new() -> Any:
            await may_come.wait()
            return await main(await comms.join(7), is_new=True)

        one, other, joined = await asyncio.gather(*map(main, list(comms)), new())
    assert one == other
    hooks = [call for call in one[0] if call[0] != "step"]
    assert hooks == [
        (hook, epoch, 4 * epoch + 4 * (hook == "ends"), 16 * (epoch + (hook == "ends")))
        for epoch in range(3) for hook in ("starts", "ends")
    ]  # fmt: skip
    late = one[0][one[0].index(joined[0][0]) :]
    assert joined[0] == late
    assert 0 < len(late) < len(one[0])
    again = Story()
    assert await asyncio.to_thread(replay, again, path) == one[1]


# ---------------------------------------------------------------- state


@pytest.mark.asyncio
async def test_state_survives_the_loss_of_all_ranks(tmp_path: Path) -> None:
    """In a State the adaptation continues from the checkpoint: counts, hyperparameters and what policies know."""

    class Counts(Policy):
        def on_start(self, ctx: Context) -> None:
            self.count = 0

        def after_step(self, ctx: Context) -> None:
            self.count += 1
            if self.count == 3:
                ctx.set("momentum", 0.5)

        def state_dict(self) -> int:
            return self.count

        def load_state_dict(self, state: int) -> None:
            self.count = state

    found = []
    for until_step in (6, 12):
        async with memory_world(2, elastic=True) as comms:

            async def main(comm: Any, until_step: int = until_step) -> Any:
                policy = Counts()
                adaptation = Adaptation(comm, [policy], hyperparameters=GIVEN)
                state = State(adaptation=adaptation)
                path = tmp_path / "kept.npz"
                async with Elastic(comm, state, checkpoint=path, checkpoint_every=1) as elastic, adaptation:
                    async for step in elastic.steps(ElasticSampler(48, 4)):
                        async with adaptation.step(step):
                            await comm.barrier()
                        if step.number + 1 == until_step:
                            break
                return adaptation.num_steps, adaptation.num_samples, adaptation.value("momentum"), policy.count

            found.append(await asyncio.gather(*map(main, comms)))
    assert found[0] == [(6, 24, 0.5, 6)] * 2
    steps, samples, momentum, count = found[1][0]
    assert found[1][1] == found[1][0]
    assert (samples, momentum, count) == (4 * steps, 0.5, steps)
    assert steps == 12
