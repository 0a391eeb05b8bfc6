"""How long a job takes to start, to meet for the first time, and to end; and what that costs in processor time.

    python -m bench.startup -n 4
    python -m bench.startup -n 32 --rounds 5 --against "mpirun -n 32 python -c 'from mpi4py import MPI'"

Every rank imports NumPy and kfcomm, joins, passes one barrier and closes. Rounds with ``--against`` go by turns: the
job, the other command, the job, ... Times are of the clock that all processes of a host share; shown are medians. Where
other programs run, processor time is the figure to look at.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "startup of a rank: "
PHASES = ("python", "numpy", "joined", "met", "closed")
"""What a rank tells the time of: its program begins, NumPy is there, so is the world, the barrier is over, the end."""


class Whole(NamedTuple):
    """One run of a command: seconds on the clock, and seconds of processor time of all its processes."""

    wall_s: float
    cpu_s: float
    output: str


def run(command: Sequence[str]) -> Whole:
    """Run a command to its end.

    Raises:
        CalledProcessError: it failed.
    """
    before, began_s = _children_s(), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    wall_s = time.monotonic() - began_s
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return Whole(wall_s, _children_s() - before, done.stdout)


def job(num_ranks: int) -> dict[str, float]:
    """One run of the job: seconds until the last rank was at each phase, and those of ending it."""
    began_s = time.monotonic()
    whole = run(
        (sys.executable, "-m", "kfcomm", "run", "-n", str(num_ranks), sys.executable, "-m", "bench.startup", "rank")
    )
    ranks = [json.loads(line.partition(MARK)[2]) for line in whole.output.splitlines() if MARK in line]
    last = {phase: max(rank[phase] for rank in ranks) - began_s for phase in PHASES}
    return {
        "first rank's program": min(rank["python"] for rank in ranks) - began_s,
        "NumPy imported": last["numpy"],
        "joined": last["joined"],
        "first barrier": last["met"] - last["joined"],
        "closed": last["closed"] - last["met"],
        "ended": whole.wall_s - last["closed"],
        "whole": whole.wall_s,
        "processor time": whole.cpu_s,
    }


def rank() -> None:
    """Program of a rank."""
    at = {"python": time.monotonic()}
    import numpy  # noqa: F401  what kfcomm costs beyond it is the question

    at["numpy"] = time.monotonic()
    import kfcomm

    with kfcomm.sync.init() as comm:
        at["joined"] = time.monotonic()
        comm.barrier()
        at["met"] = time.monotonic()
    at["closed"] = time.monotonic()
    print(MARK + json.dumps(at))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--num-ranks", type=int, default=4, help="4 by default")
    parser.add_argument("--rounds", type=int, default=7, help="7 by default, after one that does not count")
    parser.add_argument("--against", metavar="COMMAND", help="another command, run by turns with the job")
    options = parser.parse_args()
    compileall.compile_dir(Path(__file__).parent.parent / "kfcomm", quiet=2)  # as it is installed
    job(options.num_ranks)
    found: list[dict[str, float]] = []
    others: list[Whole] = []
    for _ in range(options.rounds):
        found.append(job(options.num_ranks))
        if options.against is not None:
            others.append(run(shlex.split(options.against)))
    cores = len(os.sched_getaffinity(0))
    print(f"{options.num_ranks} ranks on {cores} cores, median of {options.rounds} rounds, in seconds:")
    for name in found[0]:
        print(f"  {name:<24}{statistics.median(one[name] for one in found):8.3f}")
    if others:
        print(f"  {'against: whole':<24}{statistics.median(one.wall_s for one in others):8.3f}")
        print(f"  {'against: processor time':<24}{statistics.median(one.cpu_s for one in others):8.3f}")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
