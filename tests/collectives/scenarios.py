"""Scenarios for collectives that may be in slots: ranks that call first, last or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from kfcomm.errors import CollectiveAborted, CollectiveMismatch, CollectiveTimeout
from kfcomm.world.communicator import Communicator
from tests.conformance import oracle
from tests.conformance.worlds import assert_kinds, ends, everywhere, heard_of_the_end, same_bits, turns

X = np.arange(6, dtype=np.float64)
USES = 6

Comms = Sequence[Communicator]


async def warm(comms: Comms, name: str | None, x: np.ndarray[Any, Any] = X) -> None:
    """Use a name until it has a slot, if it ever has one."""
    for _ in range(3):
        await everywhere(comms, lambda comm: comm.all_reduce(x, name))


async def sums_are_right(comms: Comms, name: str | None, times: int = 1) -> None:
    """Of what each rank gives, which is not alike."""
    for _ in range(times):
        for result in await everywhere(comms, lambda comm: comm.all_reduce(X + comm.rank, name)):
            assert np.array_equal(result, len(comms) * X + sum(range(len(comms))))


async def all_uses_are_alike(comms: Comms, dtype: str, op: str) -> None:
    """In place and not, of short and of longer arrays."""
    for length in (7, 9001):
        xs = [oracle.data(dtype, length, rank) for rank in range(len(comms))]
        want = oracle.all_reduced(op, xs, comms[0].strategy, f"x{length}")
        for use in range(USES):
            given = [x.copy() for x in xs]

            def call(comm: Communicator, given: list[Any] = given, use: int = use) -> Any:
                x = given[comm.rank]
                return comm.all_reduce(x, f"x{len(x)}", op=op, out=x if use % 2 else None)

            results = await everywhere(comms, call)
            assert all(same_bits(result, want) for result in results), (length, use)
            if not use % 2:
                assert all(same_bits(x, kept) for x, kept in zip(xs, given, strict=True))


async def barriers_wait(comms: Comms, late: int) -> None:
    """For one rank."""
    for _ in range(USES):
        early = [comm.barrier("b") for comm in comms if comm.rank != late]
        await turns(20)
        assert not any(one.done() for one in early)
        await comms[late].barrier("b")
        await asyncio.gather(*early)


async def many_at_once(comms: Comms, names: Sequence[str]) -> None:
    """In an order of its own on each rank."""
    size = len(comms)
    for use in range(USES):
        handles = {}
        for comm in comms:
            order = list(names)
            random.Random(use * size + comm.rank).shuffle(order)
            for name in order:
                handles[comm.rank, name] = comm.all_reduce(X + len(name) + comm.rank, name)
        for (_, name), handle in handles.items():
            assert np.array_equal(await handle, size * (X + len(name)) + sum(range(size)))


async def uses_overlap(comms: Comms, other: int) -> None:
    """On one rank a second use begins while the first is in flight: that goes the ordinary way, and all follow."""
    size = len(comms)
    for _ in range(4):
        await everywhere(comms, lambda comm: comm.all_reduce(X))
    waiting = [comm.all_reduce(X + comm.rank) for comm in comms if comm.rank != other]
    await turns(5)
    first = comms[other].all_reduce(X + other)
    second = comms[other].all_reduce(2 * X)
    again = [comm.all_reduce(2 * X) for comm in comms if comm.rank != other]
    for handle in (*waiting, first):
        assert np.array_equal(await handle, size * X + sum(range(size)))
    for handle in (*again, second):
        assert np.array_equal(await handle, 2 * size * X)
    await sums_are_right(comms, None, 3)


async def one_cancels(comms: Comms, who: int, missing: int) -> None:
    """While another has not posted: it fails on all, and the name works on."""
    await warm(comms, "x")
    for _ in range(2):
        handles = {comm.rank: comm.all_reduce(X, "x") for comm in comms if comm.rank != missing}
        await turns(5)
        handles[who].cancel()
        await heard_of_the_end(comms[missing])
        handles[missing] = comms[missing].all_reduce(X, "x")
        outcomes = dict(zip(handles, await asyncio.gather(*handles.values(), return_exceptions=True), strict=True))
        assert isinstance(outcomes.pop(who), asyncio.CancelledError)
        assert_kinds(list(outcomes.values()), CollectiveAborted)
        await sums_are_right(comms, "x")


async def one_is_missing(comms: Comms, missing: int, timeout_s: float) -> None:
    """A timeout says who."""
    await warm(comms, "x")
    present = [comm for comm in comms if comm.rank != missing]
    outcomes = await ends(present, lambda comm: comm.all_reduce(X, "x", timeout=timeout_s))
    outcomes += await ends([comms[missing]], lambda comm: comm.all_reduce(X, "x"))
    assert_kinds(outcomes, CollectiveTimeout)
    assert all(one.missing == (missing,) for one in outcomes)
    await sums_are_right(comms, "x")


async def one_disagrees(comms: Comms, other: int) -> None:
    """In another slot of the same name: no chunk is sent."""
    for _ in range(3):
        await everywhere(comms, lambda comm: comm.all_reduce(X))
        await everywhere(comms, lambda comm: comm.all_reduce(X[:3]))
    outcomes = await ends(comms, lambda comm: comm.all_reduce(X if comm.rank != other else X[:3]))
    assert_kinds(outcomes, CollectiveMismatch)
    assert all("shape" in str(one) for one in outcomes)
    await sums_are_right(comms, None)
