"""`kfcomm ready`: a probe for engines that ask whether a host's ranks have joined."""

from __future__ import annotations

import sys

import click

from kfcomm.common.sizes import ranks_in_words


@click.command()
@click.option(
    "-n", "--num-ranks", type=click.IntRange(min=1), default=1, metavar="N", help="Ranks of this host to wait for.",
    show_default=True,
)  # fmt: skip
def ready(num_ranks: int) -> None:
    """Exit with 0 if a rank of this host, or pod, has joined its world; else with 1.

    Seen are ranks of this user with monitoring on (the default), however they were started: under `kfcomm run`, an
    engine or by hand. A rank that has ended is not seen any more.
    """
    from kfcomm.monitor import live

    found = max(live.jobs(), key=lambda job: len(job.ranks), default=None)
    joined = () if found is None else found.ranks
    if found is not None and len(joined) >= num_ranks:
        click.echo(f"{ranks_in_words(joined)} of job {found.name} {'has' if len(joined) == 1 else 'have'} joined")
        return
    click.echo(
        f"{len(joined)} of {num_ranks} ranks of this host have joined: others have not started yet, wait for their "
        "peers (kfcomm env shows where), run as another user or with monitor=False, or have ended",
        err=True,
    )
    sys.exit(1)
