"""Kill matrix: verb x moment of the death x who dies -> what surviving ranks may get; and how they decide it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.elastic.call_log import CallLog, CallOutcome, Entry, Standing
from kfcomm.elastic.outcomes import decide
from kfcomm.errors import EpochChanged, KfcommError
from kfcomm.testing import run_ranks, world
from tests.elastic import programs
from tests.elastic.support import Died, die, leave_unheard

PHASES = ("before", "posted", "cancelled", "told", "over")
"""The dying rank has not made the call; has; has not, and another one cancels it; has its result, and one rank does not
hear of its own; has ended the step."""
ROOT, OTHER, VICTIMS = 1, 2, (0, 1, 3)
"""The root of calls; the rank that cancels, or does not hear of its result; those that die, one in each world."""
ROOTED = ("broadcast", "reduce", "gather", "scatter", "broadcast_object", "gather_object")
NOT_BY_FEWER = ("scatter", "reduce_scatter", "all_to_all")
CALL = (7, ROOT)
LOSSES = ["finish", *(pytest.param(one, marks=pytest.mark.slow) for one in ("raise", "restart_step"))]


def permitted(verb: str, phase: str, victim: int, on_loss: str) -> set[str]:
    """Return the ends that a call may have, the same on all surviving ranks."""
    if phase == "over":
        return {"ok"}
    if phase == "cancelled":
        return {"CollectiveAborted", "EpochChanged", "PeerLost"}
    # A broadcast needs nothing of the ranks that receive it, so it may be over when one of them dies.
    is_perhaps_over = phase != "before" or (verb in ROOTED and victim != ROOT)
    if on_loss != "finish" or verb in NOT_BY_FEWER:
        return {"EpochChanged"} | ({"ok"} if is_perhaps_over else set())
    if verb in ROOTED and victim == ROOT:
        return {"PeerLost"} | ({"ok"} if is_perhaps_over else set())
    return {"ok"}


async def end_of(handle: Any) -> tuple[str, Any, Any]:
    """How a call has ended, its result as plain values, and its contributors."""
    try:
        value = await handle
    except (KfcommError, asyncio.CancelledError) as error:
        return type(error).__name__, None, None
    return "ok", programs.as_plain(value), handle.contributors


class Rank:
    """One rank of a world of four, in which one dies in step 1."""

    def __init__(self, comms: Any, comm: Any, verb: str, phase: str, victim: int) -> None:
        self._comms, self._comm, self._verb, self._phase = comms, comm, verb, phase
        self._is_victim = comm.rank == victim
        self._cancelled: asyncio.Event = comms.cancelled
        self.ends: list[tuple[int, tuple[int, ...], tuple[str, Any, Any]]] = []
        self.used = np.zeros(24)

    async def run(self, on_loss: str) -> Rank | None:
        try:
            async with Elastic(self._comm, State(), on_loss=on_loss) as elastic:
                async for step in elastic.steps(ElasticSampler(24, 6, seed=None), used_in="used"):
                    await self._step(step)
        except Died:
            return None
        return self

    async def _step(self, step: Any) -> None:
        comm, is_doomed = self._comm, self._is_victim and step.number == 1
        birth, phase = comm.births[comm.rank], self._phase
        if is_doomed and phase == "cancelled":
            await self._cancelled.wait()
        if is_doomed and phase in ("before", "cancelled"):
            die(self._comms, comm)
        handle = programs.begin(comm, birth, step.number, 0, (self._verb, *CALL), name="c")
        if is_doomed and phase == "posted":
            die(self._comms, comm)
        if step.number == 1 and phase == "cancelled" and birth == OTHER:
            handle.cancel()
            self._cancelled.set()
        end = await end_of(handle)
        if is_doomed and phase == "told":
            die(self._comms, comm)
        self.ends.append((step.number, comm.births, end))
        mask = np.zeros(24)
        mask[step.indices] = 1
        try:
            self.used += await comm.all_reduce(mask, "used")
        except EpochChanged:
            step.is_void = True
        if is_doomed:
            die(self._comms, comm)


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank does not hear of the end of its call ``c`` in the first epoch."""

    def is_unheard(log: CallLog, entry: Entry, handle: Any) -> bool:
        is_last = entry.standing is Standing.HELD or not entry.call.kind.is_own
        is_in_time = log.comm.epoch == 0 and log.step == 2  # the boundary before step 0 counts
        return is_in_time and log.comm.rank == OTHER and entry.name == "c" and is_last and not handle.cancelled()

    leave_unheard(monkeypatch, is_unheard)


