"""The waits of a rank that closes: bounded, interruptible, and reported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kfcomm.engine import closing
from kfcomm.engine.closing import Closing
from kfcomm.testing import world
from tests.conformance.worlds import turns, until

FOR_EVER_S = 1e6


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@pytest.mark.asyncio
async def test_close_waits_for_calls_that_end_in_time() -> None:
    awaited = never()
    waits = asyncio.ensure_future(Closing(0).wait(awaited, FOR_EVER_S))
    await turns()
    assert not waits.done()
    awaited.set_result(None)
    await waits


@pytest.mark.asyncio
async def test_a_bound_ends_a_wait_and_cancels_what_was_awaited() -> None:
    awaited = never()
    await Closing(0).wait(awaited, 0.0)
    assert awaited.cancelled()


@pytest.mark.asyncio
async def test_hurry_bounds_the_wait_under_way_and_those_to_come() -> None:
    one = Closing(0)
    assert one.left_s(FOR_EVER_S) == FOR_EVER_S
    waits = asyncio.ensure_future(one.wait(never(), FOR_EVER_S))
    await turns()
    one.hurry()
    await turns()
    assert not waits.done()
    assert 0.0 < one.left_s(FOR_EVER_S) <= closing.HURRIED_S
    one.hurry(0.0)
    await waits
    one.hurry()  # an earlier end stands
    assert one.left_s(FOR_EVER_S) == 0.0
    await one.wait(never(), FOR_EVER_S)


@pytest.mark.asyncio
async def test_cancelled_close_waits_no_more() -> None:
    one = Closing(0)
    waits = asyncio.ensure_future(one.wait(never(), FOR_EVER_S))
    await turns()
    waits.cancel()
    await waits
    assert one.was_cancelled
    await one.wait(never(), FOR_EVER_S)


@pytest.mark.asyncio
async def test_a_wait_that_lasts_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(closing, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(closing.logger, "warning", lambda text, *values: said.append(text % values))
    one = Closing(3)
    waits = asyncio.ensure_future(one.wait(never(), FOR_EVER_S, lambda: "for ranks [1]"))
    await until(lambda: said)
    one.hurry(0.0)
    await waits
    assert said[0].startswith("rank 3: close() waits for ranks [1], for 1000000 s more")
    await one.wait(never(), FOR_EVER_S)
    assert len(said) == 1


@pytest.mark.asyncio
async def test_wait_is_not_reported_while_ranks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(closing, "SAID_AFTER_S", 0.0)
    monkeypatch.setattr(closing.logger, "warning", lambda text, *values: said.append(text % values))
    needed = iter(range(9, 1, -1))
    one = Closing(0)
    waits = asyncio.ensure_future(one.wait(never(), FOR_EVER_S, lambda: f"for {next(needed, 1)} ranks"))
    await until(lambda: said)
    one.hurry(0.0)
    await waits
    assert ["for 1 ranks" in line for line in said] == [True]


@pytest.mark.asyncio
async def test_a_leaving_rank_whose_control_plane_is_late_names_no_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "SAID_AFTER_S", 0.0)
    async with world(2) as comms:
        control: Any = comms[1]._session.engine.control
        leave = control.leave

        async def late(timeout_s: float) -> None:
            await leave(timeout_s)
            await until(lambda: "close() waits for a thread of its own" in caplog.text)

        monkeypatch.setattr(control, "leave", late)
        await asyncio.gather(*(comm.close() for comm in comms))
    assert "close() waits for a thread of its own" in caplog.text
    assert "ranks []" not in caplog.text
