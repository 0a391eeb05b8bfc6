"""Every strategy, on worlds of many sizes and hosts: every verb, every root, and buffers of awkward lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kfcomm import strategies
from kfcomm.collectives import plans
from kfcomm.core.signature import WHOLE_BELOW
from kfcomm.strategies import Strategy
from kfcomm.types import Layout
from tests.conformance import oracle
from tests.conformance.worlds import everywhere, same_bits, world

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16)
# Graphs are the same whatever the links; n ranks that share memory in one process have n² arenas and rings to make.
WORLDS = [*(("memory", size) for size in SIZES), *(("shm", size) for size in (2, 4, 5))]
HOSTS = (1, 2, 3)
CHUNK = 16
"""Elements of float32 in the small chunks of these tests."""
LENGTHS = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes, so that short buffers are many chunks."""
    monkeypatch.setattr(plans, "CHUNK_NBYTES", 4 * CHUNK)


def _check(what: str, results: list[Any], wanted: list[Any]) -> None:
    for rank, (got, want) in enumerate(zip(results, wanted, strict=True)):
        if want is None:
            assert got is None, f"{what} on rank {rank}: {got!r}"
        else:
            assert same_bits(got, want), f"{what} on rank {rank}: {got!r}, expected {want!r}"


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize(("links", "size"), WORLDS, indirect=["links"])
@pytest.mark.usefixtures("small_chunks")
async def test_verbs_without_a_root(links: None, strategy: str, size: int) -> None:
    for hosts in (number for number in HOSTS if number <= size):
        await _all_without_a_root(strategy, size, hosts)


async def _all_without_a_root(strategy: str | Strategy, size: int, hosts: int) -> None:
    async with world(size, hosts=hosts, strategy=strategy) as comms:
        graphs = comms[0].strategy
        for length in LENGTHS if size < 6 else LENGTHS[-1:]:
            xs = [oracle.data("float32", length, rank) for rank in range(size)]
            where = f"of {length} with {strategy} on {hosts} hosts"
            _check(
                f"all_reduce {where}",
                await everywhere(comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], "r")),
                [oracle.all_reduced("sum", xs, graphs, "r")] * size,
            )
            _check(
                f"all_gather {where}",
                await everywhere(comms, lambda comm, xs=xs: comm.all_gather(xs[comm.rank], "g")),
                [np.stack(xs)] * size,
            )
            _check(
                f"reduce_scatter {where}",
                await everywhere(comms, lambda comm, xs=xs: comm.reduce_scatter(xs[comm.rank], "s")),
                oracle.reduce_scattered("sum", xs, graphs),
            )
            ys = [oracle.data("float32", (size, length), rank) for rank in range(size)]
            _check(
                f"all_to_all {where}",
                await everywhere(comms, lambda comm, ys=ys: comm.all_to_all(ys[comm.rank], "t")),
                [np.stack([y[rank] for y in ys]) for rank in range(size)],
            )
        await everywhere(comms, lambda comm: comm.barrier("b"))


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize(("links", "size"), [world for world in WORLDS if world[1] < 16], indirect=["links"])
@pytest.mark.usefixtures("small_chunks")
async def test_verbs_with_every_root(links: None, strategy: str, size: int) -> None:
    for hosts in [number for number in HOSTS if number <= size] if size < 6 else [2]:
        await _all_with_every_root(strategy, size, hosts)


