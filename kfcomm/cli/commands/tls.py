"""`kfcomm tls`: certificates of a job."""

from __future__ import annotations

from pathlib import Path

import click

from kfcomm.cli.options import Commands, reported_errors
from kfcomm.transports import tls as certificates


@click.group(cls=Commands)
def tls() -> None:
    """Make what a job's connections are secured with."""


@tls.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=certificates.DAYS,
    show_default=True,
    help="How long the certificates are valid.",
)
def make(folder: Path, days: int) -> None:
    """Make an authority and a certificate for one job, in FOLDER.

    \b
      kfcomm tls make job-tls
      kfcomm run -n 4 --tls job-tls python train.py

    Every host of the job needs the folder. Keep it secret from all other hosts.
    """  # noqa: D301  click wants the character, not its name
    with reported_errors():
        certificates.make(folder, days=days)
    click.echo(f"{folder}: valid for {days} days; copy it to every host of the job")
