"""`kfcomm resize`: another number of ranks for a running job."""

from __future__ import annotations

import click

from kfcomm.cli.errors import reported_errors


@click.command()
@click.argument("size", type=click.IntRange(min=1))
@click.argument("job", required=False)
def resize(size: int, job: str | None) -> None:
    """Ask a running elastic job for SIZE ranks.

    JOB is its name, or how that begins; needed if several run. New ranks are started at once and come in at the next
    boundary between two steps; of too many the last are released there.

    \b
      kfcomm resize 6
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.launch.requests import ask

    with reported_errors():
        told = ask(job, f"size {size}")
    click.echo(f"job {told['job']}: {told['size']} ranks are wanted, {len(told['running'])} run")
