"""Guarded steps in NumPy loops: a wrong number on one rank makes the step void on all, whatever exchanges gradients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import adapt, sync
from kfcomm.adapt import Adaptation, Context, GuardSteps, Hyperparameters, Policy, replay
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError, GuardFailed, KfcommError
from kfcomm.sync.adaptation import Step as BlockingStep
from kfcomm.testing import run_threads, sync_world
from kfcomm.train import SMA, GradientMonitor, SynchronousSGD
from kfcomm.world.communicator import Communicator
from tests.conformance.worlds import works, world

Wrong = dict[tuple[int, int], Any]
"""By step and rank: what is in one element of one array, or an error to raise, or a wrong loss as ("loss", x)."""


def gradients_of(model: dict[str, Any], step: int, rank: int, wrong: Wrong) -> tuple[dict[str, Any], float]:
    grads = {name: np.full_like(x, 0.1 * (rank + 1)) for name, x in model.items()}
    loss = 1.0
    given = wrong.get((step, rank))
    if isinstance(given, Exception):
        raise given
    if isinstance(given, tuple):
        return grads, given[1]
    if given is not None:
        grads["w"].flat[3] = given
    return grads, loss


def fresh() -> dict[str, Any]:
    return {"b": np.zeros(3, np.float32), "w": np.zeros((4, 5), np.float32)}


async def trained(
    comm: Communicator, steps: int, wrong: Wrong, *, way: Callable[[Any], Any] | None = None,
    policies: Any = None, guarded: Any = None, **options: Any,
) -> tuple[dict[str, Any], list[int], Adaptation]:  # fmt: skip
    """Train; the model, the void steps, and the adaptation."""
    model, void = fresh(), []
    made = None if way is None else way(comm)
    async with Adaptation(comm, policies or [GuardSteps()], **options) as adaptation:
        for number in range(steps):
            async with adaptation.step() as step:
                grads, loss = gradients_of(model, number, comm.rank, wrong)
                mean = await step.guarded(grads, loss=loss, way=made, **(guarded or {}))
                model = {name: x - mean[name] for name, x in model.items()}
            if step.is_void:
                void.append(number)
    return model, void, adaptation


async def on_all(size: int, *args: Any, **options: Any) -> list[tuple[dict[str, Any], list[int], Adaptation]]:
    async with world(size) as comms:
        found = await asyncio.gather(*(trained(comm, *args, **options) for comm in comms))
        await works(comms)
    first = found[0]
    for model, void, adaptation in found:
        assert all(np.array_equal(model[name], first[0][name]) for name in model)
        assert void == first[1]
        assert adaptation.decisions == first[2].decisions
    return found


def assert_trained(found: Any, good: int, size: int) -> None:
    wanted = -0.1 * good * (size + 1) / 2
    assert np.allclose(found[0][0]["w"], wanted, rtol=1e-5)
    assert np.allclose(found[0][0]["b"], wanted, rtol=1e-5)


WRONG = [math.nan, math.inf, -math.inf, ("loss", math.nan), ("loss", -math.inf)]


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_wrong_number_on_one_rank_makes_the_step_void_on_all(size: int, wrong: Any) -> None:
    rank = size - 1
    found = await on_all(size, 5, {(0, rank): wrong, (3, 0): wrong})
    assert found[0][1] == [0, 3]
    assert_trained(found, 3, size)
    (first, _) = found[0][2].decisions
    assert first.what.startswith(f"step is void because of rank {rank}: ")
    assert isinstance(wrong, tuple) or first.what.endswith(f"in rank {rank}: w")


WAYS: dict[str, Callable[[Any], Any]] = {
    "ssgd": SynchronousSGD,
    "monitored": lambda comm: SynchronousSGD(comm, monitor=GradientMonitor(comm, batch=8)),
    "adasum": lambda comm: SynchronousSGD(comm, op="adasum"),
    "sma": lambda comm: SMA(comm, 0.2),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", [*WRONG, FloatingPointError("overflow")])
@pytest.mark.parametrize("way", WAYS)
async def test_algorithms_of_train(way: str, wrong: Any) -> None:
    async with world(3) as comms:
        found = await asyncio.gather(
            *(trained(comm, 6, {(1, 2): wrong, (4, 0): wrong, (4, 1): wrong}, way=WAYS[way]) for comm in comms)
        )
        await works(comms)
    assert all(void == [1, 4] for _, void, _ in found)
    assert all(np.isfinite(model[name]).all() for model, _, _ in found for name in model)
    decisions = found[0][2].decisions
    assert all(one.decisions == decisions for _, _, one in found)
    assert "rank 2:" in decisions[0].what
    assert "ranks 0-1:" in decisions[1].what


@pytest.mark.asyncio
async def test_monitor_learns_nothing_from_a_void_step() -> None:
    monitors: list[GradientMonitor] = []

    def monitored(comm: Any) -> SynchronousSGD:
        monitors.append(GradientMonitor(comm, batch=8))
        return SynchronousSGD(comm, monitor=monitors[-1])

    await on_all(2, 8, {(3, 1): math.nan, (4, 0): math.inf}, way=monitored)
    for monitor in monitors:
        assert monitor.noise_scale.num_left_out == 0
        assert all(math.isfinite(value) for value in monitor.values.values())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "guarded", [{"op": "sum"}, {"op": "adasum"}, {"wire_dtype": "bfloat16"}, {"wire_dtype": "float16"}]
)
async def test_ops_and_dtypes_on_the_wire(guarded: Any) -> None:
    found = await on_all(3, 5, {(2, 1): math.nan}, guarded=guarded)
    assert found[0][1] == [2]
    assert "rank 1: gradient norm is nan, in rank 1: w" in found[0][2].decisions[0].what


@pytest.mark.asyncio
async def test_sum_that_overflows_is_void() -> None:
    async with world(3) as comms:

        async def main(comm: Communicator) -> bool:
            async with Adaptation(comm, [GuardSteps()]) as adaptation, adaptation.step() as step:
                mean = await step.guarded({"w": np.full(4, 6e4, np.float16)}, op="sum")
                assert not mean  # not reached
            return step.is_void

        assert await asyncio.gather(*map(main, comms)) == [True] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [0, 1, 4])
async def test_error_of_the_block_makes_the_step_void_on_all(at: int) -> None:
    found = await on_all(3, 6, {(at, 1): ZeroDivisionError("no samples")})
    assert found[0][1] == [at]
    what = found[0][2].decisions[0].what
    assert what == "step is void because of rank 1: an error was raised, in rank 1: ZeroDivisionError: no samples"


@pytest.mark.asyncio
async def test_all_ranks_raise_in_the_first_steps() -> None:
    error = FloatingPointError("x")
    found = await on_all(2, 4, {(0, 0): error, (0, 1): error, (1, 1): error, (2, 0): math.nan})
    assert found[0][1] == [0, 1, 2]


@pytest.mark.asyncio
async def test_other_errors_are_raised() -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> str:
            try:
                await trained(comm, 6, {(2, 1): OSError("no file")})
            except (OSError, KfcommError) as error:
                await comm.close()
                return type(error).__name__
            return "none"

        found = await asyncio.gather(*map(main, comms))
    assert found[1] == "OSError"
    assert found[0] in ("CollectiveAborted", "PeerLost", "SessionClosed")


@pytest.mark.asyncio
async def test_caught_errors_are_chosen() -> None:
    found = await on_all(2, 4, {(2, 1): OSError("no file")}, policies=[GuardSteps(catch=(OSError,))])
    assert found[0][1] == [2]


@pytest.mark.asyncio
async def test_error_after_the_exchange_is_raised() -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> Any:
            async with Adaptation(comm, [GuardSteps()]) as adaptation, adaptation.step() as step:
                await step.guarded(np.ones(3))
                if comm.rank == 1:
                    raise ZeroDivisionError

        one, two = await asyncio.gather(*map(main, comms), return_exceptions=True)
        assert isinstance(one, CollectiveAborted)
        assert isinstance(two, ZeroDivisionError)


@pytest.mark.asyncio
async def test_without_a_guard_nothing_is_judged() -> None:
    async with world(2) as comms:
        found = await asyncio.gather(*(trained(comm, 3, {(1, 0): math.nan}, policies=[Policy()]) for comm in comms))
    assert all(void == [] and np.isnan(model["w"]).any() for model, void, _ in found)


@pytest.mark.asyncio
async def test_rate_falls_and_returns() -> None:
    rates = []

    class Look(Policy):
        def after_step(self, ctx: Context) -> None:
            assert ctx.hyperparameters.learning_rate == 0.4

    async with world(2) as comms:

        async def main(comm: Communicator) -> None:
            guard = GuardSteps(lower_rate=(0.5, 2))
            given = Hyperparameters(learning_rate=0.4)
            async with Adaptation(comm, [Look(), guard], hyperparameters=given) as adaptation:
                for number in range(5):
                    async with adaptation.step() as step:
                        rates.append((number, adaptation.learning_rate))
                        await step.guarded(np.ones(3), loss=math.nan if number == comm.rank == 1 else 1.0)

        await asyncio.gather(*map(main, comms))
    assert sorted(set(rates)) == [(0, 0.4), (1, 0.4), (2, 0.2), (3, pytest.approx(0.3)), (4, 0.4)]


@pytest.mark.asyncio
async def test_observations_of_a_void_step_are_dropped() -> None:
    seen = []

    class Look(Policy):
        def after_step(self, ctx: Context) -> None:
            assert ctx.metrics is not None
            seen.append(ctx.metrics.observed.get("loss"))

    async with world(2) as comms:

        async def main(comm: Communicator) -> None:
            async with Adaptation(comm, [GuardSteps(), Look()]) as adaptation:
                for number in range(3):
                    async with adaptation.step() as step:
                        loss = math.nan if number == 1 else float(number)
                        adaptation.observe(loss=loss)
                        await step.guarded(np.ones(3), loss=loss)

        await asyncio.gather(*map(main, comms))
    assert seen[::2] == [(0.0, 0.0), (None, None), (2.0, 2.0)]


@pytest.mark.asyncio
async def test_never_finite_raises_on_all_ranks() -> None:
    async with world(2) as comms:

        async def main(comm: Communicator) -> str:
            with pytest.raises(GuardFailed, match="3 steps in a row are void") as error:
                await trained(comm, 5, {(n, 1): math.nan for n in range(5)}, policies=[GuardSteps(most_in_a_row=3)])
            return str(error.value)

        one, two = await asyncio.gather(*map(main, comms))
        assert one == two
        await works(comms)


@pytest.mark.asyncio
async def test_no_message_more_in_good_steps() -> None:
    """Counted by the engine: a guarded exchange takes as many collectives as one without a guard."""
    counts = []
    for policies in ([Policy()], [GuardSteps()]):
        async with world(2) as comms:

            async def main(comm: Communicator, policies: Any = policies) -> tuple[int, ...]:
                found: list[int] = []

                class Count(Policy):
                    def after_step(self, ctx: Context) -> None:
                        assert ctx.metrics is not None
                        found.append(ctx.metrics.counts[0])

                await trained(comm, 6, {}, policies=[*policies, Count()])
                return tuple(found)

            counts.append((await asyncio.gather(*map(main, comms)))[0][1:])
    assert counts[0] == counts[1]


@pytest.mark.asyncio
async def test_replay_judges_alike(tmp_path: Any) -> None:
    wrong: Wrong = {(1, 1): math.nan, (2, 0): ZeroDivisionError("x"), (3, 0): ("loss", math.inf), (27, 1): 1e7}
    path = tmp_path / "run.jsonl"
    options: dict[str, Any] = {"lower_rate": (0.5, 3)}
    async with world(2) as comms:
        found = await asyncio.gather(
            *(trained(comm, 30, wrong, policies=[GuardSteps(**options)], record=path, every=3) for comm in comms)
        )
    assert found[0][1] == [1, 2, 3, 27]
    assert len(found[0][2].decisions) == 4
    assert await asyncio.to_thread(replay, GuardSteps(**options), path) == found[0][2].decisions


@pytest.mark.asyncio
async def test_unlike_options_are_an_error_on_all_ranks() -> None:
    async with world(3) as comms:

        async def main(comm: Communicator) -> str:
            guard = GuardSteps(z=5 if comm.rank == 2 else 6)
            with pytest.raises(CollectiveMismatch, match=r"rank 0 by z=6, .*; rank 2 by z=5, ") as error:
                await trained(comm, 2, {(0, 1): ZeroDivisionError("x")}, policies=[guard])
            return str(error.value)

        found = await asyncio.gather(*map(main, comms))
        assert found[0] == found[1] == found[2]
        await works(comms)


@pytest.mark.asyncio
async def test_wrong_use() -> None:
    async with world(1) as comms:
        async with Adaptation(comms[0], [GuardSteps()]) as adaptation, adaptation.step() as step:
            with pytest.raises(ConfigError, match="'max'"):
                await step.guarded(np.ones(3), op="max")
            with pytest.raises(ConfigError, match="loss is a number"):
                await step.guarded(np.ones(3), loss="high")
            await step.guarded(np.ones(3), loss=np.ones(1))
            with pytest.raises(ConfigError, match="exchanged already"):
                await step.guarded(np.ones(3))
        rounding = SynchronousSGD(comms[0], wire_dtype="float16")
        async with Adaptation(comms[0], [GuardSteps()]) as adaptation, adaptation.step() as step:
            with pytest.raises(ConfigError, match="leave out wire_dtype='float16'"):
                await step.guarded(np.ones(3), way=rounding)
        with pytest.raises(ConfigError, match="one GuardSteps"):
            Adaptation(comms[0], [GuardSteps(), GuardSteps()])
        await works(comms)


# ---------------------------------------------------------------- the blocking form


@pytest.mark.parametrize("way", [None, *WAYS])
def test_blocking_form(way: str | None) -> None:
    def main(comm: sync.Communicator) -> tuple[list[int], list[Any]]:
        model, void = fresh(), []
        made = None if way is None else WAYS[way](comm)
        wrong: Wrong = {(0, 0): FloatingPointError("x"), (2, 1): math.nan, (4, 1): ZeroDivisionError("y")}
        with sync.Adaptation(comm, [GuardSteps()]) as adaptation:
            for number in range(6):
                with adaptation.step() as step:
                    grads, loss = gradients_of(model, number, comm.rank, wrong)
                    mean = step.guarded(grads, loss=loss, way=made)
                    model = {name: x - mean[name] for name, x in model.items()}
                if step.is_void:
                    void.append(number)
        assert all(np.isfinite(x).all() for x in model.values())
        return void, adaptation.decisions

    with sync_world(2) as comms:
        found = run_threads(comms, main)
    assert found[0] == found[1]
    assert found[0][0] == [0, 2, 4]


def test_blocking_step_has_what_the_async_one_has() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(adapt.Step) - public(BlockingStep) == {"end", "give_up"}
