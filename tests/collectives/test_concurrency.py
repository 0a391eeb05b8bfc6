"""Names, not order: hundreds of collectives at once, posted differently on every rank, always the same bits."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import plans
from tests.conformance import oracle
from tests.conformance.worlds import everywhere, same_bits, turns, world


def _call(comm: Any, number: int, x: Any) -> Any:
    """One of many kinds of calls, by its number; the same on every rank."""
    name = f"key/{number}"
    match number % 8:
        case 0:
            return comm.all_reduce(x, name)
        case 1:
            return comm.reduce(x, number % comm.size, name, op="max")
        case 2:
            return comm.broadcast(x, number % comm.size, name)
        case 3:
            return comm.all_gather(x, name)
        case 4:
            return comm.all_gather(x[: comm.rank + number % 3], name, concat=True)
        case 5:
            return comm.reduce_scatter(x, name, op="min")
        case 6:
            return comm.scatter(x, number % comm.size, name)
    return comm.all_gather_object([comm.rank, number], name)


def _expected(number: int, rank: int, xs: list[Any], comms: Any) -> Any:
    size = len(xs)
    is_root = rank == number % size
    match number % 8:
        case 0:
            return oracle.all_reduced("sum", xs, comms[0].strategy, f"key/{number}")
        case 1:
            return np.max(xs, axis=0) if is_root else None
        case 2:
            return xs[number % size]
        case 3:
            return np.stack(xs)
        case 4:
            return np.concatenate([x[: one + number % 3] for one, x in enumerate(xs)])
        case 5:
            return oracle.scattered(np.min(xs, axis=0), size)[rank]
        case 6:
            return oracle.scattered(xs[number % size], size)[rank]
    return [[one, number] for one in range(size)]


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", ["auto", "ring", "clique", "binary_tree_star"])
@pytest.mark.parametrize("size", [2, 4, 7])
async def test_hundreds_of_names_in_another_order_on_every_rank(size: int, strategy: str) -> None:
    count = 1200 // size
    async with world(size, strategy=strategy) as comms:
        xs = [oracle.data("float64", 8 + size, rank) for rank in range(size)]
        shuffle = random.Random(size)

        async def main(comm: Any) -> dict[int, Any]:
            order = shuffle.sample(range(count), count)
            handles = {}
            for place, number in enumerate(order):
                handles[number] = _call(comm, number, xs[comm.rank])
                if place % (50 + 10 * comm.rank) == 0:
                    await turns(comm.rank)
            return dict(zip(handles, await asyncio.gather(*handles.values()), strict=True))

        for rank, got in enumerate(await everywhere(comms, main)):
            for number in range(count):
                want = _expected(number, rank, xs, comms)
                where = f"key/{number} on rank {rank}: {got[number]!r}, expected {want!r}"
                if isinstance(want, np.ndarray):
                    assert same_bits(got[number], want), where
                else:
                    assert got[number] == want, where


def _unnamed_call(comm: Any, number: int, x: Any) -> Any:
    match number % 5:
        case 0:
            return comm.all_reduce(x)
        case 1:
            return comm.all_gather(x, concat=True)
        case 2:
            return comm.all_gather_object(number)
        case 3:
            return comm.broadcast(x, number % comm.size)
    return comm.consensus(number)


@pytest.mark.asyncio
async def test_unnamed_calls_meet_in_program_order_among_named_ones() -> None:
    size, count = 3, 120
    async with world(size) as comms:

        async def main(comm: Any) -> list[Any]:
            local = random.Random(comm.rank)
            unnamed, names = [], [f"n{number}" for number in range(count)]
            local.shuffle(names)
            for number in range(count):
                x = np.array([number * 10 + comm.rank])
                unnamed.append(_unnamed_call(comm, number, x))
                if local.random() < 0.5:
                    await turns(local.randrange(4))
                unnamed.append(comm.all_reduce(np.ones(1), names[number]))
            return await asyncio.gather(*unnamed)

        for got in await everywhere(comms, main):
            for number in range(count):
                one = got[2 * number]
                match number % 5:
                    case 0:
                        assert one.tolist() == [30 * number + 3]
                    case 1:
                        assert one.tolist() == [10 * number + rank for rank in range(size)]
                    case 2:
                        assert one == [number] * size
                    case 3:
                        assert one.tolist() == [10 * number + number % size]
                    case 4:
                        assert one is True


@pytest.mark.asyncio
async def test_a_rank_that_posts_much_too_early_is_absorbed() -> None:
    """Far more than the credit for unposted keys waits on one rank, then all is well; nothing waits in order."""
    size, count = 3, 100
    async with world(size, strategy="ring") as comms:
        xs = [np.full(20_000, rank + 1.0) for rank in range(size)]
        early = [[comm.all_reduce(xs[comm.rank], f"k{number}") for number in range(count)] for comm in comms[1:]]
        await turns(200)
        assert not any(handle.done() for handles in early for handle in handles)
        last = [comms[0].all_reduce(xs[0], f"k{number}") for number in reversed(range(count))]
        for handles in (*early, last):
            for got in await asyncio.gather(*handles):
                assert got[0] == got[-1] == 6.0


@pytest.mark.asyncio
async def test_chunks_of_many_keys_interleave() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "CHUNK_NBYTES", 512)
        async with world(4, strategy="clique") as comms:
            xs = [oracle.data("float32", 5000, rank) for rank in range(4)]
            want = oracle.all_reduced("sum", xs, comms[0].strategy, "any")
            handles = [comm.all_reduce(xs[comm.rank], f"k{number}") for comm in comms for number in range(30)]
            assert all(same_bits(one, want) for one in await asyncio.gather(*handles))
