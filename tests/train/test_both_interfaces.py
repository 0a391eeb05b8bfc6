"""The same ways over communicators of both interfaces: what is awaited, what is waited for, what goes wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm import Communicator, sync
from kfcomm.errors import CollectiveError, CollectiveMismatch, ConfigError, KfcommError
from kfcomm.testing import run_ranks, run_threads, sync_world, world
from kfcomm.train import (
    SMA,
    AdaSGD,
    Agreement,
    DiLoCo,
    ElasticAveraging,
    LocalAdaAlter,
    LocalSGD,
    PairAveraging,
    SynchronousSGD,
    adasgd,
)

TREE = {"weight": np.zeros((3, 4), np.float32), "bias": [np.zeros(4, np.float32)]}

WAYS: dict[str, Callable[[Any], Agreement]] = {
    "ssgd": SynchronousSGD,
    "sma": lambda comm: SMA(comm, 0.2),
    "elastic": lambda comm: ElasticAveraging(comm, TREE, 0.1),
    "local": lambda comm: LocalSGD(comm, 2),
    "diloco": lambda comm: DiLoCo(comm, TREE, every=2),
    "adaalter": lambda comm: LocalAdaAlter(comm, TREE, 2),
    "adasgd": lambda comm: AdaSGD(comm, after=2),
}


def gradient(model: Any, rank: int) -> Any:
    """Of ½‖x − rank‖²."""
    return {"weight": model["weight"] - rank, "bias": [model["bias"][0] - rank]}


def applied(model: Any, grads: Any) -> Any:
    return {"weight": model["weight"] - 0.2 * grads["weight"], "bias": [model["bias"][0] - 0.2 * grads["bias"][0]]}


async def awaited(comm: Communicator, way: Agreement) -> Any:
    model: Any = TREE
    for _ in range(5):
        pending = way.parameters(model)
        grads = await way.gradients(gradient(model, comm.rank))
        model = applied(await pending, grads)
    return model


def waited_for(comm: sync.Communicator, way: Agreement) -> Any:
    model: Any = TREE
    for _ in range(5):
        pending = way.parameters(model)
        grads = way.gradients(gradient(model, comm.rank)).wait()
        model = applied(pending.wait(), grads)
        assert pending.done()
    return model


@pytest.mark.asyncio
@pytest.mark.parametrize(("way", "elastic"), [*((way, False) for way in WAYS), ("sma", True)])
async def test_both_interfaces_come_to_the_same(way: str, elastic: bool) -> None:
    async with world(3, elastic=elastic) as comms:
        one = await run_ranks(comms, lambda comm: awaited(comm, WAYS[way](comm)))

    def blocking() -> list[Any]:
        with sync_world(3, elastic=elastic) as comms:
            return run_threads(comms, lambda comm: waited_for(comm, WAYS[way](comm)))

    other = await asyncio.to_thread(blocking)
    for mine, theirs in zip(one, other, strict=True):
        assert mine["weight"].dtype == np.float32
        assert np.array_equal(mine["weight"], theirs["weight"])
        assert np.array_equal(mine["bias"][0], theirs["bias"][0])
    assert not np.array_equal(one[0]["weight"], TREE["weight"])


def test_adasgd_of_arrays_on_a_device_changes_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wish to change travels beside them, since a batch is all in host memory or all on a device."""

    def main(comm: sync.Communicator) -> tuple[Any, bool]:
        way = AdaSGD(comm)
        model: Any = TREE
        for step in range(4):
            if (step, comm.rank) == (1, 1):
                way.change()
            pending = way.parameters(model)
            model = applied(pending.wait(), way.gradients(gradient(model, comm.rank)).wait())
        return model, way.is_synchronous

    found = []
    for is_far in (False, True):
        monkeypatch.setattr(adasgd, "is_on_device", lambda _, is_far=is_far: is_far)
        with sync_world(2) as comms:
            found.append(run_threads(comms, main))
    for (one, was_changed), (other, is_changed) in zip(*found, strict=True):
        assert was_changed
        assert is_changed
        assert np.array_equal(one["weight"], other["weight"])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda comm, bad: ElasticAveraging(comm, TREE, 0.6 if bad else 0.5), r"at most 0.5, not 0.6"),
        (lambda comm, bad: PairAveraging(comm, TREE, weights=[0.0, 0.0] if bad else None), r"weights are .* not all 0"),
        (lambda comm, bad: PairAveraging(comm, TREE, weights=[1.0] if bad else None), r"2 ranks have 2 weights"),
        (lambda comm, bad: PairAveraging(comm, TREE, max_staleness=0.0 if bad else 9.0), r"max_staleness is above 0"),
        (lambda comm, bad: DiLoCo(comm, TREE, momentum=1.5 if bad else 0.9), r"momentum is .* not 1.5"),
        (lambda comm, bad: AdaSGD(comm, after=0 if bad else 3), r"after is a whole number"),
    ],
)
async def test_invalid_argument_of_one_rank_raises_on_all(make: Callable[[Any, bool], Agreement], says: str) -> None:
    async def main(comm: Communicator) -> str:
        with pytest.raises(ConfigError, match=says) as caught:
            await make(comm, comm.rank == 1).parameters(TREE)
        return str(caught.value)

    async with world(2) as comms:
        other, bad = await run_ranks(comms, main)
    assert other.startswith(f"rank 1 has {bad}; rank 0 has ")


