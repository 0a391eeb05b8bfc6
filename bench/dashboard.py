"""Cost of the dashboard, and pictures of it for the documentation, from a job of this host.

    python -m bench.dashboard                        16 ranks, 5 updates a second: processor time, bytes, first paint
    python -m bench.dashboard --ranks 8 --hosts 2    the same with half of the ranks on another host, by namespaces
    python -m bench.dashboard --pictures docs/howto  pictures: a start, a swap, a dead rank, a hang, decisions

Needs Chromium, but for ``--hosts``, which needs root; decisions need the extra demo.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import psutil
from PIL import Image

from bench import chromium
from bench.netlab import Netlab, even
from bench.netlab.hosts import Host

PROGRAM = """
import math, random, sys, time
import numpy as np, kfcomm
from kfcomm.train import report
kind = sys.argv[1]
with kfcomm.sync.init() as comm:
    layers = {f"grad/{i}": np.ones(1000 * 4 ** (i % 4), np.float32) for i in range(6)}
    step = 0
    while True:
        for name, x in layers.items():
            try:
                comm.all_reduce(x, name=name)
            except kfcomm.PeerLost:
                time.sleep(1000)
        loss = 2.3 * math.exp(-step / 150) + 0.1 * random.random()
        values = {"loss": loss, "noise_scale": 40 + 30 * math.log1p(step), "batch_size": 512, "learning_rate": 0.1}
        report(comm, values)
        if kind == "hang" and comm.rank == 3 and step == 40:
            comm.barrier("checkpoint")
        step += 1
        if kind == "pictures" and step == 100:
            comm.set_strategy("ring")
        time.sleep((0.3 if kind == "figures" else 0.05) + (0.02 if comm.rank == 2 else 0))
"""
READER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "events") as response:
    while response.read1(1 << 20):
        pass
"""
TRAIN = ("--keep-going", "python", "train.py")
EXAMPLES = Path(__file__).parent.parent / "examples"
ADAPTIVE = (
    "--elastic", "2:4", "--transport", "tcp", "--strategy", "star", "python", "adaptive_training.py", "--alone",
)  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")
SETTLE_S, PERIOD_S, WORK_S, NUM_PAIRS = 2.0, 6.0, 15.0, 3
RESOURCES = "performance.getEntriesByType('resource')"


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Job:
    """A job with its dashboard, a process of its own."""

    def __init__(self, size: int, command: Sequence[str], folder: Path, hosts: Sequence[Host] = ()) -> None:
        self.size, self._command, self._folder = size, command, folder / "model"
        self._hosts = hosts
        shutil.copytree(EXAMPLES, self._folder)
        (self._folder / "train.py").write_text(PROGRAM)
        self._name = next(Path(word).stem for word in command if word.endswith(".py"))

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        kfcomm = (sys.executable, "-m", "kfcomm")
        places = ",".join(f"{host.address}:{self.size // len(self._hosts)}" for host in self._hosts)
        run = ("run", *(("-H", places) if places else ("-n", str(self.size))), *self._command)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        token = {"KFCOMM_TOKEN": secrets.token_hex(32)} if places else {}
        environ = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), **token}
        lines = [host.inside(*kfcomm, *run) for host in self._hosts] or [[*kfcomm, *run]]
        self.runs = [await asyncio.create_subprocess_exec(*line, cwd=self._folder, env=environ) for line in lines]
        while True:
            dashboard = self.inside(*kfcomm, "dashboard", self._name, "--port", "0")
            self.server = await asyncio.create_subprocess_exec(*dashboard, stdout=pipe, stderr=pipe)
            assert self.server.stdout is not None  # noqa: S101
            if found := re.search(r"http\S+", (await self.server.stdout.readline()).decode()):
                break
            await self.server.wait()
        self.url = found[0]
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (self.server, *self.runs):
            with contextlib.suppress(ProcessLookupError):  # a launcher ends when another one does
                process.send_signal(signal.SIGINT)
            await process.wait()

    def inside(self, *line: str) -> list[str]:
        """The command on the host of the dashboard."""
        return self._hosts[0].inside(*line) if self._hosts else list(line)

    def pids_by_host(self) -> list[list[int]]:
        """Processes of the ranks of each host."""
        found = [psutil.Process(run.pid).children(recursive=True) for run in self.runs]
        return [[one.pid for one in some if "train.py" in one.cmdline()] for some in found]

    async def pids(self, page: chromium.Page) -> list[int]:
        """Processes of the ranks, by rank."""
        await page.until(f"document.querySelectorAll('#ranks tbody tr').length === {self.size}")
        rows = "[...document.querySelectorAll('#ranks tbody tr')]"
        told = await page.value(f"{rows}.map((row) => row.cells[1].textContent)")
        return [int(pid) for pid in told]


