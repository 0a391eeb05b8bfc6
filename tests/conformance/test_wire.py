"""Verbs whose numbers travel in fewer bits: what each rank gets, to the bit, and how far off it is at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kfcomm.collectives import plans
from kfcomm.collectives.units import many_key
from kfcomm.core.graph import Graph
from kfcomm.core.signature import WHOLE_BELOW, pair_of, split
from kfcomm.engine.wired import WiredOperation
from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from kfcomm.strategies import AnyStrategy
from tests.conformance.oracle import Array, dtype_called
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, turns, works, world

pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")

WIRES = ("float16", "bfloat16")
STRATEGIES = ("star", "ring", "clique", "binary_tree", "multi_binary_tree_star", "halving_doubling")
CHUNK = 16
LENGTHS = (0, 1, CHUNK + 1, 5 * CHUNK + 3)
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 float32, so that short buffers are many chunks."""
    monkeypatch.setattr(plans, "CHUNK_NBYTES", 4 * CHUNK)


def data(name: str, length: int, rank: int) -> Array:
    return np.random.default_rng(rank).normal(size=length).astype(dtype_called(name))


def rounded(x: Array, wire: str) -> Array:
    """Received values of ``x``."""
    return x.astype(np.float32).astype(dtype_called(wire)).astype(np.float32)


def folded(op: str, graph: Graph, rank: int, inputs: Sequence[Array], wire: str) -> Array:
    """The partial result of a rank and those below it, in float32: of each child as it arrives."""
    partial = inputs[rank].astype(np.float32)
    for child in graph.children[rank]:
        theirs = rounded(folded(op, graph, child, inputs, wire), wire)
        partial = np.maximum(partial, theirs) if op == "max" else partial + theirs
    return partial


def result(op: str, graph: Graph, inputs: Sequence[Array], wire: str) -> Array:
    """The root's fold of all contributions, in float32."""
    total = folded(op, graph, graph.root, inputs, wire)
    return total / np.float32(len(inputs)) if op == "avg" else total


def all_reduced(op: str, inputs: Sequence[Array], strategy: AnyStrategy, name: str, wire: str) -> Array:
    count = inputs[0].size
    graphs = strategy.select(2 * count)
    pairs = graphs.pairs if graphs.exchange is None else graphs.exchange.graphs()
    if graphs.exchange is None and (graphs.is_whole or count < WHOLE_BELOW):
        pairs = (pairs[pair_of(name, len(pairs))],)
    parts = [
        result(op, pair.reduce, [x[at : at + length] for x in inputs], wire)
        for pair, (at, length) in zip(pairs, split(count, len(pairs)), strict=True)
    ]
    return rounded(np.concatenate(parts), wire).astype(inputs[0].dtype)


def dtypes_of(wire: str) -> tuple[str, ...]:
    return ("float32", "float64", wire)


@pytest.mark.asyncio
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.usefixtures("small_chunks")
async def test_all_reduce(size: int, strategy: str, wire: str) -> None:
    async with world(size, hosts=min(2, size), strategy=strategy) as comms:
        for dtype in dtypes_of(wire):
            for op in ("sum", "avg", "max"):
                for length in LENGTHS:
                    name = f"{dtype} {op} {length}"
                    xs = [data(dtype, length, rank) for rank in range(size)]
                    before = [x.tobytes() for x in xs]
                    got = await everywhere(
                        comms, lambda c, xs=xs, op=op, name=name: c.all_reduce(xs[c.rank], name, op=op, wire_dtype=wire)
                    )
                    want = all_reduced(op, xs, comms[0].strategy, name, wire)
                    assert all(same_bits(one, want) for one in got), f"{name}: {got}, expected {want}"
                    assert before == [x.tobytes() for x in xs]


