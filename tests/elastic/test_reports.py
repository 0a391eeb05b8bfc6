"""Reports of lost ranks to the store, by ranks that leave: without them a launcher waits for stopped ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from kfcomm.elastic import reports
from kfcomm.testing import world

LOOKS = 3


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.asyncio
async def test_leaving_rank_waits_for_its_report_while_the_store_answers(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(reports, "LOOK_S", 1e-3)
    async with world(2, elastic=True) as comms:
        members = type(comms[0].current._session.network.membership)
        looks: list[str] = []
        told: list[set[int]] = []
        is_time = asyncio.Event()

        async def give_up(_: object, births: Collection[int]) -> None:
            await is_time.wait()
            told.append(set(births))

        def trouble(_: object) -> str:
            looks.append("")
            if len(looks) == LOOKS and answers:
                is_time.set()
            return "" if answers or len(looks) < LOOKS else "the store is gone"

        monkeypatch.setattr(members, "give_up", give_up)
        monkeypatch.setattr(members, "trouble", property(trouble))
        comms.kill(1)
        await comms[0].shrink()
        await comms[0].close()
        assert told == ([{1}] if answers else [])
        assert len(looks) >= LOOKS
