"""`kfcomm dashboard`: live page of a running job in a browser."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import click

from kfcomm.cli.commands.top import chosen
from kfcomm.cli.options import reported_errors
from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.monitor.dashboard.serving import Address


@click.command()
@click.argument("job", required=False)
@click.option("--job", "named", metavar="JOB", help="The job, by its name or how that begins; as the argument.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen at; the page of any but a loopback address is behind a token.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port; 0 for any. By default 29650, else any."
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=60),
    default=0.2,
    show_default=True,
    metavar="S",
    help="Seconds between two looks at the ranks.",
)
def dashboard(job: str | None, named: str | None, host: str, port: int | None, interval: float) -> None:
    """Show a running job on a live page in a browser: graph, waits, rates, names, training, events.

    JOB is its name, or how that begins; needed if several run, unless one of them alone runs in this directory. Shown
    are its ranks on all hosts. The page only reads, and stays until Ctrl-C; the job runs on.

    \b
      kfcomm dashboard
      kfcomm dashboard train --port 8080
      kfcomm run -n 4 --dashboard python train.py
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.monitor import live
    from kfcomm.monitor.dashboard.serving import Address

    with reported_errors():
        if math.isnan(interval):  # click's range check accepts NaN
            raise ConfigError("--interval nan must be a number of seconds")
        found = chosen(live.jobs(), named or job)
        asyncio.run(_serve(found, Address(host, port), interval))


async def _serve(job: str, address: Address, interval_s: float) -> None:
    from kfcomm.monitor.dashboard.serving import served
    from kfcomm.monitor.dashboard.watching import JobObserver

    observer = JobObserver(job, interval_s)
    async with served(observer, address) as url:
        click.echo(f"dashboard of {job}: {url}")
        await observer.has_ended.wait()
        click.echo(f"job {job} has ended; the page stays until Ctrl-C")
        await asyncio.Event().wait()
