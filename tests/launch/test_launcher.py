"""The table of phases in `kfcomm.launch.launcher`, for a job of fixed size, without processes."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from kfcomm.launch.exit_reports import Blame
from kfcomm.launch.launcher import FixedRole, JobOutcome, Launcher, LauncherPhase
from kfcomm.launch.local_ranks import LocalRanks
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.keyvalue import Exit, Why

FOREVER_S = 1e6
TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)


class Child:
    """A process that ends when the test says so."""

    def __init__(self) -> None:
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.signals: list[int] = []
        self.send = self.signals.append

    async def ended(self) -> int:
        return await self.code


class Job:
    """Ranks 0 and 1 are here, rank 2 is on another host."""

    def __init__(self, *, keep_going: bool = False) -> None:
        self.children = {0: Child(), 1: Child()}
        ranks: Any = LocalRanks(FOREVER_S, children=dict[int, Any](self.children))
        ranks.reports = SimpleNamespace(drain=lambda: None)
        self.launcher = Launcher(ranks, Blame(3), keep_going, host=0)
        self.launcher.role = FixedRole(self.launcher)
        self.store = LocalStore()
        self.watching = asyncio.create_task(self.launcher.watch(self.store))

    @property
    def signals(self) -> list[list[int]]:
        return [child.signals for child in self.children.values()]

    async def reaches(self, phase: LauncherPhase) -> None:
        while self.launcher.phase < phase:  # noqa: ASYNC110  nobody is told
            await asyncio.sleep(0)

    async def ends(self, *codes: int) -> JobOutcome:
        """The ranks here end with these codes, as far as they have not ended."""
        for child, code in zip(self.children.values(), codes, strict=True):
            if not child.code.done():
                child.code.set_result(code)
        return await self.watching


@pytest.mark.asyncio
async def test_first_failure_ends_the_others() -> None:
    job = Job()
    job.children[1].code.set_result(3)
    await job.reaches(LauncherPhase.ENDS)
    assert job.signals == [[TERM], []]
    outcome = await job.ends(-TERM, 3)
    assert (outcome.exit_code, job.launcher.phase) == (3, LauncherPhase.STOPPED)
    assert job.store.contents.exits == {0: Exit(0, -TERM), 1: Exit(1, 3)}


@pytest.mark.asyncio
async def test_kept_going_job_waits_for_all_ranks() -> None:
    job = Job(keep_going=True)
    job.children[1].code.set_result(3)
    await job.reaches(LauncherPhase.RUNS_ON)
    job.children[0].code.set_result(0)
    while len(job.launcher.ended) < 2:  # noqa: ASYNC110  nobody is told
        await asyncio.sleep(0)
    assert job.launcher.phase is LauncherPhase.RUNS_ON
    await job.store.report_exit(Exit(2, 5))
    assert (await job.watching).exit_code == 3
    assert job.signals == [[], []]


@pytest.mark.asyncio
async def test_lost_store_ends_the_ranks() -> None:
    job = Job()
    await asyncio.sleep(0)
    job.store.contents.close()
    await job.reaches(LauncherPhase.ENDS)
    assert job.signals == [[TERM], [TERM]]
    assert await job.ends(-TERM, -TERM) == JobOutcome(lost=True)


@pytest.mark.asyncio
async def test_second_signal_kills() -> None:
    job = Job()
    await asyncio.sleep(0)
    job.launcher.interrupt(signal.SIGINT)
    assert job.launcher.phase is LauncherPhase.ENDS
    job.launcher.interrupt(signal.SIGTERM)
    assert job.signals == [[signal.SIGINT, KILL]] * 2
    assert await job.ends(-KILL, -KILL) == JobOutcome(signal=signal.SIGINT)


@pytest.mark.asyncio
async def test_host_that_was_given_up_ends_its_ranks() -> None:
    job = Job()
    await asyncio.sleep(0)
    await job.store.report_exit(Exit(0, 1, Why.SILENT))
    await job.reaches(LauncherPhase.ENDS)
    assert job.signals == [[TERM], [TERM]]
    outcome = await job.ends(0, 0)
    assert outcome.failed is not None
    assert (outcome.failed.rank, outcome.failed.why) == (0, Why.SILENT)