@pytest.mark.asyncio
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.usefixtures("small_chunks")
async def test_the_other_verbs(strategy: str, wire: str) -> None:
    size, root, length = 4, 2, 3 * CHUNK + 5
    async with world(size, hosts=2, strategy=strategy) as comms:
        graphs = comms[0].strategy.select(2 * length)
        for dtype in dtypes_of(wire):
            xs = [data(dtype, length, rank) for rank in range(size)]

            async def every(call: Callable[[Any, Any], Any], xs: list[Array] = xs) -> list[Any]:
                return await everywhere(comms, lambda comm: call(comm, xs[comm.rank]))

            got = await every(lambda comm, x: comm.reduce(x, root, wire_dtype=wire))
            want = result("sum", graphs.rooted(root).reduce, xs, wire).astype(xs[0].dtype)
            assert [one is None for one in got] == [rank != root for rank in range(size)]
            assert same_bits(got[root], want)

            got = await every(lambda comm, x: comm.reduce_scatter(x, op="avg", wire_dtype=wire))
            for rank, (at, rows) in enumerate(split(length, size)):
                parts = [x[at : at + rows] for x in xs]
                want = result("avg", graphs.rooted(rank).reduce, parts, wire).astype(xs[0].dtype)
                assert same_bits(got[rank], want)

            sent = [rounded(x, wire).astype(x.dtype) for x in xs]
            got = await every(lambda comm, x: comm.broadcast(x, root, wire_dtype=wire))
            assert all(same_bits(one, sent[root]) for one in got)
            got = await every(lambda comm, x: comm.all_gather(x, wire_dtype=wire))
            assert all(same_bits(one, np.stack(sent)) for one in got)
            got = await every(lambda comm, x: comm.all_gather(x[: comm.rank + 9], wire_dtype=wire, concat=True))
            joined = np.concatenate([one[: rank + 9] for rank, one in enumerate(sent)])
            assert all(same_bits(one, joined) for one in got)
            many = await every(lambda comm, x: comm.all_reduce_many({"a": x, "b": x[:3]}, wire_dtype=wire))
            packed = [np.concatenate([x, x[:3]]) for x in xs]
            want = all_reduced("sum", packed, comms[0].strategy, many_key(["a", "b"]), wire)
            assert all(same_bits(np.concatenate([one["a"], one["b"]]), want) for one in many)


