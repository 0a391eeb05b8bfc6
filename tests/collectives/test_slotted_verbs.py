"""The other verbs under the direct strategy: in slots where memory is shared, along stars else, with equal results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.core.signature import split
from kfcomm.errors import CollectiveAborted
from kfcomm.strategies.base import DIRECT_NBYTES
from kfcomm.world.communicator import Communicator
from tests.collectives.test_direct import is_slotted
from tests.conformance import oracle, worlds
from tests.conformance.oracle import CASES
from tests.conformance.worlds import assert_kinds, everywhere, heard_of_the_end, same_bits, turns, world

USES = 4
ROWS = (0, 1, 3, 4099)
"""Fewer than ranks, none at all, and too much for a copy to be sent."""

Inputs = list[Any]
Call = Callable[[Communicator, Inputs, str], Any]
Expect = Callable[[Inputs, Any, int], Any]


def _mine(xs: Inputs, size: int, rank: int) -> list[Any]:
    """Inputs of all ranks for one of them."""
    parts = [split(len(xs[0]) // size * size, size)[rank]] * size
    return [x[at : at + length] for x, (at, length) in zip(xs, parts, strict=True)]


VERBS: dict[str, tuple[Call, Expect]] = {
    "broadcast": (
        lambda comm, xs, name: comm.broadcast(xs[comm.rank], comm.size - 1, name),
        lambda xs, strategy, rank: xs[-1],
    ),
    "reduce": (
        lambda comm, xs, name: comm.reduce(xs[comm.rank], comm.size - 1, name),
        lambda xs, strategy, rank: oracle.reduced("sum", xs, strategy, rank) if rank == len(xs) - 1 else None,
    ),
    "reduce to the first": (
        lambda comm, xs, name: comm.reduce(xs[comm.rank], 0, name, op="avg"),
        lambda xs, strategy, rank: None if rank else oracle.reduced("avg", xs, strategy, 0),
    ),
    "gather": (
        lambda comm, xs, name: comm.gather(xs[comm.rank], 0, name),
        lambda xs, strategy, rank: None if rank else np.stack(xs),
    ),
    "all_gather": (
        lambda comm, xs, name: comm.all_gather(xs[comm.rank], name),
        lambda xs, strategy, rank: np.stack(xs),
    ),
    "reduce_scatter": (
        lambda comm, xs, name: comm.reduce_scatter(xs[comm.rank], name),
        lambda xs, strategy, rank: oracle.reduce_scattered("sum", xs, strategy)[rank],
    ),
    "all_to_all": (
        lambda comm, xs, name: comm.all_to_all(xs[comm.rank][: len(xs[0]) // comm.size * comm.size], name),
        lambda xs, strategy, rank: np.concatenate(_mine(xs, len(xs), rank)),
    ),
}
"""Verbs whose result shape every rank knows by itself."""

IN_WINDOWS = ("all_gather", "reduce_scatter")
"""Those with slots for long arrays, too."""

TOLD: dict[str, tuple[Call, Expect]] = {
    "scatter": (
        lambda comm, xs, name: comm.scatter(xs[0] if comm.rank == 0 else None, 0, name),
        lambda xs, strategy, rank: oracle.scattered(xs[0], len(xs))[rank],
    ),
    "all_gather of unlike": (
        lambda comm, xs, name: comm.all_gather(xs[comm.rank][comm.rank :], name, concat=True),
        lambda xs, strategy, rank: np.concatenate([x[other:] for other, x in enumerate(xs)]),
    ),
    "gather of unlike": (
        lambda comm, xs, name: comm.gather(xs[comm.rank][: comm.rank], 0, name, concat=True),
        lambda xs, strategy, rank: None if rank else np.concatenate([x[:other] for other, x in enumerate(xs)]),
    ),
}
"""Those that tell each other how much there is first: they are not compiled."""


def _is(got: Any, want: Any) -> bool:
    return got is want is None or same_bits(got, want)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", [*VERBS, *TOLD])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_every_use_of_a_name_gives_the_same(size: int, verb: str) -> None:
    call, expect = (VERBS | TOLD)[verb]
    async with world(size, strategy="direct") as comms:
        for rows in ROWS:
            xs = [oracle.data("float32", (rows, 2), rank) for rank in range(size)]
            kept = [x.copy() for x in xs]
            for _ in range(USES):
                results = await everywhere(comms, lambda comm, xs=xs: call(comm, xs, f"x{len(xs[0])}"))
                for rank, got in enumerate(results):
                    assert _is(got, expect(xs, comms[0].strategy, rank)), (rows, rank, got)
            assert all(same_bits(x, as_it_was) for x, as_it_was in zip(xs, kept, strict=True))
            if verb in VERBS:
                assert is_slotted(comms, f"x{rows}") == (worlds.LINKS == "shm" and size > 1)
        if size > 1 and worlds.LINKS == "shm":
            assert min(comm.statistics().slots for comm in comms) > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["reduce", "reduce_scatter"])
@pytest.mark.parametrize(("dtype", "op"), CASES)
async def test_all_dtypes_and_ops(dtype: str, op: str, verb: str) -> None:
    async with world(3, strategy="direct") as comms:
        xs = [oracle.data(dtype, 11, rank) for rank in range(3)]
        root = [1] if verb == "reduce" else []
        for _ in range(USES):
            results = await everywhere(comms, lambda comm: getattr(comm, verb)(xs[comm.rank], *root, "x", op=op))
            if verb == "reduce":
                assert same_bits(results[1], oracle.reduced(op, xs, comms[0].strategy, 1))
            else:
                wanted = oracle.reduce_scattered(op, xs, comms[0].strategy)
                assert all(same_bits(got, want) for got, want in zip(results, wanted, strict=True))
        assert is_slotted(comms, "x") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["broadcast", "reduce"])
async def test_in_place(verb: str) -> None:
    async with world(3, strategy="direct") as comms:
        for use in range(USES):
            xs = [oracle.data("int32", 9, 10 * use + rank) for rank in range(3)]
            want = xs[2].copy() if verb == "broadcast" else xs[0] + xs[1] + xs[2]
            others = [x.copy() for x in xs]
            results = await everywhere(
                comms, lambda comm, xs=xs: getattr(comm, verb)(xs[comm.rank], 2, "x", out=xs[comm.rank])
            )
            assert results[2] is xs[2]
            assert same_bits(xs[2], want)
            for rank in range(2):
                assert same_bits(xs[rank], want if verb == "broadcast" else others[rank])


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_gather", "gather"])
@pytest.mark.parametrize("size", [1, 3])
async def test_input_in_its_row_of_out(size: int, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No use but the first needs all checks."""
    root = () if verb == "all_gather" else (0,)
    for count in (3, 4099, DIRECT_NBYTES // 4 + 1):
        async with world(size, strategy="direct") as comms:
            for use in range(USES):
                xs = [oracle.data("float32", count, 10 * use + rank) for rank in range(size)]
                outs = [np.full((size, count), -1, np.float32) for _ in xs]
                for rank, x in enumerate(xs):
                    outs[rank][rank] = x
                if use:
                    monkeypatch.setattr(Communicator, "_begin", None)
                results = await everywhere(
                    comms,
                    lambda comm, outs=outs: getattr(comm, verb)(
                        outs[comm.rank][comm.rank], *root, "x", out=outs[comm.rank]
                    ),
                )
                for rank in range(1 if root else size):
                    assert results[rank] is outs[rank]
                    assert same_bits(outs[rank], np.stack(xs))
            monkeypatch.undo()


@pytest.mark.asyncio
async def test_input_in_another_row_of_out() -> None:
    async with world(3, strategy="direct") as comms:
        for _ in range(USES):
            outs = [np.full((3, 5), rank, np.int64) for rank in range(3)]
            await everywhere(
                comms, lambda comm, outs=outs: comm.all_gather(outs[comm.rank][1], "x", out=outs[comm.rank])
            )
            assert all(same_bits(out, np.repeat([[0], [1], [2]], 5, axis=1)) for out in outs)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
async def test_long_arrays_travel_in_chunks(verb: str) -> None:
    call, expect = VERBS[verb]
    async with world(3, strategy="direct") as comms:
        for nbytes, is_short in ((DIRECT_NBYTES // 3 // 12 * 12, True), (DIRECT_NBYTES + 12, False)):
            xs = [oracle.data("float32", nbytes // 4, rank) for rank in range(3)]
            for _ in range(USES):
                results = await everywhere(comms, lambda comm, xs=xs, nbytes=nbytes: call(comm, xs, f"x{nbytes}"))
                for rank, got in enumerate(results):
                    assert _is(got, expect(xs, comms[0].strategy, rank)), (nbytes, rank)
            assert is_slotted(comms, f"x{nbytes}") == ((is_short or verb in IN_WINDOWS) and worlds.LINKS == "shm")


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("other", [0, 1, 2])
async def test_all_follow_who_goes_the_ordinary_way(other: int, verb: str) -> None:
    """A second use in flight, of unnamed calls: that rank sends messages; all follow, and stay there."""
    call, expect = VERBS[verb]
    one, two = ([oracle.data("float32", 9, seed + rank) for rank in range(3)] for seed in (0, 10))
    async with world(3, strategy="direct") as comms:

        def agree(results: list[Any], xs: Inputs) -> None:
            for rank, got in enumerate(results):
                assert _is(got, expect(xs, comms[0].strategy, rank)), rank

        for _ in range(USES):
            agree(await everywhere(comms, lambda comm: call(comm, one, None)), one)
        first = {comm.rank: call(comm, one, None) for comm in comms if comm.rank != other}
        await turns(5)
        first[other] = call(comms[other], one, None)
        second = {other: call(comms[other], two, None)}
        second |= {comm.rank: call(comm, two, None) for comm in comms if comm.rank != other}
        agree([await first[rank] for rank in range(3)], one)
        agree([await second[rank] for rank in range(3)], two)
        agree(await everywhere(comms, lambda comm: call(comm, one, None)), one)


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_a_cancelled_use_fails_on_all_and_the_name_works_on(who: int, verb: str) -> None:
    call, expect = VERBS[verb]
    xs = [oracle.data("float32", 9, rank) for rank in range(3)]
    missing = (who + 1) % 3
    async with world(3, strategy="direct") as comms:
        for _ in range(USES):
            await everywhere(comms, lambda comm: call(comm, xs, "x"))
        present = [comm.rank for comm in comms if comm.rank != missing]
        handles = [call(comms[rank], xs, "x") for rank in present]
        await turns(5)
        assert not any(handle.done() for handle in handles) or worlds.LINKS != "shm"
        handles[present.index(who)].cancel()
        await heard_of_the_end(comms[missing])
        outcomes = await asyncio.gather(*handles, call(comms[missing], xs, "x"), return_exceptions=True)
        assert isinstance(outcomes[present.index(who)], asyncio.CancelledError)
        assert_kinds([one for place, one in enumerate(outcomes) if place != present.index(who)], CollectiveAborted)
        for rank, got in enumerate(await everywhere(comms, lambda comm: call(comm, xs, "x"))):
            assert _is(got, expect(xs, comms[0].strategy, rank))
