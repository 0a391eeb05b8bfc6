"""Cost of unauthenticated connections for a working job: idle and slow ones at each port, and a joining rank.

    python -m bench.unauthenticated --idle 10000 --slow 1000

A job of three ranks over TCP (``kfcomm run --elastic 3:4``) makes all_reduces of 1 KiB all the time. So many
connections are made at the launcher's port and at each of the ranks' ports (Prometheus's among them): the idle ones
say nothing, the slow ones a byte every half second. Those that the job cuts off are not made again. Told are the 99th
percentile of the calls before, while they come (a flood), and from then on; the memory of the ranks before and at the
most; how many came; and how long a fourth rank takes to come in while as many come once more.

They stand in for other hosts' programs, so they get only idle processor time (SCHED_IDLE of sched(7)).

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
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

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> None:
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
        """Ports at which the launcher and the ranks listen."""
        listening = [
            one.laddr.port
            for pid in (self.launcher.pid, *self.ranks())
            for one in psutil.Process(pid).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        return sorted(set(listening))

    def percentile_s(self, over: Callable[[], bool]) -> float:
        """Median of the 99th percentiles of the windows from now on until then, of three on each rank at least.

        Raises:
            RuntimeError: they did not come about, or the job has ended.
        """
        began = time.time()
        self.until(lambda: over() and len(self._windows(began)) >= WINDOWS)
        return statistics.median(row[4] for row in self._windows(began))

    def _windows(self, began: float) -> list[tuple[float, float, int, int, float]]:
        return [row for row in self.rows if row[0] >= began]

    def nbytes(self) -> dict[int, int]:
        """Of each rank, its own memory."""
        return {pid: psutil.Process(pid).memory_full_info().uss for pid in self.ranks()}


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    """Three ranks that work until the flag ends them."""
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


async def knock(ports: list[int], idle: int, slow: int) -> None:
    """So many of both kinds at each port, held until they are cut off; says how many came once all have tried."""
    gate = asyncio.Semaphore(MANY_AT_ONCE)
    came: list[bool] = []
    all_tried = asyncio.Event()

    def tried(with_success: bool) -> None:
        came.append(with_success)
        if len(came) == (idle + slow) * len(ports):
            all_tried.set()

    async def one(port: int, is_slow: bool) -> None:
        async with gate:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError as error:
                tried(isinstance(error, ConnectionError))  # reset by the job; all else is a limit of this host
                return
        tried(True)
        try:
            while True:
                try:
                    if not await asyncio.wait_for(reader.read(1 << 10), SLOW_PAUSE_S if is_slow else None):
                        return
                except TimeoutError:
                    writer.write(b"G")
        except ConnectionError:
            return  # cut off with a reset
        finally:
            writer.close()

    each = [is_slow for pair in zip_longest([False] * idle, [True] * slow) for is_slow in pair if is_slow is not None]
    async with asyncio.TaskGroup() as group:
        for is_slow in each:
            for port in ports:
                group.create_task(one(port, is_slow))
        await all_tried.wait()
        print(sum(came), flush=True)


def connections(ports: list[int], idle: int, slow: int) -> None:
    """Both kinds at once, from this process, until all are cut off."""
    wanted, (_, most) = (idle + slow) * len(ports) + 100, resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # only root gets more than the most; fewer are said to have come then
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, most)))
    with suppress(AttributeError):  # Linux alone has it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(knock(ports, idle, slow))


@contextmanager
def knocked(ports: list[int], idle: int, slow: int) -> Iterator[Callable[[], int | None]]:
    """Connections to these ports from another process; their number is known when all have been tried."""
    command = [sys.executable, "-m", "bench.unauthenticated", "--idle", str(idle), "--slow", str(slow)]
    command += ["--at", json.dumps(ports)]
    said: list[int] = []

    def came() -> int | None:
        return said[0] if said else None

    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as knocking:
        listener = threading.Thread(target=lambda: said.extend(map(int, knocking.stdout or ())))
        listener.start()
        try:
            yield came
        finally:
            knocking.terminate()
            listener.join()


def after(seconds: float) -> Callable[[], bool]:
    """Whether so long a time has passed from now on."""
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def measure(idle: int, slow: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Measure the job alone, while connections come, and after; a rank joins while more come."""
    with job(folder) as made:
        made.percentile_s(after(seconds / 4))  # what a job needs once is done
        before, ports, memory = made.percentile_s(after(seconds)), made.ports(), made.nbytes()
        began = time.monotonic()
        with knocked(ports, idle, slow) as came:
            coming, coming_s = made.percentile_s(lambda: came() is not None), time.monotonic() - began
            grown = [nbytes - memory[pid] for pid, nbytes in made.nbytes().items()]
            there = made.percentile_s(after(seconds))
            grown += [nbytes - memory[pid] for pid, nbytes in made.nbytes().items()]
            number = came()
        with knocked(ports, idle, slow):
            asked = time.time()
            Path(f"{made.flag}.join").touch()
            made.until(lambda: any(row[2] == 4 for row in made.rows))
            joined_s = next(row[1] for row in made.rows if row[2] == 4) - asked
        return {
            "ports": len(ports), "idle": idle, "slow": slow, "came": number, "coming_for_s": coming_s,
            "before_s": before, "coming_s": coming, "there_s": there,
            "grown_nbytes": max(grown), "joined_s": joined_s,
        }  # fmt: skip


def main() -> int:
    """Measure and report; or make the connections."""
    parser = argparse.ArgumentParser(prog="python -m bench.unauthenticated")
    parser.add_argument("--idle", type=int, default=10_000, help="connections at each port that say nothing")
    parser.add_argument("--slow", type=int, default=1_000, help="connections at each port that say a byte now and then")
    parser.add_argument(
        "--seconds", type=float, default=20, help="of calls without connections, and of calls after they have come"
    )
    parser.add_argument("--at", type=json.loads, metavar="PORTS", help="only make the connections, to these ports")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.at is not None:
        connections(given.at, given.idle, given.slow)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given.idle, given.slow, given.seconds, Path(folder))
    coming, there = (found[name] / found["before_s"] for name in ("coming_s", "there_s"))
    click.echo(
        f"{found['idle']} idle and {found['slow']} slow connections at each of {found['ports']} ports, "
        f"{found['came']} came within {found['coming_for_s']:.1f} s: "
        f"99th percentile {1e6 * found['before_s']:.0f} us before, {coming:.2f}x while they came, "
        f"{there:.2f}x from then on, to reach {REACH_RATIO}x; memory +{found['grown_nbytes'] / 1e6:.1f} MB, to reach "
        f"{REACH_NBYTES / 1e6:.0f} MB; a rank was asked for and at work after {found['joined_s']:.2f} s"
    )
    if given.output is not None:
        given.output.write_text(json.dumps(found | {"cores": os.cpu_count()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
