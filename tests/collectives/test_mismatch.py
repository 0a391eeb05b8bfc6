"""Ranks that disagree: every rank gets the same error with both sides, and the name works afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveMismatch
from tests.conformance.worlds import assert_kinds, ends, everywhere, turns, works, world

X = np.ones(6, np.float32)
Pair = tuple[Callable[[Any], Any], Callable[[Any], Any], tuple[str, ...]]

DIFFERENT: dict[str, Pair] = {
    "shape": (lambda c: c.all_reduce(X, "k"), lambda c: c.all_reduce(X[:5], "k"), ("(6,)", "(5,)")),
    "shape of as many elements": (
        lambda c: c.all_reduce(X, "k"),
        lambda c: c.all_reduce(X.reshape(2, 3), "k"),
        ("(6,)", "(2, 3)"),
    ),
    "dtype": (
        lambda c: c.all_reduce(X, "k"),
        lambda c: c.all_reduce(X.astype(np.int32), "k"),
        ("float32", "int32"),
    ),
    "op": (lambda c: c.all_reduce(X, "k"), lambda c: c.all_reduce(X, "k", op="max"), ("op sum", "op max")),
    "root": (lambda c: c.broadcast(X, 0, "k"), lambda c: c.broadcast(X, 1, "k"), ("root 0", "root 1")),
    "root of reduce": (lambda c: c.reduce(X, 0, "k"), lambda c: c.reduce(X, 1, "k"), ("root 0", "root 1")),
    "root of gather": (lambda c: c.gather(X, 0, "k"), lambda c: c.gather(X, 1, "k"), ("root 0", "root 1")),
    "root of scatter": (lambda c: c.scatter(X, 0, "k"), lambda c: c.scatter(X, 1, "k"), ("root 0", "root 1")),
    "verb": (lambda c: c.all_reduce(X, "k"), lambda c: c.all_gather(X, "k"), ("all_reduce", "all_gather")),
    "rooted verb": (lambda c: c.reduce(X, 0, "k"), lambda c: c.broadcast(X, 0, "k"), ("reduce", "broadcast")),
    "barrier": (lambda c: c.barrier("k"), lambda c: c.all_reduce(X, "k"), ("barrier", "all_reduce")),
    "rows of reduce_scatter": (
        lambda c: c.reduce_scatter(X, "k"),
        lambda c: c.reduce_scatter(X[:3], "k"),
        ("(6,)", "(3,)"),
    ),
    "rows of all_to_all": (
        lambda c: c.all_to_all(np.ones((6, 2)), "k"),
        lambda c: c.all_to_all(np.ones((12, 2)), "k"),
        ("counts", "counts"),
    ),
    "kind of all_gather": (
        lambda c: c.all_gather(X, "k"),
        lambda c: c.all_gather(X, "k", concat=True),
        ("float32", "uint8"),
    ),
    "dtype of concat": (
        lambda c: c.all_gather(X, "k", concat=True),
        lambda c: c.all_gather(X.astype(int), "k", concat=True),
        ("float32", "int64"),
    ),
    "row shape of concat": (
        lambda c: c.all_gather(X, "k", concat=True),
        lambda c: c.all_gather(np.ones((6, 2), np.float32), "k", concat=True),
        ("concat", "float32 (6,)", "float32 (6, 2)"),
    ),
    "root of concat": (
        lambda c: c.gather(X, 0, "k", concat=True),
        lambda c: c.gather(X, 1, "k", concat=True),
        ("root 0", "root 1"),
    ),
    "dtype of lists": (
        lambda c: c.all_to_all([X] * c.size, "k"),
        lambda c: c.all_to_all([X.astype(int)] * c.size, "k"),
        ("float32", "int64"),
    ),
    "list and array": (
        lambda c: c.all_to_all([X] * c.size, "k"),
        lambda c: c.all_to_all(np.ones(2 * c.size), "k"),
        ("all_gather", "all_to_all"),
    ),
    "gather and all_gather of objects": (
        lambda c: c.gather_object(1, 0, "k"),
        lambda c: c.all_gather_object(1, "k"),
        ("gather", "all_gather"),
    ),
    "one step and two": (
        lambda c: c.barrier("k"),
        lambda c: c.scatter(X, c.rank, "k"),
        ("barrier", "broadcast"),
    ),
    "shape in a list": (lambda c: c.all_reduce([X, X], "k"), lambda c: c.all_reduce([X, X[:2]], "k"), ("'x[1]' is",)),
    "length of a list": (
        lambda c: c.all_reduce([X, X], "k"),
        lambda c: c.all_reduce([X], "k"),
        ("'x[1]' is given by rank",),
    ),
    "dtype in a list": (
        lambda c: c.broadcast([X, X], 0, "k"),
        lambda c: c.broadcast([X, X.astype(int)], 0, "k"),
        ("'x[1]' is",),
    ),
    "a list and its array": (
        lambda c: c.all_reduce([X], "k"),
        lambda c: c.all_reduce(X, "k"),
        ("all_reduce of a list of 1",),
    ),
    "op of a list": (
        lambda c: c.all_reduce([X, X], "k"),
        lambda c: c.all_reduce([X, X], "k", op="max"),
        ("(op): rank",),
    ),
    "parts of a list": (
        lambda c: c.reduce_scatter([X, X, X[:1]], "k"),
        lambda c: c.reduce_scatter([X, X[:1], X], "k"),
        ("counts",),
    ),
    "with a weight and without": (
        lambda c: c.all_reduce(X, "k", op="avg", weight=1),
        lambda c: c.all_reduce(X, "k", op="avg"),
        ("op avg by weight", "op avg"),
    ),
    "with a weight and the sum of one element more": (
        lambda c: c.all_reduce(X, "k", op="avg", weight=1),
        lambda c: c.all_reduce(np.ones(7, np.float32), "k"),
        ("op avg by weight", "op sum", "(6,)", "(7,)"),
    ),
    "shape by weight": (
        lambda c: c.all_reduce(X, "k", op="avg", weight=1),
        lambda c: c.all_reduce(X.reshape(2, 3), "k", op="avg", weight=1),
        ("(6,)", "(2, 3)"),
    ),
    "dtypes by weight whose sums are of one": (
        lambda c: c.all_reduce(X, "k", op="avg", weight=1),
        lambda c: c.all_reduce(X.astype(np.float16), "k", op="avg", weight=1),
        ("float32", "float16"),
    ),
    "mappings with a weight and without": (
        lambda c: c.all_reduce_many({"k": X}, op="avg", weight=1),
        lambda c: c.all_reduce_many({"k": X}, op="avg"),
        ("op sum", "op avg"),
    ),
    "mappings by weight of dtypes whose sums are of one": (
        lambda c: c.all_reduce_many({"k": X}, op="avg", weight=1),
        lambda c: c.all_reduce_many({"k": X.astype(np.float16)}, op="avg", weight=1),
        ("k of float16",),
    ),
    "shape by adasum": (
        lambda c: c.all_reduce(X, "k", op="adasum"),
        lambda c: c.all_reduce(X.reshape(2, 3), "k", op="adasum"),
        ("(6,)", "(2, 3)"),
    ),
    "dtype by adasum": (
        lambda c: c.all_reduce(X, "k", op="adasum"),
        lambda c: c.all_reduce(X.astype(float), "k", op="adasum"),
        ("; rank",),
    ),
    "sum and adasum": (lambda c: c.all_reduce(X, "k"), lambda c: c.all_reduce(X, "k", op="adasum"), ("op ",)),
    "mappings by sum and adasum": (
        lambda c: c.all_reduce_many({"k": X}),
        lambda c: c.all_reduce_many({"k": X}, op="adasum"),
        ("op ",),
    ),
    "shared and not": (
        lambda c: c.all_reduce(X, "k", shared=True),
        lambda c: c.all_reduce(X, "k"),
        ("memory",),
    ),
}


MORE_CALLS = (
    "dtype in a list", "mappings with a weight and without", "mappings by weight of dtypes whose sums are of one",
    "sum and adasum", "mappings by sum and adasum",
)  # fmt: skip
"""Those in which some ranks have begun a call that others never begin."""


@pytest.mark.asyncio
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("strategy", ["star", "clique"])
async def test_every_rank_hears_of_the_difference(what: str, odd: int, strategy: str) -> None:
    size = 3
    usual, other, words = DIFFERENT[what]
    async with world(size, strategy=strategy, aborted=what in MORE_CALLS) as comms:
        for first in (odd, (odd + 1) % size):
            handles: dict[int, asyncio.Future[Any]] = {}
            for comm in (comms[first], *(one for one in comms if one.rank != first)):
                handles[comm.rank] = (other if comm.rank == odd else usual)(comm)
                await turns(comm.rank)
            outcomes = await asyncio.gather(*(handles[rank] for rank in range(size)), return_exceptions=True)
            assert_kinds(outcomes, CollectiveMismatch)
            for outcome in outcomes:
                assert all(word in str(outcome) for word in words), f"{words} in {outcome}"
                assert outcome.key == "k"
                assert not any(word in str(outcome) for word in ("generation", "graphs", "chunks of"))
            # The same name does its work again, with one step and with two.
            await works(comms, "k")
            await everywhere(comms, lambda comm: comm.all_gather(X[: comm.rank], "k", concat=True))
            await works(comms, "k")


@pytest.mark.asyncio
async def test_different_strategies_from_the_start() -> None:
    async with world(3) as comms:
        for rank, strategy in enumerate(("ring", "star", "star")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(comms[rank]._group, "_waiting", None)
                from kfcomm.collectives.plans import Planner, Plans
                from kfcomm.strategies import build
                from kfcomm.strategies.chunks import ChunkSizes

                graphs = build(strategy, comms[rank].layout)
                comms[rank]._group.plans = Plans(Planner(rank, 3, graphs, ChunkSizes(comms[rank].layout)))
        for verb in ("all_reduce", "broadcast", "reduce", "all_gather"):
            outcomes = await ends(comms, lambda comm, verb=verb: getattr(comm, verb)(X, name="k"))
            assert_kinds(outcomes, CollectiveMismatch)
            assert "ring" in str(outcomes[1])
            assert "star" in str(outcomes[1])
        await everywhere(comms, lambda comm: comm.set_strategy("ring"))
        await works(comms, "k")


@pytest.mark.asyncio
@pytest.mark.parametrize("again", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 2])
async def test_a_name_used_while_it_is_in_flight(again: int, steps: int) -> None:
    """The second use fails on every rank; the first goes on and completes."""
    size = 3

    def call(comm: Any) -> Any:
        return comm.all_reduce(X, "k") if steps == 1 else comm.all_gather(X[:1] * comm.rank, "k", concat=True)

    async with world(size) as comms:
        first = [call(comm) for comm in comms if comm.rank != 0]
        second = call(comms[again]) if again else None
        if again == 0:
            first.append(call(comms[0]))
            second = call(comms[0])
        else:
            await turns()
            first.append(call(comms[0]))
        results = await asyncio.gather(*first)
        assert all(one.tolist() == ([3.0] * 6 if steps == 1 else [0.0, 1.0, 2.0]) for one in results)
        others = [call(comm) for comm in comms if comm.rank != again]
        outcomes = await asyncio.gather(second, *others, return_exceptions=True)
        assert_kinds(outcomes, CollectiveAborted)
        assert all("used again" in str(one) and f"rank {again}" in str(one) for one in outcomes)
        assert all(one.tolist() for one in await everywhere(comms, call))


@pytest.mark.asyncio
async def test_consensus_sees_bytes_shape_and_dtype() -> None:
    async with world(3) as comms:
        for odd in (X.copy() + np.float32(1e-7), X.reshape(2, 3), X.view(np.int32), X[:5], -X * 0):
            for at in range(3):
                same = await everywhere(
                    comms, lambda comm, odd=odd, at=at: comm.consensus(odd if comm.rank == at else X)
                )
                assert same == [False] * 3
        assert await everywhere(comms, lambda comm: comm.consensus(np.array([np.nan]))) == [True] * 3
        assert await everywhere(comms, lambda comm: comm.consensus(np.empty(0))) == [True] * 3
        signs = await everywhere(comms, lambda comm: comm.consensus(0.0 if comm.rank else -0.0))
        assert signs == [False] * 3
