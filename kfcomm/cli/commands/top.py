"""`kfcomm top`: live view of a running job."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

import click

from kfcomm.cli.options import reported_errors
from kfcomm.common.sizes import ranges
from kfcomm.common.sockets import matching
from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kfcomm.monitor.live import Job
    from kfcomm.monitor.top import JobWatcher

NO_JOB = (
    "no job of yours runs on this host, as far as can be seen: it needs monitoring on (KFCOMM_MONITOR=1, the default), "
    "and Linux"
)


@click.command()
@click.argument("job", required=False)
@click.option("--job", "named", metavar="JOB", help="The job, by its name or how that begins; as the argument.")
@click.option("--once", is_flag=True, help="Print one view and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
def top(job: str | None, named: str | None, once: bool, interval: float) -> None:
    """Show what a running job is doing: rates, who is waited for, the busiest names.

    JOB is its name or a prefix of it. It is needed if several jobs run, unless exactly one runs in this directory. The
    view has the job's ranks on all hosts. Leave with q. If the output is not a terminal, the views are printed one
    after another.

    \b
      kfcomm top
      kfcomm top --once
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.monitor import live
    from kfcomm.monitor.top import JobWatcher

    with reported_errors():
        if math.isnan(interval):  # click's range check accepts NaN
            raise ConfigError("--interval nan must be a number of seconds")
        watcher = JobWatcher(chosen(live.jobs(), named or job))
    if once or not sys.stdout.isatty():
        _print(watcher, interval, once=once)
    else:
        _show(watcher, interval)


def chosen(jobs: Sequence[Job], asked: str | None) -> str:
    """Name of the requested job.

    Raises:
        ConfigError: no job or more than one matches.
    """
    if not jobs:
        raise ConfigError(NO_JOB)
    listed = "".join(f"\n  {_described(job)}" for job in jobs)
    names = [job.name for job in jobs]
    if asked is not None:
        names = matching(names, asked)
    if asked is None and len(names) > 1:
        here = [job.name for job in jobs if job.directory == os.path.realpath(os.getcwd())]
        names = here if len(here) == 1 else names
    if len(names) == 1:
        return names[0]
    if names:
        raise ConfigError(f"{len(names)} jobs run here, name the one that you mean: {listed}")
    raise ConfigError(f"no job {asked!r} runs here; there are: {listed}")


def _described(job: Job) -> str:
    return f"{job.name} (ranks {ranges(job.ranks)}{job.program and ', '}{job.program})"


def _print(watcher: JobWatcher, interval_s: float, *, once: bool) -> None:
    """Print views as plain text; the first look only initialises rates."""
    from kfcomm.monitor.screen import view

    change = watcher.look()
    while not change.has_ended:
        time.sleep(interval_s)
        change = watcher.look()
        for line in view(change, _width()):
            click.echo(line.text)
        if once:
            return
        click.echo()


def _width() -> int:
    """Width of the terminal, or ``COLUMNS``; without either, wide enough for all columns."""
    is_known = "COLUMNS" in os.environ or sys.stdout.isatty()
    return shutil.get_terminal_size((80, 24)).columns if is_known else 200


def _show(watcher: JobWatcher, interval_s: float) -> None:
    """Redraw the view until the user leaves or the job ends."""
    from kfcomm.monitor.screen import screen, view

    with screen() as terminal:
        while True:
            change = watcher.look()
            terminal.draw(view(change, *terminal.size()))
            if change.has_ended or terminal.wait(interval_s):
                break
    if change.has_ended:
        click.echo(f"job {watcher.job} has ended")