async def _all_with_every_root(strategy: str, size: int, hosts: int) -> None:
    length = 2 * CHUNK + 3
    async with world(size, hosts=hosts, strategy=strategy) as comms:
        graphs = comms[0].strategy
        xs = [oracle.data("float32", length, rank) for rank in range(size)]
        for root in range(size):
            elsewhere: list[Any] = [None] * size

            def at_root(x: Any, root: int = root, elsewhere: list[Any] = elsewhere) -> list[Any]:
                return [*elsewhere[:root], x, *elsewhere[root + 1 :]]

            async def of(verb: str, root: int = root) -> list[Any]:
                return await everywhere(comms, lambda comm: getattr(comm, verb)(xs[comm.rank], root, verb))

            _check(f"reduce to {root}", await of("reduce"), at_root(oracle.reduced("sum", xs, graphs, root)))
            _check(f"gather to {root}", await of("gather"), at_root(np.stack(xs)))
            _check(f"broadcast from {root}", await of("broadcast"), [xs[root]] * size)
            _check(f"scatter from {root}", await of("scatter"), oracle.scattered(xs[root], size))


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", strategies.names())
@pytest.mark.parametrize("size", [2, 3, 5])
async def test_lengths_around_the_bounds_of_sharing_out(strategy: str, size: int) -> None:
    """Below ``WHOLE_BELOW`` one pair takes it all, from there on each its part; chunks do not change a bit."""
    async with world(size, strategy=strategy) as comms:
        for length in (WHOLE_BELOW - 1, WHOLE_BELOW, WHOLE_BELOW + 1):
            for op, dtype in (("sum", "float32"), ("avg", "float16"), ("prod", "complex64")):
                xs = [oracle.data(dtype, length, rank) for rank in range(size)]
                results = await everywhere(comms, lambda comm, xs=xs, op=op: comm.all_reduce(xs[comm.rank], "x", op=op))
                wanted = oracle.all_reduced(op, xs, comms[0].strategy, "x")
                _check(f"{op} of {length} {dtype}", results, [wanted] * size)


@pytest.mark.asyncio
@pytest.mark.parametrize("shares", [(1, 2, 3, 4, 5), (1, 1, 1, 1, 10_000)])
async def test_shares_of_the_pairs(shares: tuple[int, ...]) -> None:
    """Parts may be empty; names of what goes whole pick pairs by their shares; other verbs know nothing of them."""
    size = len(shares)
    for name in ("clique", "ring"):
        built = strategies.build(name, Layout.even(size)).select(0)
        async with world(size, strategy=replace(built, shares=shares)) as comms:
            for length in (WHOLE_BELOW - 1, WHOLE_BELOW, WHOLE_BELOW + 1):
                xs = [oracle.data("float32", length, rank) for rank in range(size)]
                for key in "abcd" * 2:
                    results = await everywhere(comms, lambda comm, xs=xs, key=key: comm.all_reduce(xs[comm.rank], key))
                    wanted = oracle.all_reduced("sum", xs, comms[0].strategy, key)
                    _check(f"{name}, {length} as {key}", results, [wanted] * size)
        await _all_without_a_root(replace(built, shares=shares), size, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("strategy", ["ring", "clique", "multi_binary_tree_star", "binomial", "halving_doubling"])
async def test_chunk_size_and_reruns_do_not_change_a_bit(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, length = 5, 2 * WHOLE_BELOW + 7
    seen: dict[str, set[bytes]] = {}

    async def once() -> None:
        async with world(size, strategy=strategy) as comms:
            for dtype in ("float16", "float32", "complex128"):
                xs = [oracle.data(dtype, (size, length), rank) for rank in range(size)]
                for verb in ("all_reduce", "reduce", "reduce_scatter"):
                    results = await everywhere(
                        comms, lambda comm, xs=xs, verb=verb: getattr(comm, verb)(xs[comm.rank], name="x", op="avg")
                    )
                    bits = b"".join(one.tobytes() for one in results if one is not None)
                    seen.setdefault(f"{verb} of {dtype}", set()).add(bits)

    for nbytes in (1 << 19, 1 << 19, 4096 + 16, 1 << 20):
        monkeypatch.setattr(plans, "CHUNK_NBYTES", nbytes)
        await once()
    assert {what: len(bits) for what, bits in seen.items()} == dict.fromkeys(seen, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 4, 5])
async def test_special_values(size: int) -> None:
    """NaN wins in min and max, infinities and signed zeros behave; and all ranks hold the same bytes."""
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 5e-324, 1.0])
    xs = [np.roll(special, rank) for rank in range(size)]
    async with world(size) as comms:
        with np.errstate(all="ignore"):
            wanted = {op: getattr(np, op)(xs, axis=0) for op in ("min", "max", "sum", "prod")}
        for op, want in wanted.items():
            results = await everywhere(comms, lambda comm, op=op: comm.all_reduce(xs[comm.rank], op=op))
            np.testing.assert_array_equal(results[0], want, err_msg=op)
            assert {one.tobytes() for one in results} == {results[0].tobytes()}, op
