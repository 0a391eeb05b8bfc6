"""`kfcomm resize`: requests another number of ranks of a running job."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import click

from kfcomm.cli.options import reported_errors, warn
from kfcomm.errors import ConfigError, RendezvousError

_MAX_DIGITS = 6
_SHOWN = 40
"""Longest shown argument."""


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[JOB] SIZE")
@click.option("--job", "named", metavar="JOB", help="The job, by its name or how that begins; as before SIZE.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask whether the job is the right one.")
@click.option("--store", metavar="URL", help="Ask the store of a job that runs elsewhere; with the job's KFCOMM_TOKEN.")
def resize(words: tuple[str, ...], named: str | None, yes: bool, store: str | None) -> None:
    """Ask a running elastic job for SIZE ranks.

    JOB is its name, or how that begins. Without it the job is meant that was started in this directory, else at this
    terminal. If none was, and another one runs, the command asks whether it is meant (--yes: it does not), and refuses
    where it cannot ask. New ranks are started at once and come in at the next boundary between two steps; of too many
    the last are released there.

    \b
      kfcomm resize 6
      kfcomm resize 3f2a 6
      kfcomm resize 6 --store http://10.0.0.1:29600
    """  # noqa: D301  click wants the character, not its name
    job, size = _job_and_size(words)
    if job is not None and named is not None:
        raise click.UsageError("the job is given twice: use JOB or --job")
    job = job or named
    if job is not None and store is not None:
        raise click.UsageError("a store is that of one job: say --store, or the job")
    with reported_errors():
        if store is not None:
            asyncio.run(_ask_elsewhere(store, size))
            click.echo(f"{store}: {size} ranks are wanted")
            return
        from kfcomm.common.version import difference
        from kfcomm.launch.requests import SIZE_FIELDS, ask, find, titled

        found = find(job)
        if job is None and not yes:
            _check_is_meant(ask(found, "status", SIZE_FIELDS), size)
        told = ask(found, f"size {size}", SIZE_FIELDS)
    waits = "" if told["is_kept"] else "; the store does not answer now: that waits until it does"
    was = f"{told['was']} -> " if "was" in told else ""  # since kfcomm 0.2.0
    warn(difference(told.get("versions")))
    click.echo(f"{titled(told)}: {was}{told['size']} ranks are wanted, {len(told['running'])} run{waits}")


def _check_is_meant(told: dict[str, Any], size: int) -> None:
    """Check that the user means this job, if it was found without a name.

    Raises:
        ConfigError: it is of another terminal and directory, and the user has not confirmed it.
    """
    from kfcomm.launch.requests import Origin, titled

    origin = Origin.from_json(told.get("origin", {}))
    # Started here, or asked for by a process of the job itself.
    if origin is None or origin.nearness or os.environ.get("KFCOMM_JOB") == told["job"]:
        return
    which = f"{titled(told)} was started at another terminal and in another directory"
    if at_terminal():
        if click.confirm(f"{which}.\nChange it from {told['size']} to {size} ranks?", err=True):
            return
        raise ConfigError("nothing was changed")
    raise ConfigError(f"{which}: name it (kfcomm resize {told['job']} {size}), or say --yes")


def at_terminal() -> bool:
    """Whether a user can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _job_and_size(words: tuple[str, ...]) -> tuple[str | None, int]:
    """Parse the arguments: the size is the last one, or the first one before a name."""
    if len(words) > 2:
        raise click.UsageError("say one job at the most, and its size")
    *job, size = words if words[-1].isdecimal() else words[::-1]
    if job == [""]:
        raise click.BadParameter("it is empty", param_hint="JOB")
    if not size.isascii() or not size.isdecimal() or len(size) > _MAX_DIGITS or int(size) < 1:
        raise click.BadParameter(
            f"expected a whole number of ranks from 1 to {10**_MAX_DIGITS - 1}, got {size[:_SHOWN]!r}",
            param_hint="SIZE",
        )
    return (job[0] if job else None), int(size)


async def _ask_elsewhere(url: str, size: int) -> None:
    from kfcomm.rendezvous.authentication import HOW_TO_SET, given_token
    from kfcomm.rendezvous.client import StoreClient
    from kfcomm.transports.tls import load

    found = given_token(os.environ, None)
    if found is None:
        raise ConfigError(f"the store of another host needs the job's token: {HOW_TO_SET}")
    tls = os.environ.get("KFCOMM_TLS")
    client = StoreClient(url, found[0], tls=None if not tls else load(tls))
    try:
        await client.want_size(size)
    except OSError as error:
        raise RendezvousError(f"the store at {url} could not be reached: {error}") from error
    finally:
        await client.close()
