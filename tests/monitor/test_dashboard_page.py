"""The dashboard's page in headless Chromium: its parts, live updates, deaths, markup in names, and no errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from bench import chromium
from kfcomm.monitor.dashboard.frames import figures, names
from kfcomm.monitor.dashboard.serving import STATIC, Address, served
from kfcomm.monitor.dashboard.watching import JobObserver
from kfcomm.monitor.live import Job
from kfcomm.monitor.statistics import KeyStatistics, PeerStatistics, Statistics
from kfcomm.monitor.top import JobWatcher
from tests.chromium import needed
from tests.launch.launched import command, environ
from tests.monitor.test_dashboard import job

MARKUP = "<b>markup</b>"
ROWS = "[...document.querySelectorAll('#names .body .row')].map((row) => row.firstChild.textContent)"
STATE = "document.querySelector('#state').textContent"


@contextlib.asynccontextmanager
async def shown(name: str) -> AsyncIterator[chromium.Page]:
    """The page of a job; it logs no error."""
    needed()
    async with served(JobObserver(name), Address(port=0)) as url, chromium.page(url) as page:
        yield page
        assert page.errors == []


@pytest.mark.asyncio
async def test_page_shows_a_job_live_and_a_killed_rank_within_two_seconds(tmp_path: Path) -> None:
    needed()
    with job(tmp_path, "--keep-going", size=3) as (_, name, pids):
        async with shown(name) as page:
            await page.until(f"{STATE} === 'runs' && document.querySelectorAll('.flow').length >= 3")
            assert await page.value("document.querySelector('#job').textContent") == name
            assert await page.value("document.querySelectorAll('#graph .rank').length") == 3
            assert await page.value("document.querySelectorAll('#ranks tbody tr').length") == 3
            await page.until("document.querySelector('#events').textContent.includes('ring')")
            await page.until("document.querySelectorAll('#training canvas').length >= 2")  # loss, size
            await page.until(f"{ROWS}.includes({MARKUP!r})")  # as text
            assert await page.value("document.querySelectorAll('#names b, #waits b i').length") == 0
            before = await page.value("document.querySelector('#ranks tbody').textContent")
            await page.until(f"document.querySelector('#ranks tbody').textContent !== {before!r}")
            await page.value("window.killed = performance.now()")
            os.kill(pids[1], signal.SIGKILL)
            await page.until("document.querySelectorAll('.rank.gone').length")
            assert await page.value("performance.now() - window.killed") < 2000
            await page.until("document.querySelector('#alarms').textContent.includes('gone: rank')")


@pytest.mark.asyncio
async def test_page_names_the_rank_that_hangs_and_its_line(tmp_path: Path) -> None:
    needed()
    with job(tmp_path) as (_, name, _):
        async with shown(name) as page:
            await page.until(f"{STATE} === 'runs'")
            (tmp_path / "held.hang").touch()
            text = await page.until("document.querySelectorAll('#waits .wait').length && waits.textContent")
            assert f"all_reduce '{MARKUP}'" in text
            assert "missing: rank 1" in text
            assert "<string>:13 in <module>" in text
            await page.until("document.querySelectorAll('#graph .waiting').length === 1")


@pytest.mark.asyncio
async def test_page_of_a_job_that_ends_says_so_and_why(tmp_path: Path) -> None:
    needed()
    seen = tmp_path / "seen"  # the server ends with the job, so the job waits until the page is there
    program = (
        "import os, sys, time, kfcomm\nwith kfcomm.sync.init() as comm:\n while not os.path.exists(sys.argv[1]):\n"
        "  time.sleep(0.05)\n raise SystemExit(3)"
    )
    options = ("run", "-n", "2", "--dashboard", sys.executable, "-c", program, str(seen))
    pipe = asyncio.subprocess.PIPE
    run = await asyncio.create_subprocess_exec(*command(*options), env=environ(), stdout=pipe, stderr=pipe)
    assert run.stderr is not None
    try:
        while (found := re.search(r"dashboard: (\S+)", (await run.stderr.readline()).decode())) is None:
            assert not run.stderr.at_eof()
        async with chromium.page(found[1]) as page:
            await page.until(f"{STATE} === 'runs'")
            seen.touch()
            await page.until(f"{STATE} === 'ended'")
            await page.until("document.querySelector('#alarms').textContent.includes('failed first: exit code 3')")
            assert not [error for error in page.errors if "ERR_CONNECTION_REFUSED" not in error]
    finally:
        seen.touch()
        await run.communicate()
    assert run.returncode == 3


class Source:
    """Statistics of a job that is not there: many ranks and many names."""

    def __init__(self, size: int, num_names: int) -> None:
        self.size, self.num_names, self.time_s = size, num_names, 0.0

    def watcher(self) -> JobWatcher:
        job = Job("many", tuple((rank, f"many/{rank}") for rank in range(self.size)))
        return JobWatcher("many", find=lambda: [job], read=lambda one: [self.statistics(one.ranks[0])])

    def statistics(self, rank: int) -> Statistics:
        self.time_s += 0.1
        count = int(self.time_s * 10)
        keys = [
            KeyStatistics(self.name(i), count, 8 * count, 1e-3, 2e-3, 3e-3, 0, 1e-3 * i) for i in range(self.num_names)
        ]
        peers = [
            PeerStatistics(peer, "tcp", 0, 0, 0, 0, 1e6 * (peer + 1), 1e6, float(peer))
            for peer in range(self.size)
            if peer != rank
        ]
        return Statistics(self.time_s, rank, self.size, "clique", tuple(peers), tuple(keys), None, (), 0.0, 1 << 20)

    @staticmethod
    def name(number: int) -> str:
        return {0: "x" * 10_240, 1: "<img src=x onerror=alert(1)>"}.get(number, f"grad/{number}")


@pytest.mark.asyncio
async def test_ten_thousand_names_and_64_ranks_stay_fluid() -> None:
    needed()
    observer = JobObserver("no such job", begins=True)
    async with served(observer, Address(port=0)) as url, chromium.page(url) as page:
        wide, long = Source(64, 0).watcher(), Source(1, 10_000).watcher()
        for _ in range(2):
            observer.feed.publish("figures", figures(wide.look(), {}, 1.0))
            observer.feed.publish("names", names(long.look()))
        await page.until("document.querySelectorAll('#graph .rank').length === 64")
        await page.until("document.querySelector('#names-title').textContent === '10,000'")
        assert await page.value("document.querySelectorAll('#names .body .row').length") < 40
        took_ms = await page.value(
            "new Promise((done) => { const began = performance.now(); search.value = '<IMG'; search.oninput(); "
            "requestAnimationFrame(() => done(performance.now() - began)); })"
        )
        assert await page.value(ROWS) == ["<img src=x onerror=alert(1)>"]
        assert took_ms < 1000
        await page.value("search.value = 'xxx'; search.oninput()")
        (row,) = await page.value(ROWS)
        assert row.endswith("(10,240 characters)")
        assert page.errors == []


def test_page_is_small() -> None:
    sizes = [path.stat().st_size for path in STATIC.rglob("*") if path.is_file() and path.name != "LICENSE"]
    assert np.sum(sizes) <= 300_000
