"""Handover of the state to joining ranks: from all owners, with losses on the way, and with checked bytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfcomm.elastic import State, joining
from kfcomm.elastic.joining import Handover, program_digest
from kfcomm.elastic.replicas import spread
from kfcomm.errors import CollectiveError, ConfigError, PeerLost
from kfcomm.testing import run_ranks, world
from tests.elastic.support import Died

NUM = 5 << 19
"""Of float64: 20 MiB, a stripe from each of three ranks."""


def states(comms: Any) -> list[State]:
    """Each rank's own numbers, by which one sees whose they have become."""
    return [State(w=np.full(NUM, comm.rank + 1.0), b=np.zeros(3, np.float32), step=comm.rank) for comm in comms]


async def hand_over(comms: Any, having: tuple[int, ...] | None, mine: Sequence[State], programs: str = "") -> list[Any]:
    """Each rank's place and state then, or its error; None for who died."""

    async def main(comm: Any) -> Any:
        state = mine[comm.rank]
        handing = Handover(comm, comm.begin(), state, programs[comm.rank] if programs else "", {})
        try:
            place = await handing.carry_out([comm.births[comm.rank]], having)
        except Died:
            return None
        except ConfigError as error:  # who cannot take part leaves
            comms.kill(comm.births[comm.rank])
            return error
        except CollectiveError as error:
            return error
        assert (state.w == state.w[0]).all()
        return place, state.w[0], state.step

    return await run_ranks(comms, main)


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.asyncio
async def test_joining_ranks_get_the_state_in_place(transport: Any) -> None:
    async with world(4, elastic=True, transport=transport) as comms:
        mine = states(comms)
        for state in mine[:3]:
            state.w[:], state.step = 7.0, 5
        kept = mine[3].w
        assert await hand_over(comms, (0, 1, 2), mine) == [([0], 7.0, 5)] * 4
        assert mine[3].w is kept


@pytest.mark.asyncio
async def test_lowest_rank_sends_its_state_if_all_have_one() -> None:
    async with world(3, elastic=True) as comms:
        assert await hand_over(comms, None, states(comms)) == [([0], 1.0, 0)] * 3


def dying(monkeypatch: pytest.MonkeyPatch, comms: Any, doomed: set[int]) -> list[int]:
    """These ranks are killed when they come to give or take; returns the epochs in which it was tried."""
    epochs: list[int] = []

    async def tried(comm: Any, arrays: Any, *rest: Any) -> Any:
        epochs.append(comm.epoch)
        birth = comm.births[comm.rank]
        if birth in doomed:
            comms.kill(birth)
            raise Died
        return await spread(comm, arrays, *rest)

    monkeypatch.setattr(joining, "spread", tried)
    return epochs


@pytest.mark.parametrize("doomed", [1, 0, 3])
@pytest.mark.asyncio
async def test_a_rank_that_dies_on_the_way_leaves_it_to_the_others(
    monkeypatch: pytest.MonkeyPatch, doomed: int
) -> None:
    async with world(5, elastic=True) as comms:
        epochs = dying(monkeypatch, comms, {doomed})
        mine = states(comms)
        for state in mine[:3]:
            state.w[:], state.step = 7.0, 5
        found = await hand_over(comms, (0, 1, 2), mine)
        assert found.pop(doomed) is None
        assert found == [([int(doomed == 0)], 7.0, 5)] * 4
        assert sorted(set(epochs)) == [0, 1]


@pytest.mark.asyncio
async def test_the_next_ones_own_is_whole_when_the_lowest_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(3, elastic=True) as comms:
        dying(monkeypatch, comms, {0})
        assert await hand_over(comms, None, states(comms)) == [None, ([1], 2.0, 1), ([1], 2.0, 1)]


@pytest.mark.asyncio
async def test_peer_lost_if_all_owners_of_the_state_die(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(3, elastic=True) as comms:
        dying(monkeypatch, comms, {0})
        found = await hand_over(comms, (0,), states(comms))
        assert found[0] is None
        assert [type(one) for one in found[1:]] == [PeerLost] * 2
        assert "all ranks that had the state are lost" in str(found[1])


@pytest.mark.asyncio
async def test_corrupted_transfer_raises_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(3, elastic=True) as comms:

        async def changed(comm: Any, *rest: Any) -> Any:
            sums = await spread(comm, *rest)
            return {number: value + (comm.rank == 2) for number, value in sums.items()}

        monkeypatch.setattr(joining, "spread", changed)
        found = await hand_over(comms, (0, 1), states(comms))
        assert [type(one) for one in found] == [CollectiveError] * 3
        assert "what came is not what was sent" in str(found[0])


@pytest.mark.asyncio
async def test_joining_rank_of_another_program_is_refused_and_the_others_continue() -> None:
    """Ranks that were there from the beginning may run different programs; any of these will do."""
    async with world(5, elastic=True) as comms:
        mine = states(comms)
        for state in mine:
            state.w[:], state.step = 7.0, 5
        mine[4].w[:] = 1.0
        found = await hand_over(comms, (0, 1), mine, "abxba")
        assert isinstance(found.pop(2), ConfigError)
        assert found == [([0], 7.0, 5)] * 4


def test_a_program_is_the_file_that_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("one")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)
    one = program_digest()
    file.write_text("other")
    other = program_digest()
    file.unlink()
    assert len({one, other, program_digest()}) == 3
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert program_digest() == ""
