"""A program that adapts while its network changes: all_reduce after all_reduce, watched by a policy.

It is started and conducted as ``bench.netlab.worker`` is, and writes, beside the times of its steps, the strategy of
each and what was decided. The names of the steps do not matter: it begins with ``KFCOMM_STRATEGY``. The policy is
``AvoidSlowLinks``, or the one that the variable ``KFNETLAB_POLICY`` names.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kfcomm
from bench.netlab.steps import Step
from bench.netlab.worker import Time, conducted, numbers
from kfcomm.adapt import Adaptation, AutoStrategy, AvoidSlowLinks, Decision, Policy
from kfcomm.bench.harness import run_on_loop
from kfcomm.strategies import Strategy

POLICY = "KFNETLAB_POLICY"
POLICIES: dict[str, type[Policy]] = {"AvoidSlowLinks": AvoidSlowLinks, "AutoStrategy": AutoStrategy}


async def packed(comm: kfcomm.Communicator) -> Strategy:
    """Trees that fit the links as they are now; for ``bench.netlab.worker``."""
    return (await comm.probe()).packed_trees()


class Adapting:
    """One rank, and the arrays that it keeps."""

    def __init__(self, comm: kfcomm.Communicator, adaptation: Adaptation, nbytes: int) -> None:
        self._comm = comm
        self._adaptation = adaptation
        self._given = numbers(nbytes, comm.rank + 1)
        self._wanted = numbers(nbytes, sum(range(1, comm.size + 1)))
        self._result = numbers(nbytes, 0)

    async def do(self) -> dict[str, Any]:
        """One step: its times, and that of the end of the meeting that follows.

        Raises:
            RuntimeError: the result is wrong.
        """
        await self._comm.barrier("step")
        strategy = self._comm.strategy.name
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        async with self._adaptation.step():
            await self._comm.all_reduce(self._given, "step", out=self._result)
            took = Time(start_s, time.monotonic(), time.process_time() - start_cpu_s)
        met_s = time.monotonic()
        if not (self._result == self._wanted).all():
            raise RuntimeError(f"rank {self._comm.rank} has a wrong result")
        return {**asdict(took), "met_s": met_s, "strategy": strategy}


def recorded(decision: Decision) -> dict[str, Any]:
    """A decision, for the record."""
    return {**asdict(decision), "text": str(decision)}


async def main() -> None:
    """All steps of this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", type=Step.parse, metavar="NAME:SIZE", help="all of one size")
    parser.add_argument("--output", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--conductor", type=Path, metavar="SOCKET")
    options = parser.parse_args()
    times = []
    policy = POLICIES[os.environ.get(POLICY, "AvoidSlowLinks")]()
    async with kfcomm.init() as comm, Adaptation(comm, [policy]) as adaptation:
        adapting = Adapting(comm, adaptation, options.steps[0].nbytes)
        async with conducted(options.conductor if comm.rank == 0 else None) as ask:
            for number in range(len(options.steps)):
                await ask(number)
                times.append(await adapting.do())
        record = {"rank": comm.rank, "times": times, "decisions": [recorded(one) for one in adaptation.decisions]}
        (options.output / f"rank-{comm.rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    run_on_loop(main())
