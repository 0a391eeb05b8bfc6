"""Messages about the order: in order, none lost, none twice, whatever becomes of links."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kfcomm.arrays import adapt
from kfcomm.collectives.on_device import formation
from kfcomm.collectives.on_device.formation import TAG, Channel
from kfcomm.testing import MemoryWorld
from tests.conformance import worlds
from tests.conformance.worlds import until


def _channels(comms: MemoryWorld) -> tuple[list[Channel], list[list[Any]]]:
    heard: list[list[Any]] = [[] for _ in comms]
    loop = asyncio.get_running_loop()

    def listener(rank: int) -> formation.Listener:
        return lambda sender, said: heard[rank].append((sender, said))

    made = [Channel(comm._mailbox, comm._group.view, loop, listener(comm.rank), lambda: None) for comm in comms]
    return made, heard


@pytest.mark.asyncio
async def test_messages_come_in_order_and_those_of_one_turn_together() -> None:
    async with worlds.world(3) as comms:
        channels, heard = _channels(comms)
        for number in range(50):
            channels[0].tell_all(["many", number])
        channels[0].tell(2, "only you")
        await until(lambda: len(heard[1]) == 50 and len(heard[2]) == 51)
        assert heard[1] == [(0, ["many", number]) for number in range(50)]
        assert heard[2][-1] == (0, "only you")
        assert channels[0].num_sent == 2
        channels[1].tell(0, b"bytes")
        channels[2].tell(0, {"a": None})
        await until(lambda: len(heard[0]) == 2)
        assert sorted(heard[0], key=lambda one: one[0]) == [(1, b"bytes"), (2, {"a": None})]


@pytest.mark.asyncio
async def test_messages_arrive_in_the_end() -> None:
    async with worlds.world(3) as comms:
        channels, heard = _channels(comms)
        one = channels[0]
        first = one.batch
        assert one.is_heard(first)
        one.tell_all("first")
        assert not one.is_heard(first)
        await asyncio.sleep(0)
        second = one.batch
        one.tell(1, "second")
        assert second > first
        assert one.is_heard(first - 1)
        await until(lambda: one.is_heard(second))
        assert (heard[1], heard[2]) == ([(0, "first"), (0, "second")], [(0, "first")])


@pytest.mark.asyncio
async def test_messages_lost_by_a_broken_link_arrive_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formation, "AGAIN_AFTER_S", 0.0)
    async with worlds.world(2) as comms:
        channels, heard = _channels(comms)
        for number in range(30):
            channels[0].tell(1, number)
            if number % 7 == 3:
                await asyncio.sleep(0)
                comms.unplug(0)
            await asyncio.sleep(0)
        await until(lambda: len(heard[1]) == 30)
        assert heard[1] == [(0, number) for number in range(30)]


@pytest.mark.asyncio
async def test_unreadable_messages_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with worlds.world(2) as comms:
        channels, heard = _channels(comms)
        for record in (
            np.zeros(64, np.uint8),
            np.full(64, 0xC1, np.uint8),
            np.frombuffer(b"\x92\xff\x90" + bytes(61), np.uint8),
        ):
            await comms[0]._mailbox.send(adapt(record), 1, TAG)
        await until(lambda: caplog.text.count("invalid message") == 3)
        channels[0].tell(1, "well")
        await until(lambda: heard[1])
        assert heard[1] == [(0, "well")]


@pytest.mark.asyncio
async def test_a_closed_channel_neither_sends_nor_hears() -> None:
    async with worlds.world(2) as comms:
        channels, heard = _channels(comms)
        channels[0].tell(1, "before")
        channels[0].close()
        channels[1].close()
        await asyncio.sleep(0)
        assert heard == [[], []]
        assert channels[0].num_sent == 0
