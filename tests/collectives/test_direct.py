"""The direct strategy: with slots where memory is shared, with messages else, and from one to the other at any use."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kfcomm.errors import CollectiveMismatch, PeerLost
from kfcomm.strategies import Direct, base, builtin
from kfcomm.world.communicator import Communicator
from tests.collectives import scenarios
from tests.collectives.scenarios import USES, X, warm
from tests.conformance import oracle, worlds
from tests.conformance.oracle import CASES
from tests.conformance.worlds import assert_kinds, ends, everywhere, same_bits, turns, world


@pytest.fixture(autouse=True, params=[Direct.ONE_STEP, Direct.STAR, Direct.CHAINS])
def without_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path of messages without a slot, whatever the number of processors; the last: all are long."""
    if request.param is Direct.CHAINS:
        monkeypatch.setattr("kfcomm.strategies.base.DIRECT_NBYTES", 0)
        monkeypatch.setattr("kfcomm.transports.shm.slots.WINDOW_NBYTES", 4096)
        monkeypatch.setattr("kfcomm.transports.shm.slots.MIN_PIECE_NBYTES", 0)
        return
    monkeypatch.setattr(
        builtin, "Direct", SimpleNamespace(ONE_STEP=request.param, STAR=request.param, CHAINS=Direct.CHAINS)
    )


LENGTHS = (0, 1, 2, 3, 100, 4095, 4096, 4097, 30_000)
"""Of float32: to 4,096 everybody folds everything, beyond each its part; of long ones always."""


def slot_of(comm: Communicator, name: str | None) -> Any:
    """The slot of the next use of a cached name; None without one."""
    compiled = comm._group.compiled.get(name)
    return None if compiled is None else compiled.series.slot


