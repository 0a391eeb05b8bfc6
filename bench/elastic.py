"""What changes of the ranks cost those that train on: a rank is killed in the midst of a call, ranks go, ranks come.

    python -m bench.elastic --rounds 10 --output bench/results/elastic.json
    python -m bench.elastic --rounds 0 --seconds 600

Each round is a job of ``kfcomm run --elastic``. For a death: how much longer the call of 64 MiB took in which a rank
was killed than the median of the others, on the slowest of those that live. For other sizes: how much longer the ranks
that stay spent between two steps, with 100 MB of state for those that come; and how long these
take to travel in stripes, beside a broadcast. With ``--seconds`` two jobs of four run for
that long, in one of which a rank is killed, and replaced, every five seconds: how many steps either has done.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

PROGRAM = """
import json, os, signal, sys, threading, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

what, nbytes = sys.argv[1], int(sys.argv[2])
state = State(weights=np.zeros(int(sys.argv[3]) // 8))
rows = []
with kfcomm.sync.init(elastic=True) as comm:
    me = comm.births[comm.rank]
    x = np.ones(nbytes // 4, np.float32)
    with Elastic(comm, state) as elastic:
        left_s = None
        for step in elastic.steps(ElasticSampler(40, 1, seed=None)):
            begun_s = time.monotonic()
            gap_s = 0.0 if left_s is None else begun_s - left_s
            size = comm.size
            if what == "killed" and me == 1 and step.number == 20:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
            total = comm.all_reduce(x, name="g")
            rows.append([step.number, size, gap_s, time.monotonic() - begun_s])
            if what in ("shrink", "grow"):
                if comm.rank == 0 and step.number == 10:
                    comm.propose_size(2 if what == "shrink" else 4)
                time.sleep(0.1 if what == "grow" and size == 2 else 0.01)
            left_s = time.monotonic()
    if not elastic.is_released:
        print(json.dumps([me, elastic.paused_s, rows]), flush=True)
"""


FAILING = """
import os, signal, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

seconds, every_s, step_s = map(float, sys.argv[1:])
state = State(until_s=time.time() + seconds, passes=0, used=np.zeros(4000), steps=0, changes=[])
with kfcomm.sync.init(elastic=True) as comm:
    slot = time.time() // every_s
    with Elastic(comm, state) as elastic:
        for step in elastic.steps(ElasticSampler(4000, 64, seed=None), passes=1 << 30, used_in="g"):
            now = time.time() // every_s
            if now != slot and comm.size == 4 and now % 4 == comm.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            slot = now
            time.sleep(step_s)
            told = np.zeros(4001)
            told[step.indices] = 1
            told[-1] = time.time() > state.until_s
            told = comm.all_reduce(told, name="g")
            state.used += told[:-1]
            state.steps += 1
            if not state.changes or state.changes[-1] != list(comm.births):
                state.changes = [*state.changes, list(comm.births)]
            if told[-1]:
                break
    if comm.rank == 0:
        spread = state.used.max() - state.used.min()
        print(state.steps, len(state.changes) - 1, int(spread), flush=True)
"""
KILL_EVERY_S, STEP_S = 5.0, 0.05

TRANSFER = """
import asyncio, statistics, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic.stripes import spread

async def main():
    async with kfcomm.init() as comm:
        x = np.ones(int(sys.argv[1]) // 8)

        async def timed(make):
            await comm.barrier("begin")
            begun_s = time.monotonic()
            await make()
            await comm.barrier("end")
            return time.monotonic() - begun_s

        found = []
        for n in range(int(sys.argv[2])):
            sent_s = await timed(lambda: comm.broadcast(x, 0, f"x{n}", out=x))
            found.append((sent_s, await timed(lambda: spread(comm, [x], [0, 1], [2, 3]))))
        if comm.rank == 0:
            print(*map(statistics.median, zip(*found[1:])))

asyncio.run(main())
"""


@dataclass(frozen=True)
class Case:
    """One kind of change.

    Attributes:
        what: is done: ``killed``, ``shrink`` or ``grow``.
        size: of the job at its beginning.
        transport: between its ranks.
        call_nbytes: of the all_reduce in each step.
        state_nbytes: of the state.
        reach_s: what is asked for, as a median.
    """

    what: str
    size: int
    transport: str
    call_nbytes: int
    state_nbytes: int
    reach_s: float


CASES = (
    Case("killed", 4, "shm", 64 << 20, 8, 0.06),
    Case("killed", 4, "tcp", 64 << 20, 8, 0.06),
    Case("shrink", 4, "auto", 4096, 8, 0.03),
    Case("grow", 2, "auto", 4096, 100_000_000, 0.08),
)


def once(case: Case, folder: Path) -> float:
    """Run one job; what the change cost, in seconds.

    Raises:
        RuntimeError: the job failed.
    """
    program = folder / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "kfcomm", "run", "-n", str(case.size), "--elastic", "2:4", "--restart-limit", "0"]
    arguments = [case.what, str(case.call_nbytes), str(case.state_nbytes)]
    done = subprocess.run(
        [*command, "--transport", case.transport, sys.executable, str(program), *arguments],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{case} failed:\n{done.stdout}\n{done.stderr}")
    said = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if line.startswith("[")]
    stayed = [rows for birth, _, rows in said if birth < 2 or case.what == "killed"]
    return max(_cost(case, rows) for rows in stayed)


def _cost(case: Case, rows: Sequence[Sequence[Any]]) -> float:
    """On one rank: the time of the step with the change beyond that of an ordinary one."""
    place = 3 if case.what == "killed" else 2
    at = next(n for n, row in enumerate(rows) if (row[0] == 20 if case.what == "killed" else row[1] != case.size))
    ordinary = statistics.median(row[place] for row in rows[5:at])
    return float(rows[at][place] - ordinary)


def transfer(nbytes: int, rounds: int, folder: Path) -> tuple[float, float]:
    """Seconds for so many bytes by ``broadcast`` to four ranks, and in stripes from two of them to the other two.

    Raises:
        RuntimeError: the job failed.
    """
    program = folder / "transfer.py"
    program.write_text(TRANSFER)
    done = subprocess.run(
        [sys.executable, "-m", "kfcomm", "run", "-n", "4", sys.executable, str(program), str(nbytes), str(rounds + 1)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"a job failed:\n{done.stdout}\n{done.stderr}")
    broadcast_s, stripes_s = done.stdout.partition("] ")[2].split()
    return float(broadcast_s), float(stripes_s)


def failing(seconds: float, every_s: float, folder: Path) -> tuple[int, int]:
    """A job of four that runs for so long, in which a rank is killed so often; steps that it did, and changes.

    Raises:
        RuntimeError: the job failed, or a sample was used less often than another that had come before it.
    """
    program = folder / "failing.py"
    program.write_text(FAILING)
    command = [sys.executable, "-m", "kfcomm", "run", "-n", "4", "--elastic", "2:4", "--restart-limit", "1000"]
    done = subprocess.run(
        [*command, sys.executable, str(program), str(seconds), str(every_s), str(STEP_S)],
        capture_output=True, text=True, timeout=seconds + 120,
    )  # fmt: skip
    said = [line.partition("] ")[2].split() for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or len(said) != 1 or int(said[0][2]) > 1:
        raise RuntimeError(f"a job failed:\n{done.stdout}\n{done.stderr}")
    return int(said[0][0]), int(said[0][1])


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.elastic")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0, help="of two jobs, without failures and with them")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    failures: dict[str, float] = {}
    moved: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES if given.rounds else ():
            costs = sorted(once(case, Path(folder)) for _ in range(given.rounds))
            median = statistics.median(costs)
            click.echo(
                f"{case.what:7} {case.size} ranks, {case.transport:5} median {1e3 * median:6.1f} ms, worst "
                f"{1e3 * costs[-1]:6.1f} ms, to reach {1e3 * case.reach_s:3.0f} ms"
            )
            found.append({**case.__dict__, "median_s": median, "worst_s": costs[-1], "all_s": costs})
        if given.rounds:
            nbytes = CASES[-1].state_nbytes
            broadcast_s, stripes_s = transfer(nbytes, given.rounds, Path(folder))
            click.echo(
                f"{nbytes / 1e6:.0f} MB: broadcast {1e3 * broadcast_s:.1f} ms, stripes {1e3 * stripes_s:.1f} ms: "
                f"{100 * broadcast_s / stripes_s:.0f} % of its rate, to reach 80 %"
            )
            moved = {"nbytes": nbytes, "broadcast_s": broadcast_s, "stripes_s": stripes_s}
        if given.seconds:
            (without, _), (steps, changes) = (
                failing(given.seconds, every_s, Path(folder)) for every_s in (1e9, KILL_EVERY_S)
            )
            click.echo(
                f"a failure every {KILL_EVERY_S:g} s for {given.seconds:g} s: {steps} steps and {changes} changes, "
                f"{without} steps without: {100 * steps / without:.1f} %, to reach 95 %"
            )
            failures = {"seconds": given.seconds, "steps": steps, "changes": changes, "steps_without": without}
    if given.output is not None:
        record = {"python": platform.python_version(), "rounds": given.rounds, "cases": found, "transfer": moved}
        record["failures"] = failures
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
