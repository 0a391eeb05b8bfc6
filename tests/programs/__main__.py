"""A long run of random programs, by hand.

    python -m tests.programs --programs 10000 --calls 500 --ranks 4 --transport shm --interface blocking

It ends at the first program that goes wrong, and says how to run that one alone; fewer ``--calls`` give the beginning
of the same program.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import time
from collections.abc import Sequence

import click

from tests.programs import generator
from tests.programs.running import Outcome, Setting, busy, run_world
from tests.programs.walker import Plan

TELL_EVERY_S = 10.0


def main() -> int:
    """Run what the command line asks for; 1 if a program went wrong."""
    given = read_arguments(sys.argv[1:])
    size = given.ranks
    if given.show is not None:
        _show(given.show, given.calls, size)
        return 0
    setting = Setting(size, given.transport, given.interface, given.timeout, given.debug, given.long, given.per_host)
    first = given.seed if given.seed is not None else secrets.randbelow(1 << 31)
    count = given.programs
    if given.only_seed is not None:
        first, count = given.only_seed, 1
    click.echo(f"{count} programs of {given.calls} calls from seed {first} on: {setting}")
    with busy(given.busy):
        return _all(setting, first, count, given)


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; exit with 2 if no world fits it."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.per_host and given.transport in ("shm", "unix"):
        parser.error(f"--transport {given.transport} does not reach from host to host (--per-host)")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--programs", type=int, default=100, help="how many")
    add("--calls", type=int, default=200, help="of each program, about")
    add("--ranks", type=int, default=4)
    add("--transport", choices=("auto", "shm", "unix", "tcp"), default="auto")
    add("--interface", choices=("blocking", "async"), default="blocking")
    add("--seed", type=int, help="of the first program; the next ones follow. By default a random one")
    add("--only-seed", type=int, help="the program of this seed alone")
    add("--per-world", type=int, default=100, help="programs after which new processes are started")
    add("--timeout", type=float, default=60.0, help="seconds until a call that hangs ends with an error")
    add("--debug", action="store_true", help="python -X dev, and with it asyncio's debug mode")
    add("--long", action="store_true", help="messages go as long ones do, arrays are in symmetric memory")
    add("--per-host", type=int, default=0, metavar="K", help="so many ranks on each of several hosts, as they think")
    add("--busy", type=int, default=0, metavar="K", help="so many busy processes beside")
    add("--show", type=int, metavar="SEED", help="print the steps of a program, and run nothing")
    return parser


def _all(setting: Setting, first: int, count: int, given: argparse.Namespace) -> int:
    """World after world, until one goes wrong."""
    began_s = told_s = time.monotonic()

    def tell(seed: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= TELL_EVERY_S:
            told_s = now_s
            click.echo(f"{seed - first} of {count} programs in {now_s - began_s:.0f} s, now seed {seed}")

    for start in range(first, first + count, given.per_world):
        plan = Plan(start, min(given.per_world, first + count - start), given.calls)
        outcome = run_world(setting, plan, tell)
        if outcome.code or outcome.reports:
            _explain(outcome, setting, plan)
            return 1
    click.echo(f"{count} programs in {time.monotonic() - began_s:.0f} s: all results were right")
    return 0


def _explain(outcome: Outcome, setting: Setting, plan: Plan) -> None:
    for line in outcome.lines:
        click.echo(line)
    for report in outcome.reports:
        click.echo(str(report))
    if not outcome.reports:
        click.echo(f"the world of seeds {plan.first} to {plan.first + plan.count - 1} ended with {outcome.code}")
        return
    again = [
        "python", "-m", "tests.programs", "--only-seed", outcome.reports[0].seed, "--calls", plan.calls, "--ranks",
        setting.ranks, "--transport", setting.transport, "--interface", setting.interface,
    ]  # fmt: skip
    options = " --debug" * setting.debug + " --long" * setting.long
    options += f" --per-host {setting.per_host}" if setting.per_host else ""
    click.echo("this one alone: " + shlex.join(map(str, again)) + options)


def _show(seed: int, calls: int, size: int) -> None:
    for place, step in enumerate(generator.program(seed, calls, size).steps):
        click.echo(f"step {place}: {step}")


if __name__ == "__main__":
    sys.exit(main())
