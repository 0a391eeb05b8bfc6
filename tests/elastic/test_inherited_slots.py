"""Long calls after a loss: their first use is in the slot of the former epoch, if all surviving ranks have the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from kfcomm.elastic import Elastic, ElasticSampler, State
from kfcomm.engine.inherited import InheritedSlots
from kfcomm.errors import PeerLost
from kfcomm.testing import run_ranks, world
from tests.elastic.support import Died, die

COUNT = 5000
"""Elements of a long message, which goes through its slot in many windows."""
LOSS = 5
"""Step in which the first rank dies; slots are there from the second use on."""
LAST = 9


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfcomm.strategies.base.DIRECT_NBYTES", 1 << 12)
    monkeypatch.setattr("kfcomm.transports.shm.slots.WINDOW_NBYTES", 1 << 12)
    monkeypatch.setattr("kfcomm.transports.shm.slots.MIN_PIECE_NBYTES", 0)


def slot_of(comm: Any, name: str) -> Any:
    key = getattr(comm, "current", comm)._session.engine.router.names.find(b"world", name)
    slots = [] if key is None else list((key.slots or {}).values())
    return slots[-1] if slots else None


def given(uid: int, step: int) -> Any:
    return np.arange(COUNT, dtype=np.float64) * (uid + 1) + step


class Seen(NamedTuple):
    """Slot of a name at the end of a step."""

    where: tuple[int, int]  # memory, and offset there
    members: list[int]
    is_inherited: bool
    is_dead: bool

    @classmethod
    def of(cls, slot: Any) -> Seen | None:
        if slot is None:
            return None
        memory = slot.memory
        return cls((memory.identity, slot.at), slot.members, memory.is_inherited, slot.is_dead)


class Loop:
    """Steps of all ranks, in which some are lost: ``lost`` by step."""

    def __init__(self, comms: Any, lost: dict[int, int], names: tuple[str, ...] = ("g",)) -> None:
        self.comms, self.lost, self.names = comms, lost, names
        self.slots: dict[tuple[int, int], list[Any]] = {}  # by uid and step, after its calls

    async def run(self, comm: Any) -> bool:
        uid = comm.births[comm.rank]
        try:
            async with Elastic(comm, State()) as elastic:
                async for step in elastic.steps(ElasticSampler(LAST + 1, 1, seed=None)):
                    if self.lost.get(step.number) == uid:
                        die(self.comms, comm)
                    calls = [comm.all_reduce(given(uid, step.number), name=name) for name in self.names]
                    for call in calls:
                        total = await call
                        want = sum(given(one, step.number) for one in call.contributors)
                        assert np.array_equal(total, want)
                    self.slots[uid, step.number] = [Seen.of(slot_of(comm, name)) for name in self.names]
        except Died:
            return False
        return True


@pytest.mark.asyncio
@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_first_use_after_a_loss_is_in_the_former_slot(lost: int) -> None:
    async with world(4, elastic=True, transport="shm") as comms:
        loop = Loop(comms, {LOSS: lost}, ("g", "h"))
        assert await run_ranks(comms, loop.run) == [uid != lost for uid in range(4)]
        for uid in set(range(4)) - {lost}:
            before, after = loop.slots[uid, LOSS - 2], loop.slots[uid, LOSS]
            assert [one.where for one in before] == [one.where for one in after]
            assert [(one.is_inherited, one.is_dead) for one in before + after] == 2 * [(False, False)] + 2 * [
                (True, False)
            ]
            assert loop.slots[uid, LAST] == after  # it is used again


@pytest.mark.asyncio
async def test_slots_are_inherited_again_after_another_loss() -> None:
    async with world(4, elastic=True, transport="shm") as comms:
        loop = Loop(comms, {LOSS: 0, LOSS + 1: 2})
        assert await run_ranks(comms, loop.run) == [False, True, False, True]
        (first,), (second,) = loop.slots[1, LOSS], loop.slots[1, LOSS + 1]
        assert first.where == second.where
        assert (first.members, second.members) == ([0, 1, 2], [0, 1])
        assert loop.slots[3, LAST] == [second]
        assert second.is_inherited
        assert not second.is_dead


@pytest.mark.asyncio
@pytest.mark.parametrize("odd", [0, 1])
async def test_calls_go_by_links_where_one_rank_has_other_slots(odd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, found = InheritedSlots.of, []

    def of(keys: Any, pending: Any) -> InheritedSlots:
        found.append(real(keys, pending))
        return InheritedSlots({}) if len(found) == odd + 1 else found[-1]

    monkeypatch.setattr(InheritedSlots, "of", of)
    async with world(3, elastic=True, transport="shm") as comms:
        loop = Loop(comms, {LOSS: 2})
        assert await run_ranks(comms, loop.run) == [True, True, False]
        assert found[0].digest == found[1].digest
        assert not any(loop.slots[uid, LAST][0].is_inherited for uid in range(2))


@pytest.mark.asyncio
async def test_programs_that_shrink_themselves_use_former_slots() -> None:
    async with world(3, transport="shm") as comms:

        async def use(comm: Any, uids: list[int]) -> None:
            total = await comm.all_reduce(given(uids[comm.rank], 0), name="g")
            assert np.array_equal(total, sum(given(uid, 0) for uid in uids))

        async def main(comm: Any) -> bool:
            for _ in range(3):
                await use(comm, [0, 1, 2])
            if comm.rank == 0:
                comms.kill(0)
                return False
            with pytest.raises(PeerLost):
                await use(comm, [0, 1, 2])
            next_one = await comm.shrink()
            await use(next_one, [1, 2])
            return Seen.of(slot_of(next_one, "g")).is_inherited

        assert await run_ranks(list(comms), main) == [False, True, True]
