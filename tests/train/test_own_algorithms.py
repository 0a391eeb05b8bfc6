"""Algorithms of a program's own, as it would write them: made by description, with state, switched to and from."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from kfcomm.compression import TopK
from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.errors import CollectiveMismatch, ConfigError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import SMA, Agreement, Algorithm, SynchronousSGD, call, copied, leaves, mapped, rebuilt, swapped


class Gossip(Agreement):
    """x ← (x + x_peer) / 2, over a random matching of the ranks in each step."""

    default_name = "gossip"

    def __init__(self, comm: Any, seed: int = 0, *, name: str | None = None) -> None:
        super().__init__(comm, name, {"seed": seed})
        self._seed = seed

    def _parameters(self, tree: Any) -> Any:
        order = np.random.default_rng((self._seed, self.num_steps)).permutation(self.comm.size).tolist()
        place = order.index(self.comm.rank) ^ 1
        if place == len(order):
            return tree
        theirs = yield from swapped(self.comm, tree, order[place], f"{self.name}/model")
        return tree if theirs is None else mapped(lambda x, other: (x + other) / 2, tree, theirs)


class SlowMean(Agreement):
    """Mean of gradients with momentum, of their largest numbers; what is left out is kept for the next step."""

    default_name = "slow-mean"
    takes_model = True
    shares_gradients = True
    shared_state = ("_velocity",)
    rank_state: ClassVar = {"_rest": "sum", "_top": "sum"}

    def __init__(self, comm: Any, model: Any, momentum: float = 0.5, *, name: str | None = None) -> None:
        problem = None if 0 <= momentum < 1 else f"momentum is at least 0 and below 1, not {momentum!r}"
        super().__init__(comm, name, {"momentum": momentum}, problem)
        self._momentum, self._top = momentum, TopK(0.5)
        self._start_from(model)

    def _start_from(self, model: Any) -> None:
        self._velocity = mapped(lambda x: 0 * x, model)
        self._rest = copied(self._velocity)

    def _gradients(self, tree: Any) -> Any:
        whole = mapped(lambda g, rest: g + rest, tree, self._rest)
        sent = mapped(np.round, whole)
        self._rest = mapped(lambda x, part: x - part, whole, sent)
        found = yield call("all_reduce_many", leaves(sent), f"{self.name}/sent", op="avg")
        self._velocity = mapped(lambda v, g: self._momentum * v + g, self._velocity, rebuilt(tree, found))
        return self._velocity


def model_of(rank: float) -> Any:
    return {"a": np.full(3, 1.0 * rank), "b": [np.full(2, 2.0 * rank)]}


@pytest.mark.asyncio
async def test_gossip_keeps_the_mean_and_comes_to_a_consensus() -> None:
    async def main(comm: Any) -> Any:
        way, model = Algorithm(Gossip, seed=4).made(comm, model_of(0)), model_of(comm.rank)
        for _ in range(60):
            model = await way.parameters(model)
        return model["a"][0]

    for size in (1, 2, 5):
        async with world(size, timeout=60) as comms:
            found = await run_ranks(comms, main)
        assert np.allclose(found, (size - 1) / 2, atol=1e-3)
        assert np.isclose(np.mean(found), (size - 1) / 2, rtol=1e-12)


def test_blocking_gossip_is_switched_to_and_from() -> None:
    def main(comm: Any) -> Any:
        model = model_of(comm.rank)
        for way in (SMA(comm, 0.1), Gossip(comm, seed=1), SynchronousSGD(comm)):
            for _ in range(3):
                pending = way.parameters(model)
                along = way.gradients(model_of(comm.rank)).wait()
                model = mapped(lambda x, g: x - 0.1 * g, pending.wait(), along)
        return model["a"][0]

    with sync_world(3, timeout=60) as comms:
        found = run_threads(comms, main)
    assert np.allclose(found, 1.0 - 9 * 0.1)


@pytest.mark.asyncio
async def test_state_of_an_algorithm_with_a_compressor_is_handed_and_divided() -> None:
    """Velocities and rests hold what was given: (1 − μ)·Σv + Σrest / n of momentum 0 is the sum."""
    async with world(3, elastic=True, timeout=60) as comms:

        async def main(comm: Any) -> Any:
            way = Algorithm(SlowMean, momentum=0.0).made(comm, model_of(0))
            state = State(way=way, sums=model_of(0), given=0.0, number=0, sizes=[])
            async with Elastic(comm, state) as elastic:
                async for _ in elastic.steps(ElasticSampler(1 << 10, 1)):
                    if state.number == 4 and comm.rank == 0:
                        await comm.propose_size(2)
                    found = await way.gradients(model_of(0.3 + 0.1 * comm.rank))
                    state.sums = mapped(lambda x, g: x + comm.size * g, state.sums, found)
                    state.given += sum(0.3 + 0.1 * rank for rank in range(comm.size))
                    state.number += 1
                    state.sizes = [*state.sizes, comm.size]
                    if state.sizes.count(2) == 4:
                        break
            if elastic.is_released:
                return None
            return state.sums["a"][0], state.given, way.state_dict()["rest"]["a"][0]

        found = [one for one in await run_ranks(comms, main) if one is not None]
        assert len(found) == 2
        sums, given, _ = found[0]
        assert np.isclose(sums + sum(rest for *_, rest in found), given, rtol=1e-12)


@pytest.mark.asyncio
async def test_own_algorithms_are_compared_and_refused_like_others() -> None:
    async def main(comm: Any) -> None:
        with pytest.raises(CollectiveMismatch, match=r"rank 0 has Gossip\(seed=0\); rank 1 has Gossip\(seed=1\)"):
            await Gossip(comm, comm.rank).parameters(model_of(0))
        with pytest.raises(ConfigError, match=r"SlowMean\(momentum=2.0\): momentum is at least 0"):
            await SlowMean(comm, model_of(0), 2.0 if comm.rank else 0.5, name="slow").gradients(model_of(0))

    async with world(2, timeout=60) as comms:
        await run_ranks(comms, main)


class Halved(Gossip):
    """Made in another way."""

    @classmethod
    def over(cls, comm: Any, model: Any, *, name: str | None = None, half: int = 2) -> Halved:  # type: ignore[override]
        return cls(comm, half // 2, name=name)


@pytest.mark.asyncio
async def test_descriptions_of_own_algorithms() -> None:
    async with world(1) as comms:
        comm = comms[0]
        made = Algorithm(lambda comm, model, *, name: SMA(comm, 0.3, name=name)).made(comm, model_of(0), "x")
        assert "SMA(alpha=0.3)" in repr(made)
        assert made.name == "x"
        assert "Gossip" not in repr(Algorithm(Halved, half=6).made(comm, model_of(0)))
        assert "seed=3" in repr(Algorithm(Halved, half=6).made(comm, model_of(0)))
        assert Algorithm.of("sma").made(comm, model_of(0)).name == "sma"
        assert Algorithm.of(Gossip).keeps_replicas
        assert not Algorithm.of(SlowMean).keeps_replicas
        with pytest.raises(ConfigError, match="made a dict, which is not an Agreement"):
            Algorithm(lambda comm, model, *, name: {}).made(comm, model_of(0))
    for given, options, says in (
        (Halved, {"seed": 1}, "unexpected keyword argument 'seed'"),
        (Gossip, {"sed": 1}, "unexpected keyword argument 'sed'"),
        (SlowMean, {"model": 1}, "multiple values for argument 'model'"),
        (lambda comm: None, {}, "too many positional arguments"),
    ):
        with pytest.raises(ConfigError, match=says):
            Algorithm(given, **options)


def test_kept_replicas_follow_shared_gradients() -> None:
    assert (Gossip.keeps_replicas, SlowMean.keeps_replicas) == (True, False)
