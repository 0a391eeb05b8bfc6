"""Totals of the engine for collectives that run alone, overlap, or fail."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from kfcomm.adapt import Adaptation
from kfcomm.adapt.metrics import EngineMeter
from kfcomm.engine import observer
from kfcomm.engine.observer import EngineLoad
from tests.conformance.worlds import everywhere, until, world


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class FakeOperation:
    """As much of an operation as counts here."""

    def __init__(self, posted_s: float, nbytes: int = 10, failed: bool = False) -> None:
        self.posted_s = posted_s
        self.nbytes = nbytes
        self.failed = failed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(observer, "time", made)
    return made


def test_times_that_overlap_count_once(clock: Clock) -> None:
    live: list[Any] = []
    total = EngineLoad(lambda: live)
    first, second = FakeOperation(101.0), FakeOperation(103.0, 20)
    live += [first, second]
    clock.now_s = 104.0
    live.remove(second)
    total.done(second, is_last=False)  # type: ignore[arg-type]
    assert total.busy_s(104.0) == 3.0
    clock.now_s = 106.0
    live.remove(first)
    total.done(first, is_last=True)  # type: ignore[arg-type]
    assert total.busy_s(106.0) == total.busy_s(120.0) == 5.0
    assert (total.count, total.nbytes) == (2, 30)


def test_the_first_may_end_first(clock: Clock) -> None:
    live: list[Any] = [FakeOperation(101.0), FakeOperation(102.0)]
    total = EngineLoad(lambda: live)
    total.done(live.pop(0), is_last=False)
    assert total.busy_s(110.0) == 9.0
    clock.now_s = 112.0
    total.done(live.pop(), is_last=True)
    assert total.busy_s(113.0) == 11.0


def test_failed_collective_counts_time_and_no_bytes(clock: Clock) -> None:
    total = EngineLoad(list)
    clock.now_s = 105.0
    total.failed(FakeOperation(101.0, failed=True), "", is_last=True)  # type: ignore[arg-type]
    assert total.busy_s(200.0) == 4.0
    assert (total.count, total.nbytes) == (0, 0)


def test_earlier_collective_counts_from_the_start_of_measuring(clock: Clock) -> None:
    live: list[Any] = [FakeOperation(90.0)]
    total = EngineLoad(lambda: live)
    assert total.busy_s(103.0) == 3.0
    clock.now_s = 104.0
    total.done(live.pop(), is_last=True)
    assert total.busy_s(110.0) == 4.0


@pytest.mark.asyncio
async def test_a_rank_that_posts_late_is_less_busy() -> None:
    x = np.ones(1000, np.float32)
    async with world(2, aborted=True) as comms:
        meters = [EngineMeter(comm) for comm in comms]
        mine = comms[0].all_reduce(x, "x")
        posted_s = time.monotonic()
        await until(lambda: time.monotonic() > posted_s + 0.01)
        await asyncio.gather(mine, comms[1].all_reduce(x, "x"))
        early, late = (meter.read() for meter in meters)
        assert (early.nbytes, early.count) == (late.nbytes, late.count) == (4000, 1)
        assert early.busy_s - late.busy_s > 0.005
        assert early.busy_s <= early.time_s
        handle = comms[0].all_reduce(x, "y")
        handle.cancel()
        await until(lambda: not comms[0]._session.engine.in_flight())
        assert meters[0].read().count == 1
        await asyncio.gather(*(comm.barrier() for comm in comms))


@pytest.mark.asyncio
async def test_the_metrics_of_a_step_are_of_its_collectives_alone() -> None:
    async with world(3) as comms:

        async def main(comm: Any) -> Any:
            async with Adaptation(comm, []) as adaptation:
                await comm.all_reduce(np.ones(5000), "between")
                async with adaptation.step():
                    await comm.all_reduce(np.ones(100), "a")
                    await comm.all_gather(np.ones(10), "b")
                await comm.all_reduce(np.ones(5000), "between")
                return adaptation.metrics

        for metrics in await everywhere(comms, main):
            assert metrics.nbytes == (800 + 240,) * 3
            assert metrics.counts == (2,) * 3
            assert all(0 < busy <= all_s for busy, all_s in zip(metrics.busy_s, metrics.seconds, strict=True))
            assert metrics.throughput > 0
