"""Algorithms of `kfcomm.train` on torch tensors and JAX arrays: the results of NumPy arrays, in the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import Communicator
from kfcomm.testing import run_ranks, world
from kfcomm.train import (
    SMA,
    AdaSGD,
    Agreement,
    DiLoCo,
    ElasticAveraging,
    GradientMonitor,
    LocalAdaAlter,
    LocalSGD,
    PairAveraging,
    ParameterServer,
    SynchronousSGD,
)

jax = pytest.importorskip("jax", reason="JAX is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

KINDS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "jax": (jax.Array, jax.numpy.asarray),
    "torch": (torch.Tensor, torch.from_numpy),
}

WAYS: dict[str, Callable[[Communicator, Any], Agreement]] = {
    "ssgd": lambda comm, tree: SynchronousSGD(comm, monitor=GradientMonitor(comm, 8)),
    "adasum": lambda comm, tree: SynchronousSGD(comm, op="adasum"),
    "sma": lambda comm, tree: SMA(comm),
    "elastic": lambda comm, tree: ElasticAveraging(comm, tree, 0.1),
    "local": lambda comm, tree: LocalSGD(comm, 1),
    "diloco": lambda comm, tree: DiLoCo(comm, tree, every=1),
    "adaalter": lambda comm, tree: LocalAdaAlter(comm, tree, 1),
    "adasgd": lambda comm, tree: AdaSGD(comm, after=1),
    "pairs": PairAveraging,
}


def tree_of(convert: Callable[[Any], Any], rank: int) -> Any:
    return {"w": convert(np.full((3, 2), float(rank), np.float32)), "b": [convert(np.ones(2, np.float32))]}


async def results(way: str, convert: Callable[[Any], Any]) -> list[Any]:
    async def main(comm: Communicator) -> Any:
        tree = tree_of(convert, comm.rank)
        agreement = WAYS[way](comm, tree)
        for _ in range(2):
            pending = agreement.parameters(tree)
            gradients = await agreement.gradients(tree)
            model = await pending
        return gradients, model

    async with world(2) as comms:
        return await run_ranks(comms, main)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_it_gives_what_numpy_gives(kind: str, way: str) -> None:
    type_, convert = KINDS[kind]
    found, expected = await results(way, convert), await results(way, np.array)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert isinstance(one["w"], type_)
            assert isinstance(one["b"][0], type_)
            np.testing.assert_allclose(np.asarray(one["w"]), other["w"], rtol=1e-6)
            np.testing.assert_allclose(np.asarray(one["b"][0]), other["b"][0], rtol=1e-6)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_parameter_server(kind: str) -> None:
    type_, convert = KINDS[kind]

    async def main(comm: Communicator) -> Any:
        tree = tree_of(convert, 0)
        server = ParameterServer(comm, tree, lambda xs, gs: {name: x - 0.5 * gs[name] for name, x in xs.items()})
        serving = server.serve()
        await server.push(tree_of(convert, 1))
        await server.finish()
        await serving
        await comm.barrier()
        return await server.pull()

    async with world(2) as comms:
        for found in await run_ranks(comms, main):
            assert isinstance(found["w"], type_)
            assert np.asarray(found["w"]).tolist() == [[-1.0, -1.0]] * 3


async def switched(first: str, then: str, convert: Callable[[Any], Any]) -> list[Any]:
    """Models after a step of the first algorithm, and two of the other, whose own model differs between ranks."""

    async def main(comm: Communicator) -> Any:
        tree = tree_of(convert, comm.rank)
        for way in (WAYS[first](comm, tree), WAYS[then](comm, tree)):
            for _ in range(2):
                pending = way.parameters(tree)
                await way.gradients(tree)
                tree = await pending
        await comm.barrier()
        return tree

    async with world(2) as comms:
        return await run_ranks(comms, main)


@pytest.mark.asyncio
@pytest.mark.parametrize("then", WAYS)
@pytest.mark.parametrize("first", ["ssgd", "diloco", "adasgd", "pairs"])
async def test_switching_gives_what_numpy_gives(first: str, then: str) -> None:
    numpy = await switched(first, then, np.array)
    for type_, convert in KINDS.values():
        for mine, theirs in zip(await switched(first, then, convert), numpy, strict=True):
            assert isinstance(mine["w"], type_)
            if "pairs" not in (first, then):  # where it depends on who was quicker
                np.testing.assert_allclose(np.asarray(mine["w"]), theirs["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.asyncio
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_state_from_host_memory_is_loaded_in_the_kind_of_the_model(kind: str, way: str) -> None:
    type_, convert = KINDS[kind]
    async with world(1) as comms:
        (one, other) = (WAYS[way](comms[0], tree_of(convert, 1)) for _ in range(2))
        await one.parameters(tree_of(convert, 2))
        state = jax.tree.map(
            lambda x: np.array(x.tolist(), np.float32) if isinstance(x, type_) else x, one.state_dict()
        )
        other.load_state_dict(state)
        kinds, loaded = jax.tree.map(type, one.state_dict()), jax.tree.map(type, other.state_dict())
        assert kinds == loaded
        await other.gradients(tree_of(convert, 2))
        await other.parameters(tree_of(convert, 2))
