"""One rank of a long run, started by `kfcomm run`: it writes lines that `tests.programs.__main__` reads.

``PROGRESS seed`` before a program, on rank 0; ``REPORT json`` for what was wrong, after which the rank leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import sys

import click

import kfcomm
from kfcomm.engine import membership
from kfcomm.rendezvous import identity
from kfcomm.strategies import base
from kfcomm.transports.shm import slots
from tests.programs.walker import Plan, Report, Walker, all_awaiting, all_blocking

PROGRESS, REPORT = "PROGRESS", "REPORT"
CALLS_A_SECOND = 10
"""Fewer than on any machine: what takes longer than this and two timeouts has lost itself outside of kfcomm's waits."""


def main() -> int:
    """Run the programs of the command line; 1 if one was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--interface", choices=("blocking", "async"), required=True)
    for name in ("first", "programs", "calls"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--per-host", type=int, default=0)
    given = parser.parse_args()
    if given.per_host:
        hosts_have(given.per_host)
    if given.long:
        all_are_long()
    plan = Plan(given.first, given.programs, given.calls)
    report = (_blocking if given.interface == "blocking" else _awaited)(plan, given.timeout)
    faulthandler.cancel_dump_traceback_later()
    if report is not None:
        click.echo(f"{REPORT} {json.dumps(report.as_dict())}")
    return int(report is not None)


def hosts_have(per_host: int) -> None:
    """Let so many ranks at a time take themselves for those of one host."""
    host, rank = identity.host_id(), int(os.environ["KFCOMM_RANK"])
    identity.host_id = membership.host_id = lambda: f"{host}/{rank // per_host}"


def all_are_long() -> None:
    """Send messages of any size as if they needed several windows of a slot.

    Half of their arrays are in symmetric memory, on some ranks or on others.
    """
    base.DIRECT_NBYTES, slots.WINDOW_NBYTES, slots.MIN_PIECE_NBYTES = 0, 64, 0
    Walker.symmetric = 0.5


def _blocking(plan: Plan, timeout_s: float) -> Report | None:
    with kfcomm.sync.init(timeout=timeout_s, device="none") as comm:
        return all_blocking(comm, plan, lambda seed: _begins(comm.rank, seed, plan, timeout_s))


def _awaited(plan: Plan, timeout_s: float) -> Report | None:
    async def run() -> Report | None:
        async with kfcomm.init(timeout=timeout_s, device="none") as comm:
            return await all_awaiting(comm, plan, lambda seed: _begins(comm.rank, seed, plan, timeout_s))

    return asyncio.run(run())


def _begins(rank: int, seed: int, plan: Plan, timeout_s: float) -> None:
    """Every wait ends by its timeout; a rank that hangs for longer shows where."""
    faulthandler.dump_traceback_later(2 * timeout_s + plan.calls / CALLS_A_SECOND, exit=True)
    if rank == 0:
        click.echo(f"{PROGRESS} {seed}")


if __name__ == "__main__":
    sys.exit(main())