async def measure(size: int, num_hosts: int) -> None:
    """Print what a reader costs, from periods with one and without, by turns."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Netlab(even(num_hosts), network="10.77.41.0/24")).hosts if num_hosts > 1 else ()
        async with Job(size, (*TRAIN, "figures"), Path(folder), hosts) as job:
            # A browser on this machine would take the time of the ranks: once the page is measured, only its messages
            # are read.
            if not hosts:
                async with chromium.page(job.url) as page:
                    await job.pids(page)
                    nbytes = await page.value(f"{RESOURCES}.reduce((sum, one) => sum + one.decodedBodySize, 0)")
                    paint_ms = await page.until("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                    print(f"page: {nbytes:,} bytes beside its HTML; first paint after {paint_ms:.0f} ms")
            here, *elsewhere = job.pids_by_host()
            groups = {"server": [job.server.pid], "rank": here}
            if hosts:
                groups["rank of another host"] = [pid for pids in elsewhere for pid in pids]
            await _compare(job, groups)


async def _compare(job: Job, groups: dict[str, list[int]]) -> None:
    found: dict[tuple[str, bool], list[float]] = {}
    for turn in range(2 * NUM_PAIRS):
        is_read = turn % 2 == 0
        async with _reader(job, is_read):
            await asyncio.sleep(SETTLE_S)
            before = {what: sum(map(cpu_s, pids)) for what, pids in groups.items()}
            began_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            passed_s = time.monotonic() - began_s
            for what, pids in groups.items():
                used_s = (sum(map(cpu_s, pids)) - before[what]) / len(pids)
                found.setdefault((what, is_read), []).append(used_s / passed_s)
    for what in groups:
        pairs = list(zip(found[what, True], found[what, False], strict=True))
        more = statistics.median(one - other for one, other in pairs)
        read, unread = (statistics.median(found[what, kind]) for kind in (True, False))
        print(f"{what}: {read:.2%} of a core with a reader, {unread:.2%} without; median of pairs {more:+.2%}")


@contextlib.asynccontextmanager
async def _reader(job: Job, is_there: bool) -> AsyncIterator[None]:
    if not is_there:
        yield
        return
    line = job.inside(sys.executable, "-c", READER, job.url)
    reading = await asyncio.create_subprocess_exec(*line)
    try:
        yield
    finally:
        reading.kill()
        await reading.wait()


async def pictures(folder: Path) -> None:
    """Write pictures of a job of eight ranks that starts, swaps graphs, loses a rank and hangs, and of decisions."""
    events = "document.querySelector('#events').textContent"
    async with _shown(8, (*TRAIN, "pictures"), 1250) as (page, job):
        pids = await job.pids(page)
        await page.until("document.querySelectorAll('.flow').length")
        write(folder / "dashboard-start.png", await page.picture())
        await page.until(f"{events}.includes('ring')")
        await asyncio.sleep(WORK_S)
        write(folder / "dashboard.png", await page.picture())
        os.kill(pids[5], signal.SIGKILL)
        await page.until("document.querySelectorAll('.rank.gone').length")
        await page.until(f"{events}.includes('SIGKILL')")
        await asyncio.sleep(SETTLE_S)
        write(folder / "dashboard-death.png", await page.picture())
    async with _shown(8, (*TRAIN, "hang"), 640) as (page, _):
        await page.until("document.querySelectorAll('#waits .wait').length > 1")
        await asyncio.sleep(SETTLE_S)
        write(folder / "dashboard-hang.png", await page.picture())
    async with _shown(3, ADAPTIVE, 1250) as (page, _):
        await page.until(f"{events}.includes('NoiseScaleBatch') && {events}.includes('AvoidSlowLinks')")
        await asyncio.sleep(SETTLE_S)
        write(folder / "dashboard-decision.png", await page.picture())


@contextlib.asynccontextmanager
async def _shown(size: int, command: Sequence[str], height: int) -> AsyncIterator[tuple[chromium.Page, Job]]:
    """A job, and the page of its dashboard."""
    with tempfile.TemporaryDirectory() as name:
        async with Job(size, command, Path(name)) as job, chromium.page(job.url, (1180, height)) as page:
            await page.call("Emulation.setScrollbarsHidden", hidden=True)
            yield page, job


def write(path: Path, picture: bytes) -> None:
    """Write a PNG of few colours."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    asyncio.run(measure(given.ranks, given.hosts) if given.pictures is None else pictures(given.pictures))


if __name__ == "__main__":
    main()