@pytest.mark.asyncio
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", ["ring", "clique"])
async def test_large_messages_and_results_in_place(strategy: str, wire: str) -> None:
    """Many chunks of the usual size, into new memory, into other memory, and over the input."""
    size, length = 4, 4 * plans.chunk_elements(np.dtype(np.float32)) + 77
    async with world(size, strategy=strategy) as comms:
        xs = [data("float32", length, rank) for rank in range(size)]
        want = all_reduced("sum", xs, comms[0].strategy, "k", wire)
        got = await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "k", wire_dtype=wire))
        assert all(same_bits(one, want) for one in got)
        outs = [np.empty_like(x) for x in xs]
        await everywhere(comms, lambda comm: comm.all_reduce(xs[comm.rank], "k", out=outs[comm.rank], wire_dtype=wire))
        assert all(same_bits(one, want) for one in outs)
        copies = [x.copy() for x in xs]
        await everywhere(
            comms,
            lambda comm: comm.all_reduce(copies[comm.rank], "k", out=copies[comm.rank], wire_dtype=wire),
        )
        assert all(same_bits(one, want) for one in copies)
        await everywhere(comms, lambda comm: comm.broadcast(copies[comm.rank], 1, out=copies[comm.rank]))
        exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
        bound = (size + 1) * UNIT[wire] * np.sum(np.abs(xs), axis=0)
        assert (np.abs(want - exact) <= bound).all()


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [2, 5, 9])
async def test_the_error_that_is_stated(size: int, wire: str, strategy: str) -> None:
    async with world(size, strategy=strategy) as comms:
        xs = [np.random.default_rng(rank).uniform(0.5, 1.5, 3000) for rank in range(size)]
        for dtype in (np.float32, np.float64):
            got = await everywhere(
                comms, lambda comm, d=dtype: comm.all_reduce(xs[comm.rank].astype(d), wire_dtype=wire)
            )
            bound = (size + 1) * UNIT[wire] * np.sum(np.abs(xs), axis=0)
            assert (np.abs(got[0] - np.sum(xs, axis=0)) <= bound).all()
            assert all(same_bits(one, got[0]) for one in got)


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", ["star", "clique"])
async def test_ranks_that_differ(strategy: str) -> None:
    x = np.ones(6, np.float32)
    calls: list[Callable[..., Any]] = [
        lambda comm, wire: comm.all_reduce(x, "k", wire_dtype=wire),
        lambda comm, wire: comm.broadcast(x, 0, "k", wire_dtype=wire),
        lambda comm, wire: comm.all_gather(x, "k", wire_dtype=wire),
        lambda comm, wire: comm.all_gather(x, "k", concat=True, wire_dtype=wire),
    ]
    async with world(3, strategy=strategy) as comms:
        for call in calls:
            for odd, usual in ((None, "float16"), ("float16", None), ("float16", "bfloat16")):
                outcomes = await ends(comms, lambda comm, c=call, o=odd, u=usual: c(comm, o if comm.rank == 1 else u))
                assert_kinds(outcomes, CollectiveMismatch)
                assert all("wire_dtype" in str(one) and "sent as float16" in str(one) for one in outcomes)
                await works(comms, "k")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wire", "dtype"), [("float8", "float32"), ("float16", "int32"), ("bfloat16", "complex64"), ("float16", "bfloat16")]
)
async def test_unsupported_wire_dtypes_are_refused(wire: str, dtype: str) -> None:
    x = np.ones(8, dtype_called(dtype))
    calls: list[Callable[..., Any]] = [
        lambda comm, **options: comm.all_reduce(x, "k", **options),
        lambda comm, **options: comm.reduce(x, 0, "k", **options),
        lambda comm, **options: comm.reduce_scatter(x, "k", **options),
        lambda comm, **options: comm.broadcast(x, 0, "k", **options),
        lambda comm, **options: comm.all_gather(x, "k", **options),
        lambda comm, **options: comm.all_gather(x, "k", concat=True, **options),
    ]
    async with world(2) as comms:
        for call in calls:

            def refused(comm: Any, call: Callable[..., Any] = call) -> Any:
                return call(comm, wire_dtype=wire) if comm.rank else call(comm)

            assert_kinds(await ends(comms, refused), CollectiveAborted, ConfigError)
            await works(comms, "k")


@pytest.mark.asyncio
async def test_links_never_see_the_callers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers see memory of the operation, at most as many numbers as the message has."""
    shown: list[tuple[Any, memoryview]] = []
    before = WiredOperation.bytes_of

    def bytes_of(self: WiredOperation, *what: Any) -> memoryview:
        view = before(self, *what)
        shown.append((self, view))
        return view

    monkeypatch.setattr(WiredOperation, "bytes_of", bytes_of)
    xs = [np.ones(5000, np.float32) for _ in range(3)]
    async with world(3, strategy="ring") as comms:
        await everywhere(
            comms, lambda comm: comm.all_reduce(xs[comm.rank], "k", out=xs[comm.rank], wire_dtype="float16")
        )
    assert len(shown) >= 3
    for operation, view in shown:
        assert operation._converted is not None
        assert operation._converted.nbytes == 2 * 5000
        assert len(view) == 0 or np.shares_memory(np.frombuffer(view, np.uint8), operation._converted)
        assert not any(np.shares_memory(np.frombuffer(view, np.uint8), x) for x in xs)


@pytest.mark.asyncio
async def test_a_rank_that_is_late() -> None:
    """Chunks that wait for credit are requested again, and are the same."""
    async with world(3, strategy="star") as comms:
        xs = [data("float32", 3 << 20, rank) for rank in range(3)]
        early = [comm.all_reduce(xs[comm.rank], "k", wire_dtype="float16") for comm in comms if comm.rank != 0]
        await turns()
        got = [await comms[0].all_reduce(xs[0], "k", wire_dtype="float16"), *[await one for one in early]]
        want = all_reduced("sum", xs, comms[0].strategy, "k", "float16")
        assert all(same_bits(one, want) for one in got)
