"""Values that differ between ranks, over joins, releases and losses: as a simulation in one process has them."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticCommunicator, ElasticSampler, PerRank, State
from kfcomm.errors import EpochChanged
from kfcomm.testing import Join, Kill, Resize, VirtualRun, run_in_virtual_time

LENGTH, BATCH, WIDTH = 240, 12, 5


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def change(uid: int, step: int) -> np.ndarray[Any, Any]:
    """Change of each rank's own values in a step."""
    return np.random.RandomState([uid, step]).standard_normal(WIDTH)


class Residuals:
    """Object with values that differ between ranks."""

    def __init__(self) -> None:
        self.center = np.zeros(WIDTH)
        self.errors: dict[int, Any] = {}
        self.replica = (np.zeros(WIDTH, np.complex128), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"center": self.center, "errors": self.errors, "replica": self.replica}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        self.errors.clear()  # as some do it, whose state_dict returns what they hold
        self.center[:] = 0
        self.center += tree["center"]
        self.errors.update(tree["errors"])
        self.replica = tree["replica"]

    def merging(self) -> dict[str, str]:
        return {"errors": "sum", "replica": "mean"}


Values = dict[str, np.ndarray[Any, Any]]


class Records:
    """Values of all ranks at the beginning of each of their steps, and after the changes of that step."""

    def __init__(self) -> None:
        self.births: dict[tuple[int, int], tuple[int, ...]] = {}  # by uid and number of the step, or of its repetition
        self.done: dict[int, int] = {}  # number of complete steps before this one
        self.before: dict[tuple[int, int], Values] = {}
        self.after: dict[tuple[int, int], Values] = {}


def values_of(state: State) -> Values:
    """Copy of what differs between ranks."""
    errors = np.concatenate([np.zeros(0), *state.residuals.errors.values()])
    return {
        "sum/bank": state.bank["x"].copy(), "sum/errors": errors if errors.size else np.zeros(2 * WIDTH),
        "mean/weights": state.weights.copy(), "mean/few": np.array(state.few[0]),
        "mean/replica": state.residuals.replica[0].copy(), "mean/number": np.array(state.residuals.replica[1]),
    }  # fmt: skip


def apply(state: State, mine: np.ndarray[Any, Any]) -> None:
    """Change all values of a rank."""
    state.weights += mine
    state.few = (state.few[0] + mine[0], "text")
    state.bank["x"] -= mine
    residuals = state.residuals
    for key in (3, 10):
        residuals.errors[key] = residuals.errors.get(key, 0) + key * mine
    residuals.replica = (residuals.replica[0] + 1j * mine, residuals.replica[1] + mine[1])
    residuals.center += 1


async def train(comm: Any, records: Records, on_loss: str, *, is_nested: bool) -> tuple[int, ...]:
    """Change the values of each rank by other numbers in each step."""
    elastic_comm = ElasticCommunicator(comm)
    weights, inner = np.zeros(WIDTH), ElasticSampler(6, 3)
    state = State(
        weights=PerRank(weights, "mean"), few=PerRank((0.0, "text"), "mean"), shared=np.zeros(WIDTH),
        bank=PerRank({"x": np.zeros(WIDTH)}, "sum"), residuals=Residuals(), done=0,
    )  # fmt: skip
    async with Elastic(elastic_comm, state, on_loss=on_loss) as elastic:
        uid = elastic_comm.births[elastic_comm.rank]
        async for step in elastic.steps(ElasticSampler(LENGTH, BATCH, seed=3)):
            with step if on_loss == "restart_step" else contextlib.suppress(EpochChanged):
                place = uid, step.number
                records.done[step.number] = state.done
                records.births[place] = elastic_comm.births
                records.before[place] = values_of(state)
                mine = change(uid, state.done)
                total = await elastic_comm.all_reduce(mine, "x")
                if is_nested:
                    async for _ in elastic.steps(inner):
                        await elastic_comm.all_reduce(mine, "inner")
                await elastic_comm.barrier("end")
                state.shared += total
                apply(state, mine)
                records.after[place] = values_of(state)
                state.done += 1
    assert state.weights is weights
    assert state.few[1] == "text"
    assert not state.residuals.center.any() or (state.residuals.center == state.done).all()
    return elastic_comm.births


def converted(values: dict[int, Values], having: tuple[int, ...], parts: float) -> Values:
    """Values of each rank after a conversion of those that these ranks had; sums are split into parts."""
    found = {}
    for name in next(iter(values.values())):
        total = sum((values[uid][name] for uid in having), np.zeros(()))
        found[name] = total / (len(having) if name.startswith("mean") else parts)
    return found


