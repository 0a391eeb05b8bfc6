"""What strangers cost a job that works: idle and slow connections at each of its ports, and whether ranks still join.

    python -m bench.strangers --idle 10000 --slow 1000

A job of three ranks over TCP (``kfcomm run --elastic 3:4``) makes all_reduces of 1 KiB all the time. So many
connections are made at the launcher's port and at each of the ranks' ports (Prometheus's among them): the idle ones
say nothing, the slow ones a byte every half second. Those that the job cuts off are not made again, so that what is
measured is the coming of that many and the staying of those that are let stay. Told are the 99th percentile of the
calls, the memory of the ranks before and during it, and how long a fourth rank takes to come in amid it.

Bounds: 1.5 times the percentile before, 20 MB more in no rank; the rank comes in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop

CALLS, WINDOWS = 500, 9
MANY_AT_ONCE = 200
SLOW_PAUSE_S = 0.5
METRICS_PORT = 19400
REACH_RATIO, REACH_NBYTES = 1.5, 20e6
PROGRAM = """
import json, os, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

flag, calls = sys.argv[1], int(sys.argv[2])
x = np.ones(256, np.float32)
with kfcomm.sync.init(elastic=True) as comm:
    with Elastic(comm, State(step=0)) as elastic:
        for step in elastic.steps(ElasticSampler(1 << 20, 4, seed=None)):
            if comm.rank == 0 and os.path.exists(flag + ".join") and comm.size == 3:
                comm.propose_size(4)
            begun, took = time.time(), []
            for _ in range(calls):
                called_s = time.perf_counter()
                comm.all_reduce(x, name="g")
                took.append(time.perf_counter() - called_s)
            ends = comm.all_reduce(np.array([os.path.exists(flag + ".end")], int), name="ends")
            print(json.dumps([begun, time.time(), comm.size, os.getpid(), sorted(took)[calls * 99 // 100]]), flush=True)
            if ends[0]:
                break
"""


@dataclass
class Job:
    """A job under way, and what its ranks have said of their windows of calls."""

    launcher: subprocess.Popen[str]
    flag: Path
    rows: list[tuple[float, float, int, int, float]] = field(default_factory=list)

    def listen(self) -> None:
        """Read what the ranks say until they end."""
        for line in self.launcher.stdout or ():
            if line.startswith("["):
                self.rows.append(tuple(json.loads(line.partition("] ")[2])))

    def until(self, condition: Any, seconds: float = 60) -> None:
        """Wait for it.

        Raises:
            RuntimeError: it did not come about, or the job has ended.
        """
        until_s = time.monotonic() + seconds
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the job is not as it should be: exit code {self.launcher.poll()}")
            time.sleep(0.02)

    def ranks(self) -> set[int]:
        """Process identifiers of those that have said something."""
        return {row[3] for row in self.rows}

    def ports(self) -> list[int]:
        """Those at which the launcher and the ranks listen."""
        listening = [
            one.laddr.port
            for pid in (self.launcher.pid, *self.ranks())
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        return sorted(set(listening))

    def percentile_s(self, seconds: float) -> float:
        """Median of the 99th percentiles of the windows of so long a time from now on, of three on each rank at least.

        Raises:
            RuntimeError: they did not come about, or the job has ended.
        """
        began = time.time()
        time.sleep(seconds)
        self.until(lambda: len(self._windows(began)) >= WINDOWS)
        return statistics.median(row[4] for row in self._windows(began))

    def _windows(self, began: float) -> list[tuple[float, float, int, int, float]]:
        return [row for row in self.rows if row[0] >= began]

    def nbytes(self) -> dict[int, int]:
        """Of each rank, its own memory."""
        return {pid: psutil.Process(pid).memory_full_info().uss for pid in self.ranks()}


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    """Three ranks that work until they are told to end."""
    program, flag = folder / "work.py", folder / "flag"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "kfcomm", "run", "-n", "3", "--elastic", "3:4", "--transport", "tcp"]
    command += ["--metrics-port", str(METRICS_PORT), sys.executable, str(program), str(flag), str(CALLS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        made = Job(launcher, flag)
        listener = threading.Thread(target=made.listen)
        listener.start()
        try:
            made.until(lambda: len(made.ranks()) == 3)
            yield made
            Path(f"{flag}.end").touch()
            if launcher.wait(60):
                raise RuntimeError(f"the job failed with {launcher.returncode}")
        finally:
            launcher.terminate()
            listener.join()


async def knock(ports: list[int], number: int, is_slow: bool, until_s: float) -> None:
    """So many connections at each port, held until then or until they are cut off."""
    gate = asyncio.Semaphore(MANY_AT_ONCE)

    async def one(port: int) -> None:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                waiting_s = min(SLOW_PAUSE_S, left_s) if is_slow else left_s
                try:
                    if not await asyncio.wait_for(reader.read(1 << 10), waiting_s):
                        return
                except TimeoutError:
                    if is_slow:
                        writer.write(b"G")
        finally:
            writer.close()

    # those that are refused, or cut off with a reset, are what is expected
    await asyncio.gather(*(one(port) for _ in range(number) for port in ports), return_exceptions=True)


def strangers(ports: list[int], idle: int, slow: int, seconds: float) -> None:
    """Both kinds at once, from this process, for so long."""

    async def both() -> None:
        until_s = time.monotonic() + seconds
        await asyncio.gather(knock(ports, idle, False, until_s), knock(ports, slow, True, until_s))

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(both())


@contextmanager
def knocked(ports: list[int], idle: int, slow: int) -> Iterator[None]:
    """Strangers at these ports, from a process of their own."""
    options = ["--idle", str(idle), "--slow", str(slow), "--seconds", "600", "--at", json.dumps(ports)]
    command = [sys.executable, "-m", "bench.strangers", *options]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1]) as knocking:
        try:
            yield
        finally:
            knocking.terminate()


def measure(idle: int, slow: int, seconds: float, folder: Path) -> dict[str, Any]:
    """A job left alone for so long, then beside strangers for as long, in which a rank joins."""
    with job(folder) as made:
        made.percentile_s(seconds / 4)  # what a job needs once is done
        before, ports, memory = made.percentile_s(seconds), made.ports(), made.nbytes()
        with knocked(ports, idle, slow):
            during = made.percentile_s(seconds)
            grown = {pid: nbytes - memory[pid] for pid, nbytes in made.nbytes().items()}
            asked = time.time()
            Path(f"{made.flag}.join").touch()
            made.until(lambda: any(row[2] == 4 for row in made.rows))
            joined_s = next(row[1] for row in made.rows if row[2] == 4) - asked
        return {
            "ports": len(ports), "idle": idle, "slow": slow, "before_s": before, "during_s": during,
            "grown_nbytes": max(grown.values()), "joined_s": joined_s,
        }  # fmt: skip


def main() -> int:
    """Measure, and tell; or be the strangers."""
    parser = argparse.ArgumentParser(prog="python -m bench.strangers")
    parser.add_argument("--idle", type=int, default=10_000, help="connections at each port that say nothing")
    parser.add_argument("--slow", type=int, default=1_000, help="connections at each port that say a byte now and then")
    parser.add_argument(
        "--seconds", type=float, default=20, help="of calls without strangers, and of calls beside them"
    )
    parser.add_argument("--at", type=json.loads, metavar="PORTS", help="only be the strangers, at these ports")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.at is not None:
        strangers(given.at, given.idle, given.slow, given.seconds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.idle, given.slow, given.seconds, Path(folder))
    ratio = found["during_s"] / found["before_s"]
    click.echo(
        f"{found['idle']} idle and {found['slow']} slow connections at each of {found['ports']} ports: "
        f"99th percentile {1e6 * found['before_s']:.0f} us before, {1e6 * found['during_s']:.0f} us during: "
        f"{ratio:.2f}x, to reach {REACH_RATIO}x; memory +{found['grown_nbytes'] / 1e6:.1f} MB, to reach "
        f"{REACH_NBYTES / 1e6:.0f} MB; a rank was asked for and at work after {found['joined_s']:.2f} s"
    )
    if given.output is not None:
        given.output.write_text(json.dumps(found | {"cores": os.cpu_count()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
