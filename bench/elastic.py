"""Cost of membership changes for the surviving ranks: a rank is killed during a call, ranks leave, ranks join.

    python -m bench.elastic --rounds 10 --output bench/results/elastic.json
    python -m bench.elastic --rounds 0 --seconds 600

Each round is a job of ``kfcomm run --elastic``. For a death: how much longer the call of 64 MiB took during
which a rank was killed than the median of the others, on the slowest survivor. For other sizes: how much longer the
remaining ranks spent between two steps, with 100 MB of state for the joining ones; and how long these take to travel in
stripes, beside a broadcast. Then the additional time of an undisturbed step in an ``Elastic``. With ``--seconds``
two jobs of four train on digits for that long, beside each other, in one of which a rank is killed every five seconds
and a spare takes its place: how many steps either has done, and how well it has learned.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from kfcomm.bench.harness import JobFailed, run_job, said

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
import threadpoolctl
import kfcomm
from digits import LEARNING_RATE, MOMENTUM, Model, load_data
from elastic import gradients_of
from kfcomm.elastic import Elastic, ElasticSampler, State

seconds, every_s, step_s = map(float, sys.argv[1:])
(images, labels), (others, wanted) = load_data(seed=0)
model = Model(seed=0)
values = {one.name: one.value for one in model.parameters()}
state = State(
    values=values, velocity={name: np.zeros_like(value) for name, value in values.items()},
    until_s=time.time() + seconds, used=np.zeros(len(labels)), steps=0, changes=[],
)
with threadpoolctl.threadpool_limits(1), kfcomm.sync.init(elastic=True) as comm:
    slot = time.time() // every_s
    with Elastic(comm, state) as elastic:
        for step in elastic.steps(ElasticSampler(len(labels), 64), passes=1 << 30, used_in="step"):
            now = time.time() // every_s
            if now != slot and comm.size == 4 and now % 4 == comm.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            slot = now
            time.sleep(step_s)
            _, gradients = gradients_of(model, images[step.indices], labels[step.indices])
            used = np.zeros(len(labels) + 1)
            used[step.indices] = 1
            used[-1] = time.time() > state.until_s
            total = comm.all_reduce_many({"used": used, **gradients}, name="step")
            for name, value in state.values.items():
                state.velocity[name] *= MOMENTUM
                state.velocity[name] -= np.float32(LEARNING_RATE / total["used"][:-1].sum()) * total[name]
                value += state.velocity[name]
            state.used += total["used"][:-1]
            state.steps += 1
            if not state.changes or state.changes[-1] != list(comm.births):
                state.changes = [*state.changes, list(comm.births)]
            if total["used"][-1]:
                break
    if comm.rank == 0:
        accuracy = (model.logits(others).argmax(axis=1) == wanted).mean()
        spread = state.used.max() - state.used.min()
        print(state.steps, len(state.changes) - 1, int(spread), float(accuracy), flush=True)
"""
KILL_EVERY_S, STEP_S = 5.0, 0.05
EXAMPLES = Path(__file__).parents[1] / "examples"

TRANSFER = """
import asyncio, statistics, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic.replicas import spread

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


CALM = """
import json, statistics, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

num_rounds, num_steps = 15, 40
pieces = [np.ones(1 << 18, np.float32) for _ in range(25)]

def step(comm):
    return [comm.all_reduce(piece, name=f"g{n}") for n, piece in enumerate(pieces)]

def timed(comm, steps):
    comm.barrier("begin")
    begun_s = time.perf_counter()
    for _ in steps:
        results = step(comm)
    return (time.perf_counter() - begun_s) / num_steps

found = []
with kfcomm.sync.init(elastic=True) as comm:
    for _ in range(num_rounds):
        plainly_s = timed(comm, range(num_steps))
        with Elastic(comm, State(step=0)) as elastic:
            found.append([plainly_s, timed(comm, elastic.steps(ElasticSampler(num_steps, 1, seed=None)))])
    if comm.rank == 0:
        print(json.dumps([*map(statistics.median, zip(*found[1:]))]))
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


def once(case: Case) -> float:
    """Run one job; what the change cost, in seconds.

    Raises:
        JobFailed: the job failed.
    """
    options = ["--elastic", "2:4", "--restart-limit", "0", "--transport", case.transport]
    output = run_job(case.size, PROGRAM, case.what, case.call_nbytes, case.state_nbytes, options=options)
    stayed = [rows for birth, _, rows in map(json.loads, said(output)) if birth < 2 or case.what == "killed"]
    return max(_cost(case, rows) for rows in stayed)


def _cost(case: Case, rows: Sequence[Sequence[Any]]) -> float:
    """On one rank: the time of the step with the change beyond that of an ordinary one."""
    place = 3 if case.what == "killed" else 2
    at = next(n for n, row in enumerate(rows) if (row[0] == 20 if case.what == "killed" else row[1] != case.size))
    ordinary = statistics.median(row[place] for row in rows[5:at])
    return float(rows[at][place] - ordinary)


