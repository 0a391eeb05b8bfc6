"""A call that is refused, fails or is cancelled on one rank leaves nothing of itself in the calls that follow.

On links through shared memory the calls under one name share a slot: there a rank that is late would take what is shown
for a later use for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveAborted, CollectiveMismatch, ConfigError
from tests.conformance.worlds import turns, world

SIZE = 3
USES = 6
"""After which a slot is taken, where there is one."""
UNSENDABLE: list[Any] = []
UNSENDABLE.append(UNSENDABLE)

CALLS: dict[str, tuple[Callable[[Any, Any, str | None], Any], Callable[[int], Any], Any]] = {
    "all_reduce": (lambda c, x, n: c.all_reduce(x, n), lambda number: np.full(3, number), np.array(["x"])),
    "all_gather": (lambda c, x, n: c.all_gather(x, n), lambda number: np.full(3, number), np.array(["x"])),
    "broadcast": (lambda c, x, n: c.broadcast(x, 0, n), lambda number: np.full(3, number), np.array(["x"])),
    "broadcast_object": (lambda c, x, n: c.broadcast_object(x, 0, n), lambda n: {"n": n, "x": "x" * n}, UNSENDABLE),
    "all_gather_object": (lambda c, x, n: c.all_gather_object(x, n), lambda n: {"n": n, "x": "x" * n}, UNSENDABLE),
    "gather_object": (lambda c, x, n: c.gather_object(x, 1, n), lambda n: {"n": n, "x": "x" * n}, UNSENDABLE),
    "scatter_object": (
        lambda c, x, n: c.scatter_object([x] * SIZE, 0, n), lambda n: {"n": n, "x": "x" * n}, UNSENDABLE,
    ),
}  # fmt: skip


def right(verb: str, rank: int, value: Any) -> Any:
    if verb == "all_reduce":
        return value * SIZE
    if verb in ("all_gather", "all_gather_object") or (verb == "gather_object" and rank == 1):
        return [value] * SIZE
    return None if verb == "gather_object" else value


def assert_right(verb: str, rank: int, got: Any, value: Any) -> None:
    wanted = right(verb, rank, value)
    if isinstance(value, dict):
        assert got == wanted
    else:
        np.testing.assert_array_equal(got, wanted)


async def _called(call: Callable[[Any, Any, str | None], Any], comm: Any, x: Any, name: str | None) -> Any:
    return await call(comm, x, name)


@pytest.mark.asyncio
@pytest.mark.parametrize("late_turns", [0, 1, 3, 10])
@pytest.mark.parametrize("name", ["name", None])
@pytest.mark.parametrize("verb", CALLS)
async def test_calls_after_one_that_was_refused_meet_their_like(verb: str, name: str | None, late_turns: int) -> None:
    call, value, bad = CALLS[verb]
    async with world(SIZE, aborted=True) as comms:

        async def program(comm: Any) -> None:
            for number in range(3 * USES):
                is_refused = number % USES == USES - 1
                if comm.rank:
                    await turns(late_turns)
                x = bad if is_refused and comm.rank == 0 else value(number)
                (got,) = await asyncio.gather(_called(call, comm, x, name), return_exceptions=True)
                if not is_refused:
                    assert_right(verb, comm.rank, got, x)
                elif comm.rank == 0:
                    assert isinstance(got, ConfigError)
                else:
                    assert isinstance(got, CollectiveAborted)
                    assert "rank 0 refused its call" in str(got)

        await asyncio.gather(*map(program, comms))


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["all_reduce", "broadcast_object", "all_gather_object"])
async def test_calls_after_one_that_was_cancelled_meet_their_like(verb: str) -> None:
    call, value, _ = CALLS[verb]
    async with world(SIZE, aborted=True) as comms:
        for number in range(3 * USES):
            if number % USES == USES - 1:
                call(comms[0], value(0), None).cancel()
            mine = call(comms[0], value(number), None)
            others = []
            if number % USES == USES - 1:
                others = [call(comm, value(0), None) for comm in comms[1:]]
            results = await asyncio.gather(mine, *(call(comm, value(number), None) for comm in comms[1:]))
            for rank, got in enumerate(results):
                assert_right(verb, rank, got, value(number))
            for rank, end in enumerate(await asyncio.gather(*others, return_exceptions=True), 1):
                if not isinstance(end, CollectiveAborted):  # it was complete there
                    assert_right(verb, rank, end, value(0))


@pytest.mark.asyncio
async def test_calls_after_ranks_have_disagreed_meet_their_like() -> None:
    async with world(2, aborted=True) as comms:
        small, large = np.ones(2), np.ones(5)
        for _ in range(USES):
            for x in (small, large):
                await asyncio.gather(*(comm.all_reduce(x, "n") for comm in comms))
        first = comms[0].all_reduce(small, "n")
        other = comms[1].all_reduce(large, "n")
        ends = await asyncio.gather(first, other, return_exceptions=True)
        assert all(isinstance(one, CollectiveMismatch) for one in ends)
        for number in range(USES):
            sums = await asyncio.gather(*(comm.all_reduce(large * number, "n") for comm in comms))
            assert all((one == 2 * number).all() for one in sums)


class Raising(list[Any]):
    """Argument of a program that raises on use."""

    def __iter__(self) -> Any:
        raise RuntimeError("it cannot be read")

    def __len__(self) -> int:
        raise RuntimeError("it cannot be read")


UNREADABLE = [UNSENDABLE, {"a": [1, {"b": UNSENDABLE}]}, Raising(), {1}, "\ud800", 1 << 70]

OBJECTS: dict[str, Callable[[Any, Any], Any]] = {
    "broadcast_object": lambda c, x: c.broadcast_object(x, 0),
    "all_gather_object": lambda c, x: c.all_gather_object(x),
    "gather_object": lambda c, x: c.gather_object(x, 1),
    "scatter_object": lambda c, x: c.scatter_object([1, x], 0),
    "send_object": lambda c, x: c.recv_object(0) if c.rank else c.send_object(x, 1),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", OBJECTS)
@pytest.mark.parametrize("number", range(len(UNREADABLE)))
async def test_an_object_that_cannot_be_carried_is_told_at_once_to_all_with_rank_and_reason(
    verb: str, number: int
) -> None:
    async with world(2, aborted=True) as (a, b):
        with pytest.raises(ConfigError, match="cannot carry") as refused:
            OBJECTS[verb](a, UNREADABLE[number])
        with pytest.raises(CollectiveAborted) as told:
            await OBJECTS[verb](b, 1)
        assert str(refused.value) in str(told.value)
        assert "rank 0" in str(told.value)


@pytest.mark.asyncio
async def test_arrays_and_comparisons_of_what_holds_itself_are_refused_in_plain_words() -> None:
    async with world(2, aborted=True) as (a, b):
        for mine, other in (
            (lambda: a.send(UNSENDABLE, 1), lambda: b.recv(0)),
            (lambda: a.all_reduce(UNSENDABLE), lambda: b.all_reduce(1)),
            (lambda: a.consensus(UNSENDABLE), lambda: b.consensus(1)),
        ):
            with pytest.raises(ConfigError, match="holds itself"):
                mine()
            with pytest.raises(CollectiveAborted, match=r"rank 0 .*holds itself"):
                await other()
