"""From each algorithm to each other one: all ranks continue with an agreed model, as if the other had begun with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import ConfigError
from kfcomm.testing import run_ranks, world
from kfcomm.train import SMA, Agreement, Algorithm, PairAveraging, SynchronousSGD, leaves, mapped

KINDS: dict[str, Algorithm] = {
    "ssgd": Algorithm("ssgd"),
    "adasum": Algorithm("adasum"),
    "sma": Algorithm("sma", alpha=0.2),
    "ea-sgd": Algorithm("ea-sgd", alpha=0.2, every=2),
    "local-sgd": Algorithm("local-sgd", every=3),
    "diloco": Algorithm("diloco", every=2),
    "local-adaalter": Algorithm("local-adaalter", every=3),
    "adasgd": Algorithm("adasgd", after=4),
    "pair-averaging": Algorithm("pair-averaging", seed=3),
}
SIZE = 3
NUM_BEFORE, NUM_AFTER = 5, 4


def first_model() -> Any:
    return {"layer": [np.linspace(-1, 1, 6).reshape(2, 3)], "bias": np.ones(2)}


def gradient(model: Any, step: int, rank: int) -> Any:
    random = np.random.default_rng((step, rank))
    return mapped(lambda x: 0.3 * (x - _like(random.standard_normal(tuple(x.shape)), x)), model)


def _like(found: Any, x: Any) -> Any:
    return found if isinstance(x, np.ndarray) else x.new_tensor(found)


async def awaited(way: Agreement, model: Any, steps: Sequence[int], given: Any = None) -> Any:
    """Train; the gradient of the first step is that of ``given``, if that is another model."""
    for step in steps:
        pending = way.parameters(model)
        along = await way.gradients(gradient(model if given is None else given, step, way.comm.rank))
        given, model = None, mapped(lambda x, g: x - g, await pending, along)
    return model


def mean(models: Sequence[Any]) -> Any:
    return mapped(lambda *xs: sum(xs) / len(xs), *models)


def same(one: Any, other: Any) -> bool:
    return all(np.allclose(x, leaves(other)[name], rtol=1e-12, atol=1e-12) for name, x in leaves(one).items())


async def expected(kind: str, models: Sequence[Any], first: int) -> list[Any]:
    """Result of an algorithm that begins with the mean of these models, in a world of its own."""
    async with world(SIZE) as comms:
        agreed = mean(models)

        async def main(comm: Any) -> Any:
            way = KINDS[kind].made(comm, agreed)
            return await awaited(way, agreed, range(first, first + NUM_AFTER), models[comm.rank])

        return await run_ranks(comms, main)


def check(kind: str, found: Sequence[Any], wanted: Sequence[Any], before: Sequence[Any]) -> None:
    if kind == "pair-averaging":  # whose results depend on who was quicker
        agreed, spread = leaves(mean(before)), leaves(mapped(lambda *xs: np.ptp(xs, axis=0), *found))
        assert all(np.max(x) < 2 for x in spread.values())
        assert all(np.max(np.abs(x - agreed[name])) < 2 for one in found for name, x in leaves(one).items())
    else:
        assert all(map(same, found, wanted))


@pytest.mark.parametrize("then", KINDS)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.asyncio
async def test_algorithm_begins_from_the_mean_that_another_leaves(first: str, then: str) -> None:
    """And the first one again from what that leaves, the same object."""
    async with world(SIZE, timeout=60) as comms:
        ways = [KINDS[first].made(comm, first_model()) for comm in comms]
        at = [NUM_BEFORE, NUM_BEFORE + NUM_AFTER]

        async def one(comm: Any) -> Any:
            return await awaited(ways[comm.rank], first_model(), range(at[0]))

        models = await run_ranks(comms, one)

        async def other(comm: Any) -> Any:
            model = models[comm.rank]
            return await awaited(KINDS[then].made(comm, model), model, range(at[0], at[1]))

        switched = await run_ranks(comms, other)
        check(then, switched, await expected(then, models, at[0]), models)

        async def again(comm: Any) -> Any:
            return await awaited(ways[comm.rank], switched[comm.rank], range(at[1], at[1] + NUM_AFTER))

        check(first, await run_ranks(comms, again), await expected(first, switched, at[1]), switched)


@pytest.mark.asyncio
async def test_models_are_equal_at_once_after_a_switch_to_pair_averaging() -> None:
    """A rank that is quick may not be given what a peer had published before."""
    for _ in range(5):
        async with world(SIZE, timeout=60) as comms:

            async def main(comm: Any) -> Any:
                pairs = PairAveraging(comm, first_model(), seed=1)
                model = await awaited(pairs, first_model(), range(4))
                model = await awaited(SMA(comm, 0.1), model, range(4, 8))
                return model, await pairs.parameters(model)

            models, agreed = zip(*await run_ranks(comms, main), strict=True)
            assert all(same(one, mean(models)) for one in agreed)


@pytest.mark.asyncio
async def test_algorithms_of_two_models_do_not_follow_each_other() -> None:
    """Under two names; and without names, as the models have other arrays."""

    async def alone(make: Callable[[Any], Agreement], model: Any) -> list[Any]:
        async with world(SIZE) as comms:
            return await run_ranks(comms, lambda comm: awaited(make(comm), model, range(6)))

    bias = np.zeros(4)
    for names in (("a", "b"), (None, None)):
        other = bias if names[0] is None else first_model()
        makers: list[Callable[[Any], Agreement]] = [
            lambda comm: SMA(comm, 0.3, name=names[0]),  # noqa: B023
            lambda comm: SynchronousSGD(comm, name=names[1]),  # noqa: B023
        ]
        async with world(SIZE, timeout=60) as comms:

            async def main(comm: Any) -> Any:
                ways, models = [make(comm) for make in makers], [first_model(), other]  # noqa: B023
                for step in range(6):
                    for place, way in enumerate(ways):
                        models[place] = await awaited(way, models[place], [step])
                return models

            found = await run_ranks(comms, main)
        for place, model in enumerate((first_model(), other)):
            wanted = await alone(makers[place], model)
            assert all(same(one[place], two) for one, two in zip(found, wanted, strict=True))


@pytest.mark.asyncio
async def test_gradients_of_unequal_models_are_refused_until_the_models_are_agreed() -> None:
    async with world(2, timeout=60) as comms:

        async def main(comm: Any) -> Any:
            model = await awaited(SMA(comm, 0.1), first_model(), range(3))
            way = SynchronousSGD(comm)
            for _ in range(2):
                with pytest.raises(
                    ConfigError, match=r"differ since SMA\(alpha=0.1\), .* call its parameters\(model\)"
                ):
                    await way.gradients(gradient(model, 3, comm.rank))
            return await awaited(way, model, range(3, 6))

        one, other = await run_ranks(comms, main)
        assert same(one, other)


@pytest.mark.asyncio
async def test_switch_that_fails_is_made_at_the_next_attempt() -> None:
    async with world(2, timeout=60) as comms:

        async def main(comm: Any) -> Any:
            model = await awaited(SMA(comm, 0.1), first_model(), range(3))
            way = SynchronousSGD(comm)
            with pytest.raises(Exception, match="layer"):
                await way.parameters({**model, "layer": [np.zeros((2, 3), np.float32 if comm.rank else np.float64)]})
            return model, await way.parameters(model)

        models, agreed = zip(*await run_ranks(comms, main), strict=True)
        assert all(same(one, mean(models)) for one in agreed)