def transfer(nbytes: int, rounds: int) -> tuple[float, float]:
    """Seconds for so many bytes by ``broadcast`` to four ranks, and in stripes from two of them to the other two.

    Raises:
        JobFailed: the job failed.
    """
    broadcast_s, stripes_s = said(run_job(4, TRANSFER, nbytes, rounds + 1))[0].split()
    return float(broadcast_s), float(stripes_s)


def calm() -> tuple[float, float]:
    """Seconds of a step of 25 blocking all_reduces of 1 MiB by four ranks, plainly and in an ``Elastic``, by turns.

    Raises:
        JobFailed: the job failed.
    """
    plainly_s, elastic_s = json.loads(said(run_job(4, CALM, options=["--elastic", "4"]))[0])
    return plainly_s, elastic_s


@dataclass(frozen=True)
class Trained:
    """Result of a job that trained for some time.

    Attributes:
        steps: of training.
        changes: of its ranks.
        accuracy: of what it has learned, on digits that it has not seen.
    """

    steps: int
    changes: int
    accuracy: float


def failing(seconds: float, every_s: float) -> Trained:
    """A job of four that trains on digits for so long, in which a rank is killed so often, and spares take their place.

    Raises:
        JobFailed: the job failed, or a sample was used more often than another beyond the pass that was cut short.
    """
    options = ["--elastic", "2:4", "--restart-limit", "1000", "--spares", "1"]
    env = {"PYTHONPATH": str(EXAMPLES)}
    output = run_job(4, FAILING, seconds, every_s, STEP_S, options=options, env=env, timeout_s=seconds + 120)
    lines = [line.split() for line in said(output)]
    if len(lines) != 1 or int(lines[0][2]) > 1:
        raise JobFailed(f"samples were not used equally often:\n{output}")
    steps, changes, _, accuracy = lines[0]
    return Trained(int(steps), int(changes), float(accuracy))


def beside(seconds: float) -> tuple[Trained, Trained]:
    """Such a job without failures and one with them, at the same time, so that both have the same machine."""
    with ThreadPoolExecutor(2) as pool:
        without, with_them = pool.map(lambda every_s: failing(seconds, every_s), (1e9, KILL_EVERY_S))
    return without, with_them


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m bench.elastic")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0, help="of two jobs, without failures and with them")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    failures: dict[str, Any] = {}
    moved: dict[str, float] = {}
    quiet: dict[str, float] = {}
    for case in CASES if given.rounds else ():
        costs = sorted(once(case) for _ in range(given.rounds))
        median = statistics.median(costs)
        click.echo(
            f"{case.what:7} {case.size} ranks, {case.transport:5} median {1e3 * median:6.1f} ms, worst "
            f"{1e3 * costs[-1]:6.1f} ms, to reach {1e3 * case.reach_s:3.0f} ms"
        )
        found.append({**case.__dict__, "median_s": median, "worst_s": costs[-1], "all_s": costs})
    if given.rounds:
        nbytes = CASES[-1].state_nbytes
        broadcast_s, stripes_s = transfer(nbytes, given.rounds)
        click.echo(
            f"{nbytes / 1e6:.0f} MB: broadcast {1e3 * broadcast_s:.1f} ms, stripes {1e3 * stripes_s:.1f} ms: "
            f"{100 * broadcast_s / stripes_s:.0f} % of its rate, to reach 80 %"
        )
        moved = {"nbytes": nbytes, "broadcast_s": broadcast_s, "stripes_s": stripes_s}
        plainly_s, elastic_s = calm()
        click.echo(
            f"a step in which nothing happens: {1e3 * plainly_s:.2f} ms plainly, {1e3 * elastic_s:.2f} ms in an "
            f"Elastic: {100 * (elastic_s / plainly_s - 1):+.1f} %, to reach 1 %"
        )
        quiet = {"plainly_s": plainly_s, "elastic_s": elastic_s}
    if given.seconds:
        without, found_with = beside(given.seconds)
        click.echo(
            f"a failure every {KILL_EVERY_S:g} s for {given.seconds:g} s: {found_with.steps} steps and "
            f"{found_with.changes} changes, {without.steps} steps without: "
            f"{100 * found_with.steps / without.steps:.1f} %, to reach 95 %; accuracy {found_with.accuracy:.3f}, "
            f"{without.accuracy:.3f} without, to reach 0.95"
        )
        failures = {"seconds": given.seconds, "without": asdict(without), "with": asdict(found_with)}
    if given.output is not None:
        record = {"python": platform.python_version(), "rounds": given.rounds, "cases": found, "transfer": moved}
        record |= {"calm": quiet, "failures": failures}
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
