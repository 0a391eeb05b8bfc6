"""Training whose ranks are killed and halted, replaced and resized: every pass ends, with each sample used once.

In every third job so many at once that none may be left who can go on: then its launcher has to say so.

python -m tests.search.training --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import click

from kfcomm.elastic.checkpoint import about_of, arrays_in
from tests.elastic import programs
from tests.launch.launched import environ

LENGTH = 600
HANG_S = 120.0
RATES = [(0.01, 0), (0.004, 0.002), (0, 0.004)]
"""The shares of the ranks that are killed and halted in a step."""
HARD_RATES = [(0.02, 0.03), (0, 0.05), (0.04, 0.01)]
NOBODY_LEFT = ("no rank is left to ", "no rank that runs has shown a sign of life")
PROGRAM = """
import json, os, random, signal, sys, time
import numpy as np
import kfcomm
from kfcomm.elastic import Elastic, ElasticSampler, State

LENGTH, kills, halts, sizes = int(sys.argv[1]), *map(json.loads, sys.argv[2:5])
state = State(used=np.zeros(LENGTH), weights=np.zeros(int(sys.argv[5])), count=0)
with kfcomm.sync.init(elastic=True) as comm:
    chance = random.Random(os.getpid())
    with Elastic(comm, state, checkpoint=sys.argv[6], checkpoint_every=5) as elastic:
        for step in elastic.steps(ElasticSampler(LENGTH, 10), used_in="used"):
            if comm.size > 2 and chance.random() < kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if comm.size > 2 and chance.random() < halts:
                os.kill(os.getpid(), signal.SIGSTOP)
            if comm.rank == 0 and str(step.number) in sizes:
                comm.propose_size(sizes[str(step.number)])
            mask = np.zeros(LENGTH)
            mask[step.indices] = 1
            handle = comm.all_reduce_async(mask, name="used")
            comm.all_reduce(state.weights, name="w", out=state.weights)
            comm.all_gather(mask[:3], name="g")
            for _ in range(2):
                state.count += int(comm.all_reduce(np.ones(3), name="n")[0])
            comm.barrier()
            state.used += handle.wait()
            if not (state.weights == 0).all():
                raise AssertionError("a wrong sum")
    if not elastic.is_released:
        print(json.dumps([sorted(set(state.used.tolist())), state.count]), flush=True)
"""


def processes(random: Random, folder: Path) -> str:
    """One job of processes; what befell it, in words."""
    size, transport = random.choice([3, 4]), random.choice(["shm", "unix", "tcp"])
    is_hard = random.random() < 1 / 3
    kills, halts = random.choice(HARD_RATES if is_hard else RATES)
    sizes = {str(random.randrange(60)): random.choice([2, 3, 5]) for _ in range(random.choice([0, 1, 2]))}
    program = folder / "train.py"
    program.write_text(PROGRAM)
    (folder / "c.npz").unlink(missing_ok=True)
    arguments = [str(LENGTH), str(kills), str(halts), json.dumps(sizes), random.choice(["3", "200000"])]
    arguments.append(str(folder / "c.npz"))
    options = ["-n", str(size), "--elastic", "2:5", "--transport", transport, "--lost-after", "2", "--timeout", "60"]
    command = [sys.executable, "-m", "kfcomm", "run", *options, sys.executable, str(program), *arguments]
    code, out, err = _ended(command)
    # Of three ranks, one that is halted and one that a busy machine keeps silent are too many.
    if halts and code != 0 and any(one in err for one in NOBODY_LEFT):
        return f"{transport}, nobody left"
    said = {line.partition("] ")[2] for line in out.splitlines()}  # the same on all ranks
    if code != 0 or len(said) != 1 or not said.pop().startswith("[[1.0], "):
        raise AssertionError(f"{' '.join(command)}\n{'it hangs' if code is None else code}\n{out}\n{err}")
    written = about_of(folder / "c.npz")  # by writers that were killed and halted in its midst
    if written is None or not arrays_in(folder / "c.npz", written[0]):
        raise AssertionError(f"{' '.join(command)}\nthe checkpoint is missing\n{err}")
    return f"{transport}, {err.count('started')} started"


def _ended(command: list[str]) -> tuple[int | None, str, str]:
    """The exit code of a job, None if it hangs, and its output."""
    try:
        done = subprocess.run(command, env=environ(), capture_output=True, timeout=HANG_S)
    except subprocess.TimeoutExpired as hung:
        return None, (hung.stdout or b"").decode(), (hung.stderr or b"").decode()
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def main() -> int:
    """Search for so many seconds: worlds in memory and jobs of processes by turns."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.training")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    random, until_s = Random(given.seed), time.monotonic() + given.seconds
    seeds = jobs = 0
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until_s:
            for _ in range(40):
                seed, transport = random.randrange(1 << 31), random.choice(["memory", "shm"])
                on_loss = random.choice(["finish", "finish", "raise", "restart_step"])
                asyncio.run(programs.run(seed, transport, grows=random.random() < 0.5, on_loss=on_loss))
                seeds += 1
            jobs += 1
            click.echo(f"job {jobs}: {processes(random, Path(folder))}")
    click.echo(f"{seeds} worlds in memory, {jobs} jobs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
