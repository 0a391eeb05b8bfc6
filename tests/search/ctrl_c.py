"""Ctrl-C at any moment of a job's life: all its processes end within a bound, and only that is reported.

    python -m tests.search.ctrl_c --seconds 60 --seed 1

Half of the jobs use the blocking interface. The signal comes as from a terminal, to launcher and ranks alike, or to the
launcher, or to one rank alone: while they start, join, compute, close, or have ended already.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from random import Random
from typing import Any

import click
import numpy as np
import psutil

import kfcomm
from tests.search import driver

BOUND_S = 10.0
"""Upper limit of the bound, however busy the machine is."""
IDLE_BOUND_S = 2.0
"""Beyond this, what a job said is shown: on an idle machine it tells why."""
LATEST_S = 1.5
SWALLOWED = "Exception ignored in"
"""The interpreter could not raise it where it came, and went on: in a callback of the import system, which may then
hold its lock for good. Nothing can be done about that; ranks that wait for such a rank report it."""


def work(comm: Any) -> None:
    """Some calls of the blocking interface."""
    for number in range(40):
        x = np.full([1, 1000, 200_000][number % 3], comm.rank + 1.0)
        under_way = comm.all_gather_async(x, name="gathered")
        if not (comm.all_reduce(x, name=f"sum {number % 7}") == comm.size * (comm.size + 1) / 2).all():
            raise AssertionError("a wrong sum")
        comm.send(number, (comm.rank + 1) % comm.size)
        if int(comm.recv((comm.rank - 1) % comm.size)) != number:
            raise AssertionError("a wrong message")
        under_way.wait()
        comm.barrier()


async def work_async(comm: Any) -> None:
    """The same of the asynchronous one."""
    for number in range(40):
        x = np.full([1, 1000, 200_000][number % 3], comm.rank + 1.0)
        under_way = comm.all_gather(x, name="gathered")
        if not (await comm.all_reduce(x, name=f"sum {number % 7}") == comm.size * (comm.size + 1) / 2).all():
            raise AssertionError("a wrong sum")
        await comm.send(number, (comm.rank + 1) % comm.size)
        if int(await comm.recv((comm.rank - 1) % comm.size)) != number:
            raise AssertionError("a wrong message")
        await asyncio.gather(under_way, comm.barrier())


def as_rank(interface: str) -> None:
    """Program of each rank."""
    if interface == "blocking":
        with kfcomm.sync.init() as comm:
            work(comm)
        return

    async def main() -> None:
        async with kfcomm.init() as comm:
            await work_async(comm)

    asyncio.run(main())


def once(chance: Random) -> tuple[str, float]:
    """One job; to whom the signal was to go, and how long it took until nothing of the job was left."""
    size, transport = chance.choice([2, 3]), chance.choice(["shm", "unix", "tcp"])
    interface, whom = chance.choice(["blocking", "async"]), chance.choice(["all", "launcher", "rank"])
    ranks = [sys.executable, "-m", "tests.search.ctrl_c", "--as-rank", interface]
    line = [sys.executable, "-m", "kfcomm", "run", "-n", str(size), "--transport", transport, *ranks]
    job = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    time.sleep(chance.random() * LATEST_S)
    parts = psutil.Process(job.pid).children(recursive=True)
    if whom == "all":
        _signal(os.killpg, job.pid)
        for part in parts:  # ranks lead groups of their own
            _signal(os.kill, part.pid)
    else:
        started = [job.pid, *(part.pid for part in parts if _is_rank(part))]
        _signal(os.kill, job.pid if whom == "launcher" else started[-1])
    began_s = time.monotonic()
    try:
        said, _ = job.communicate(timeout=60)
        _, alive = psutil.wait_procs(parts, timeout=60)
    except subprocess.TimeoutExpired as error:
        if SWALLOWED in str(error.output):
            return "nobody", 0.0
        raise AssertionError(f"{shown(line, whom)}: it hangs: {error.output!r}") from None
    finally:
        for part in parts:
            if part.is_running():
                part.kill()
        job.kill()
        job.wait()
    if alive:
        raise AssertionError(f"{shown(line, whom)}: {alive} are left, which have said\n{said}")
    if "wrong" in said:
        raise AssertionError(f"{shown(line, whom)}\n{said}")
    took_s = time.monotonic() - began_s
    if took_s > BOUND_S:
        raise AssertionError(f"{shown(line, whom)}: all were gone only after {took_s:.1f} s\n{said}")
    if took_s > IDLE_BOUND_S:
        click.echo(f"{shown(line, whom)}: all were gone after {took_s:.1f} s\n{said}")
    return whom, took_s


def shown(line: list[str], whom: str) -> str:
    """Description of the run."""
    return f"{' '.join(line[1:])}, SIGINT to {whom}"


def _is_rank(part: psutil.Process) -> bool:
    """Whether it is not a helper of the launcher: those ignore Ctrl-C."""
    try:
        return part.cmdline()[1:3] == ["-m", "tests.search.ctrl_c"]
    except psutil.Error:
        return False  # it has ended


def _signal(send: Any, number: int) -> None:
    try:
        send(number, signal.SIGINT)
    except ProcessLookupError:
        return  # it has ended already


def case(seed: int) -> dict[str, int]:
    """Run the job of a seed."""
    return {once(Random(seed))[0]: 1}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2])
    else:
        # whom a shell has started in the background ignores it, and so do those whom it starts, until they listen
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(driver.run("ctrl_c", case))