def subsets(fixed: set[int], others: set[int]) -> Iterator[tuple[int, ...]]:
    """Supersets of some ranks with others of them."""
    for some in itertools.chain.from_iterable(
        itertools.combinations(sorted(others), n) for n in range(len(others) + 1)
    ):
        yield *sorted(fixed), *some


def outcomes(
    values: dict[int, Values], births: tuple[int, ...], after: tuple[int, ...], dead: set[int]
) -> Iterator[Values]:
    """Possible values after a change: ranks that died may have taken part in it before, in one of two conversions."""
    doomed = dead & set(births)
    for having in subsets(set(births) - doomed, doomed & set(values)):
        yield converted(values, having, len(having))
        for left in subsets(set(births) - doomed, doomed & set(having)):
            yield converted(values, having, len(after) * len(having) / len(left))


def same(one: Values, other: Values) -> bool:
    return all(np.allclose(one[name], other[name], rtol=1e-12, atol=1e-12) for name in one)


def check(run: VirtualRun, records: Records, killed: set[int]) -> int:
    """Check each transition between two steps; returns how many changed the ranks."""
    num_changed = 0
    for last, step in itertools.pairwise(sorted(records.done)):  # steps of the walk within it are counted, too
        here = {uid: births for (uid, number), births in records.births.items() if number == step}
        former = [births for (uid, number), births in records.births.items() if number == last and uid not in killed]
        births, after = former[0], next(births for uid, births in here.items() if uid not in killed)
        before = {uid: records.before[uid, step] for uid in after if (uid, step) in records.before}
        # A step that is repeated has changed nothing.
        ended = records.after if records.done[step] > records.done[last] else records.before
        mine = {uid: ended[uid, last] for uid in births if (uid, last) in ended}
        if births == after:
            assert all(same(mine[uid], before[uid]) for uid in before)
            continue
        num_changed += 1
        first = next(iter(before.values()))
        assert all(one[name].tobytes() == first[name].tobytes() for one in before.values() for name in first)
        assert any(same(first, one) for one in outcomes(mine, births, after, killed)), (step, births, after)
    return num_changed


def plan_of(random: Random, size: int) -> list[Any]:
    """Some of the ranks die, some come, and sizes are asked for."""
    events: list[Any] = [
        Kill(rank, random.uniform(0.005, 0.06)) for rank in random.sample(range(size), random.randrange(min(size, 3)))
    ]
    events += [Join(rank, random.uniform(0, 0.05)) for rank in range(size, size + random.randrange(3))]
    return [*events, Resize(random.choice([2, 3, 4, 5]), random.uniform(0, 0.05))]


def search(seed: int, on_loss: str, size: int = 4, *, is_nested: bool = False) -> int:
    random, records = Random(seed), Records()
    events = plan_of(random, size)
    killed = {one.rank for one in events if isinstance(one, Kill)}

    async def main(comm: Any) -> Any:
        return await train(comm, records, on_loss, is_nested=is_nested)

    run = run_in_virtual_time(main, size, seed=seed, events=events, timeout=30.0)
    assert not run.failed, run.failed
    return check(run, records, killed)


@pytest.mark.parametrize("on_loss", ["finish", "raise", "restart_step"])
def test_values_of_ranks_are_converted_as_in_a_simulation(on_loss: str) -> None:
    assert sum(search(seed, on_loss) for seed in range(6)) > 3


@pytest.mark.parametrize("seed", [910036, 910039, 910051])
def test_rank_that_dies_beside_joining_ranks_is_a_change_of_its_own(seed: int) -> None:
    assert search(seed, "finish", 2) == 2


def test_values_of_ranks_are_converted_between_steps_of_the_outer_walk() -> None:
    assert sum(search(seed, "finish", is_nested=True) for seed in range(40, 50)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("on_loss", ["finish", "raise", "restart_step"])
def test_values_of_ranks_are_converted_as_in_a_simulation_for_many_seeds(on_loss: str) -> None:
    for size in (2, 3, 4):
        assert sum(search(100 * size + seed, on_loss, size) for seed in range(20)) > 5


@pytest.mark.slow
def test_values_of_ranks_are_converted_in_nested_walks_for_many_seeds() -> None:
    for size in (2, 3, 4):
        assert sum(search(1000 * size + seed, "finish", size, is_nested=True) for seed in range(20)) > 5