@pytest.mark.parametrize(
    "on_loss", ["finish", *(pytest.param(one, marks=pytest.mark.slow) for one in ("raise", "restart_step"))]
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("verb", programs.VERBS)
@pytest.mark.asyncio
async def test_survivors_have_one_permitted_end_and_each_sample_is_used_once(
    monkeypatch: pytest.MonkeyPatch, verb: str, phase: str, on_loss: str
) -> None:
    if phase == "told":
        deaf(monkeypatch)
    for victim in VICTIMS:
        async with world(4, elastic=True) as comms:
            comms.cancelled = asyncio.Event()

            async def main(comm: Any, comms: Any = comms, victim: int = victim) -> Any:
                return await Rank(comms, comm, verb, phase, victim).run(on_loss)

            found = await run_ranks(comms, main)
        living = [one for one in found if one is not None]
        assert [one is None for one in found] == [rank == victim for rank in range(4)]
        kinds = {end[0] for one in living for number, _, end in one.ends if number == 1} - {"CancelledError"}
        assert kinds <= permitted(verb, phase, victim, on_loss)
        if phase == "over":  # others may have begun the next step, in which the dead rank has its place then
            later = {end[0] for one in living for number, _, end in one.ends if number == 2}
            assert len(later) == 1
            assert later <= {"ok"} | permitted(verb, "before", victim, on_loss)
        assert len(kinds) == 1 or phase == "cancelled"
        for rank, one in zip([rank for rank in range(4) if rank != victim], living, strict=True):
            assert (one.used == 1).all()
            for (number, births, end), (_, _, other) in zip(one.ends, living[0].ends, strict=True):
                assert end[2] == other[2]
                if end[0] == "ok":
                    place = programs.Place(rank, births, number, 0)
                    assert end[1] == programs.expected(place, (verb, *CALL), end[2])
                else:
                    assert number == 1 or (phase, number) == ("over", 2)


ALL = (0, 1, 2)
DONE, HELD, FAILED = Standing.DONE, Standing.HELD, Standing.FAILED


def row(name: str, standing: Standing, number: int = 0, step: int = 5, contributors: tuple[int, ...] = ALL):
    return (name, number, standing, contributors if standing == DONE else (), step, "")


def test_call_done_on_one_rank_is_sent_by_the_lowest() -> None:
    said = [(5, []), (5, [row("a", DONE)]), (5, [row("a", DONE)])]
    assert decide(said, (4, 6, 9)) == {(("a", 0), 5): CallOutcome(5, 6, ALL)}


def test_equal_standings_need_no_outcome() -> None:
    assert decide([(5, [row("a", DONE), row("b", FAILED)])] * 3, ALL) == {}
    assert decide([(5, []), (5, [row("a", HELD)])], (0, 1)) == {}


def test_call_failed_on_one_rank_fails_on_all_unless_done_on_another() -> None:
    assert decide([(5, [row("a", FAILED)]), (5, [])], (0, 1)) == {(("a", 0), 5): CallOutcome(5, -1, (), "")}
    said = [(5, [row("a", FAILED)]), (5, [row("a", DONE)]), (5, [])]
    assert decide(said, ALL) == {(("a", 0), 5): CallOutcome(5, 1, ALL)}
    assert decide(said[:2], (0, 1)) == {}  # both have ended it


def test_rank_that_is_a_step_behind_gets_what_the_others_have_of_both_steps() -> None:
    ahead = [row("a", DONE), row("b", FAILED), row("a", DONE, step=6), row("boundary", DONE, number=5)]
    assert decide([(6, ahead), (5, [])], (4, 9)) == {
        (("a", 0), 5): CallOutcome(5, 4, ALL),
        (("b", 0), 5): CallOutcome(5, -1, (), ""),
        (("a", 0), 6): CallOutcome(6, 4, ALL),
        (("boundary", 5), 5): CallOutcome(5, 4, ALL),
    }
    assert decide([(6, ahead), (6, ahead[2:3])], (4, 9)) == {}


def test_steps_that_are_over_are_over_for_all() -> None:
    boundary = row("boundary", DONE, number=6, step=6)
    said = [(5, [row("a", DONE), row("b", FAILED)]), (6, [boundary, row("a", HELD, number=1, step=6)])]
    assert decide(said, (0, 1)) == {(("boundary", 6), 6): CallOutcome(6, 1, ALL)}
