"""Cost of a gradient monitor: paired steps with it and without, on the gradients of ResNet-50.

::

    python -m bench.noise_scale -n 4 --pairs 30 --compute 1.0
    python -m bench.noise_scale -n 4 --pairs 100 --auto

Ranks of one machine average 214 arrays, 97.6 MiB, with ``SynchronousSGD``; in each pair one step has a
``GradientMonitor`` and one does not, in an order that alternates. ``--compute``: seconds that stand for forward and
backward of a step; they are added to the time of a bare step, since what is asked for is the part of a whole one.
``--auto``: the monitor measures as often as a hundredth of a step's time allows. Printed as JSON, with the upper end of
a 95 % interval of the mean difference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from typing import Any

import numpy as np

import kfcomm
from kfcomm.bench.harness import run_job, slowest_s
from kfcomm.bench.workloads import resnet50
from kfcomm.train import Agreement, GradientMonitor, SynchronousSGD

QUANTILE = 2.05
"""Of Student's t with 29 degrees of freedom, 97.5 %."""


AUTO: dict[str, Any] = {"every": "auto", "max_cost": 0.005}
"""A hundredth of a step: the monitor's time from one of its steps to the next has a bare step in it."""


def rank(pairs: int, compute_s: float, options: dict[str, Any]) -> None:
    """One rank of the measurement."""
    with kfcomm.sync.init() as comm:
        random = np.random.default_rng(comm.rank)
        gradients = [random.standard_normal(shape, np.float32) for shape in resnet50()]
        bare: Agreement = SynchronousSGD(comm, name="bare")
        watched: Agreement = SynchronousSGD(comm, monitor=GradientMonitor(comm, 32, **options), name="watched")
        took: dict[str, list[float]] = {"bare": [], "watched": []}
        for number in range(pairs + 2):  # the first two open links
            for way in (bare, watched) if number % 2 else (watched, bare):
                took[way.name].append(step(comm, way, gradients))
        if comm.rank == 0:
            print(json.dumps(summary(took["bare"][2:], took["watched"][2:], compute_s) | {"ranks": comm.size}))


def step(comm: Any, way: Agreement, gradients: list[Any]) -> float:
    """Seconds of a step, on the rank that took longest."""
    comm.barrier("begin")
    begun_s = time.monotonic()
    way.gradients(gradients).wait()
    return slowest_s(comm, time.monotonic() - begun_s)


def summary(bare: list[float], watched: list[float], compute_s: float) -> dict[str, float]:
    """The cost of a monitor in seconds, and as a part of a step."""
    costs = [one - other for one, other in zip(watched, bare, strict=True)]
    mean, error = statistics.mean(costs), QUANTILE * statistics.stdev(costs) / math.sqrt(len(costs))
    whole_s = compute_s + statistics.mean(bare)
    return {
        "pairs": len(costs),
        "bare_ms": round(1e3 * statistics.median(bare), 1),
        "watched_ms": round(1e3 * statistics.median(watched), 1),
        "cost_ms": round(1e3 * mean, 1),
        "cost_at_most_ms": round(1e3 * (mean + error), 1),
        "share_of_a_step": round(mean / whole_s, 4),
        "share_at_most": round((mean + error) / whole_s, 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=4, help="number of ranks")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds in place of a step's computing")
    parser.add_argument("--auto", action="store_true", help="measure as often as a hundredth of the time allows")
    given = parser.parse_args()
    if "KFCOMM_RANK" in os.environ:
        rank(given.pairs, given.compute, AUTO if given.auto else {})
    else:
        print(run_job(given.n, ["-m", "bench.noise_scale", *sys.argv[1:]], timeout_s=None), end="")