@pytest.mark.asyncio
async def test_ranks_that_go_different_ways_see_both_sides_whatever_they_call_first() -> None:
    """Also without a name: the default name of an algorithm cannot be the name of the check."""

    async def main(comm: Communicator) -> str:
        way: Agreement = SynchronousSGD(comm) if comm.rank else AdaSGD(comm, 0.1)
        pending = way.parameters(TREE)
        with pytest.raises(CollectiveMismatch):
            await way.gradients(TREE)
        with pytest.raises(CollectiveMismatch) as caught:
            await pending
        return str(caught.value)

    async with world(2) as comms:
        said = await run_ranks(comms, main)
    assert "rank 0 has AdaSGD(alpha=0.1, after=None); rank 1 has SynchronousSGD(op='avg'" in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
@pytest.mark.asyncio
async def test_gradients_are_rounded_on_their_way_only(wire_dtype: str) -> None:
    async def main(comm: Communicator) -> Any:
        way = SynchronousSGD(comm, wire_dtype=wire_dtype)
        return await way.gradients({"a": np.array([1 + 2**-20, comm.rank], np.float32), "b": np.ones(2)})

    async with world(2) as comms:
        for found in await run_ranks(comms, main):
            assert found["a"].tolist() == [1.0, 0.5]
            assert (found["a"].dtype, found["b"].dtype) == (np.float32, np.float64)


@pytest.mark.asyncio
async def test_trees_that_differ_are_an_error_on_all() -> None:
    async def main(comm: Communicator) -> None:
        tree = {"weight": np.zeros(3 + comm.rank)}
        with pytest.raises(CollectiveError, match="weight"):
            await SynchronousSGD(comm).gradients(tree)

    async with world(2) as comms:
        await run_ranks(comms, main)


@pytest.mark.asyncio
async def test_pending_is_awaited_or_waited_for_by_interface() -> None:
    async with world(1) as comms:
        pending = SMA(comms[0]).parameters(TREE)
        with pytest.raises(ConfigError, match="write await"):
            pending.wait()
        await pending
        assert pending.done()
        assert (await pending)["weight"].shape == (3, 4), "it can be awaited again"
        with pytest.raises(ConfigError, match="without arrays"):
            await SMA(comms[0], name="other").parameters({})

    def blocking() -> None:
        with sync_world(1) as comms:
            pending = SMA(comms[0]).parameters(TREE)
            with pytest.raises(ConfigError, match="write wait"):
                pending.__await__().send(None)
            pending.wait()
            assert not pending.cancel()

    await asyncio.to_thread(blocking)


def test_a_wait_can_be_bounded_and_goes_on() -> None:
    with sync_world(2) as comms:
        way = SMA(comms[0])
        pending = way.parameters(TREE)
        with pytest.raises(TimeoutError):
            pending.wait(0.01)
        assert not pending.done()
        other = SMA(comms[1]).parameters(TREE)

        def main(comm: sync.Communicator) -> Any:
            return (pending if comm.rank == 0 else other).wait()

        assert all(found["weight"].shape == (3, 4) for found in run_threads(comms, main))


@pytest.mark.asyncio
async def test_cancelling_ends_it_on_every_rank() -> None:
    async with world(2) as comms:
        ways = [SMA(comm) for comm in comms]
        await asyncio.gather(*(way.parameters(TREE) for way in ways))
        pending = ways[0].parameters(TREE)
        assert pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        with pytest.raises(KfcommError):
            await ways[1].parameters(TREE)


def test_cancelling_a_blocking_one_ends_it_on_every_rank() -> None:
    with sync_world(2) as comms:
        ways = [SMA(comm) for comm in comms]
        run_threads(comms, lambda comm: ways[comm.rank].parameters(TREE).wait())
        pending = ways[0].parameters(TREE)
        assert pending.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            pending.wait()
        with pytest.raises(KfcommError):
            ways[1].parameters(TREE).wait()