def is_slotted(comms: Any, name: str | None) -> bool:
    """Whether the next use of this name needs no message, on every rank."""
    slots = [slot_of(comm, name) for comm in comms]
    return all(slot is not None and not slot.is_dead for slot in slots)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_every_use_of_a_name_gives_the_same(size: int) -> None:
    async with world(size, strategy="direct") as comms:
        for length in LENGTHS:
            xs = [oracle.data("float32", length, rank) for rank in range(size)]
            want = oracle.all_reduced("sum", xs, comms[0].strategy, "x")
            for use in range(USES):
                results = await everywhere(comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], f"x{len(xs[0])}"))
                assert all(same_bits(result, want) for result in results), (length, use)
            assert is_slotted(comms, f"x{length}") == (worlds.LINKS == "shm" and size > 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("nbytes", [base.DIRECT_NBYTES - 4, base.DIRECT_NBYTES, base.DIRECT_NBYTES + 4, 5 << 20])
async def test_messages_of_several_windows(nbytes: int) -> None:
    """For each length every use gives the same, in place and not, and leaves its input unchanged."""
    async with world(3, strategy="direct") as comms:
        xs = [oracle.data("float32", nbytes // 4, rank) for rank in range(3)]
        want = oracle.all_reduced("sum", xs, comms[0].strategy, "x")
        for use in range(USES):
            given = [x.copy() for x in xs]
            results = await everywhere(
                comms,
                lambda comm, given=given, use=use: comm.all_reduce(
                    given[comm.rank], "x", out=given[comm.rank] if use % 2 else None
                ),
            )
            assert all(same_bits(result, want) for result in results), use
            assert use % 2 or all(same_bits(x, kept) for x, kept in zip(xs, given, strict=True))
        assert is_slotted(comms, "x") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
@pytest.mark.parametrize(("dtype", "op"), CASES)
async def test_all_dtypes_and_ops_in_place_and_not(dtype: str, op: str) -> None:
    async with world(3, strategy="direct") as comms:
        await scenarios.all_uses_are_alike(comms, dtype, op)


@pytest.mark.asyncio
async def test_barriers_wait_for_all() -> None:
    async with world(3, strategy="direct") as comms:
        await scenarios.barriers_wait(comms, 0)


@pytest.mark.asyncio
async def test_many_at_once_in_any_order() -> None:
    async with world(3, strategy="direct") as comms:
        await scenarios.many_at_once(comms, [f"n{number}" for number in range(100)])
        assert is_slotted(comms, "n0") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
@pytest.mark.parametrize("members", [[0, 2], [1, 3], [0, 1, 3], [3, 1, 0], [2, 1]])
async def test_groups_of_any_members(members: list[int]) -> None:
    async with world(4, strategy="direct") as comms:
        groups = await asyncio.gather(*(comms[rank].group(members, name="g") for rank in members))
        for length in (5, 9000):
            xs = [oracle.data("float32", length, rank) for rank in members]
            want = oracle.all_reduced("sum", xs, groups[0].strategy, "x")
            for _ in range(USES):
                results = await asyncio.gather(
                    *(group.all_reduce(x, f"x{length}") for group, x in zip(groups, xs, strict=True))
                )
                assert all(same_bits(result, want) for result in results)
            assert is_slotted(groups, f"x{length}") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
@pytest.mark.parametrize("other", [0, 1, 2])
async def test_all_follow_who_goes_the_ordinary_way(other: int) -> None:
    """A second use in flight, of unnamed calls: that rank sends messages; all follow, and stay there."""
    async with world(3, strategy="direct") as comms:
        await scenarios.uses_overlap(comms, other)


@pytest.mark.asyncio
async def test_of_overlapping_uses_an_earlier_one_may_leave_later() -> None:
    """The first rank leaves with the second use, and then, as another one was there first, with the first use."""
    async with world(3, strategy="direct") as comms:
        for _ in range(4):
            await everywhere(comms, lambda comm: comm.all_reduce(X))
        slot = slot_of(comms[1], None)
        if slot is not None:
            slot.is_dead = True
        handles = [comms[2].all_reduce(X), comms[0].all_reduce(X), comms[0].all_reduce(2 * X)]
        await turns(20)
        handles += [comms[1].all_reduce(X), comms[1].all_reduce(2 * X), comms[2].all_reduce(2 * X)]
        results = await asyncio.gather(*handles)
        for place in (0, 1, 3):
            assert np.array_equal(results[place], 3 * X)
        for place in (2, 4, 5):
            assert np.array_equal(results[place], 6 * X)


@pytest.mark.asyncio
async def test_a_signature_that_was_forgotten_has_its_slot_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of signatures are used again: what is known of a series goes, and its slot stays with its key."""
    monkeypatch.setattr("kfcomm.core.names.MAX_SIGNATURES", 3)
    async with world(3, strategy="direct") as comms:
        await warm(comms, "x")
        alone = await comms[0].group([0], name="alone")
        for length in range(1, 5):
            await alone.all_reduce(X[:length])
        for _ in range(3):
            for result in await everywhere(comms, lambda comm: comm.all_reduce(X, "x")):
                assert np.array_equal(result, 3 * X)
        assert is_slotted(comms, "x") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
async def test_a_call_with_options_of_its_own_uses_the_slot_too() -> None:
    async with world(2, strategy="direct") as comms:
        await warm(comms, "x")
        for _ in range(3):
            results = [
                comms[0].all_reduce(X, "x", timeout=60.0, priority=3),
                comms[1].all_reduce(X, "x"),
            ]
            for result in results:
                assert np.array_equal(await result, 2 * X)
        assert is_slotted(comms, "x") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [0, 1, 2])
async def test_a_cancelled_use_fails_on_all_and_the_name_works_on(who: int) -> None:
    async with world(3, strategy="direct") as comms:
        await scenarios.one_cancels(comms, who, (who + 1) % 3)


@pytest.mark.asyncio
@pytest.mark.parametrize("missing", [0, 1, 2])
async def test_a_timeout_says_who_is_missing(missing: int) -> None:
    async with world(3, strategy="direct") as comms:
        await scenarios.one_is_missing(comms, missing, 0.05)


@pytest.mark.asyncio
async def test_ranks_in_different_slots_of_a_name_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk is sent: the ranks find out after a moment."""
    monkeypatch.setattr("kfcomm.core.deadlines.QUIET_AFTER_S", 0.01)
    async with world(3, strategy="direct") as comms:
        await scenarios.one_disagrees(comms, 0)


@pytest.mark.asyncio
async def test_two_kinds_of_unnamed_calls_take_turns() -> None:
    async with world(2, strategy="direct") as comms:
        for use in range(12):
            x = X if use % 3 else X[:2].astype(np.float32)
            for result in await everywhere(comms, lambda comm, x=x: comm.all_reduce(x)):
                assert np.array_equal(result, 2 * x)


@pytest.mark.asyncio
async def test_a_lost_peer_fails_what_waits_in_slots() -> None:
    async with world(3, strategy="direct") as comms:
        await warm(comms, "x")
        handles = [comm.all_reduce(X, "x") for comm in comms[:2]]
        await turns(5)
        comms.kill(2)
        outcomes = await asyncio.gather(*handles, return_exceptions=True)
        assert_kinds(outcomes, PeerLost)


@pytest.mark.asyncio
async def test_strategies_may_change_and_come_again() -> None:
    async with world(3, strategy="direct") as comms:
        await warm(comms, "x")
        for name in ("ring", "direct", "star", "direct", "direct"):
            await everywhere(comms, lambda comm, name=name: comm.set_strategy(name))
            for _ in range(3):
                for result in await everywhere(comms, lambda comm: comm.all_reduce(X + comm.rank, "x")):
                    assert np.array_equal(result, 3 * X + 3)
        assert is_slotted(comms, "x") == (worlds.LINKS == "shm")


@pytest.mark.asyncio
async def test_a_change_that_one_rank_makes_later_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same use of a slot, under the same strategy, but under different generations of it."""
    monkeypatch.setattr("kfcomm.core.deadlines.QUIET_AFTER_S", 0.01)
    async with world(2, strategy="direct") as comms:
        await warm(comms, "x")
        early = comms[0].all_reduce(X, "x")
        swaps = [comm.set_strategy("direct") for comm in comms]
        await asyncio.gather(*swaps)
        late = comms[1].all_reduce(X, "x")
        outcomes = await asyncio.gather(early, late, return_exceptions=True)
        assert_kinds(outcomes, CollectiveMismatch)
        for result in await everywhere(comms, lambda comm: comm.all_reduce(X, "x")):
            assert np.array_equal(result, 2 * X)


@pytest.mark.asyncio
async def test_failing_fold_fails_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2, strategy="direct") as comms:
        await warm(comms, "x")
        series = comms[0]._group.compiled["x"].series

        def broken(*_: Any) -> None:
            raise MemoryError("no room")

        if series.slot is not None:
            series.slot.combine = broken
            outcomes = await ends(comms, lambda comm: comm.all_reduce(X, "x"))
            assert "no room" in str(outcomes[0])
            assert "could not carry out" in caplog.text
            caplog.clear()  # the error's frames hold the slot
            for result in await everywhere(comms, lambda comm: comm.all_reduce(X, "x")):
                assert np.array_equal(result, 2 * X)
