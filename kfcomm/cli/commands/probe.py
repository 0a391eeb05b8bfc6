"""`kfcomm probe`: latency and bandwidth of the links of a world.

Outside of a job it starts ranks, and each runs this command again; in a job every rank runs it, and takes part. Rank 0
shows and writes the results.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfcomm.bench.report import Files
from kfcomm.cli import options
from kfcomm.cli.options import NameChoice, WithSize, reported_errors
from kfcomm.common.sizes import parse_sizes
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.host import hostname
from kfcomm.rendezvous.settings import Settings, detect
from kfcomm.transports.registry import LINKS

if TYPE_CHECKING:
    from kfcomm import Communicator

MOST_BUSY = 0.25
"""Largest share of the processors in use by others at which costs are saved."""
BUSY_OVER_S = 1.0


@dataclass(frozen=True, slots=True)
class _ProbeOptions:
    num_ranks: int | None
    size: str
    rounds: int
    timeout: float | None
    transport: str | None
    keep: bool
    force: bool
    forget: bool
    json_path: Path | None
    html_path: Path | None


@click.command(cls=WithSize)
@click.option("-n", "--num-ranks", type=click.IntRange(min=2), metavar="N", help="Ranks to start here.")
@click.option("--nbytes", "size", default="1MiB", show_default=True, metavar="SIZE", help="Of the first messages.")
@click.option(
    "--rounds", type=int, default=3, show_default=True, metavar="N", help="Messages per figure; the best counts."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds for each pair of ranks."
)
@click.option("--transport", type=NameChoice(LINKS), help="Kind of links between the ranks.")
@click.option(
    "--keep",
    is_flag=True,
    help="Keep what messages cost: 'auto' of all your later jobs on these hosts counts with it. Refused where they "
    "are busy.",
)
@click.option("--force", is_flag=True, help="With --keep: also on a busy host.")
@click.option("--forget", is_flag=True, help="Remove what was kept on this host, and measure nothing.")
@options.json_file("the matrices")
@options.page_file("heat maps")
def probe(**options: Any) -> None:
    """Measure latency and bandwidth between every two ranks.

    Pairs take turns, so that none measures while another uses the ports of its hosts. Ranks are started here; inside a
    job (kfcomm run, torchrun, SLURM, MPI) those of the job are used. Nothing but a table comes of it, unless with
    --keep.

    \b
      kfcomm probe -n 4
      kfcomm probe -n 4 --json links.json --html links.html
      kfcomm probe -n 4 --keep
      kfcomm probe --forget
      kfcomm run -H 10.0.0.1:1,10.0.0.2:1 kfcomm probe       (on both hosts)
    """  # noqa: D301  click wants the character, not its name
    given = _ProbeOptions(**options)
    with reported_errors():
        if given.forget:
            _forget(given)
            return
        if given.force and not given.keep:
            raise ConfigError("--force needs --keep: add --keep, or leave --force out")
        settings = detect(os.environ)
        files = Files(given.json_path, given.html_path)
        nbytes = parse_sizes(given.size)
        if len(nbytes) != 1:
            raise ConfigError(f"--nbytes {given.size!r}: one size, such as 1MiB")
        if given.keep and (given.transport or settings.links) != "auto":
            raise ConfigError(
                "--keep is for the links that ranks choose by themselves: leave --transport out, and KFCOMM_TRANSPORT"
            )
        if settings.rank == 0:
            files.check(draws=False)
        if settings.size == 1:
            sys.exit(_start(given, settings))
        if given.num_ranks is not None:
            raise ConfigError(
                f"-n {given.num_ranks} starts ranks, but this process is rank {settings.rank} of {settings.size} "
                f"already ({settings.source}): leave it out"
            )
        asyncio.run(_take_part(nbytes[0], given, files))


def _forget(given: _ProbeOptions) -> None:
    from kfcomm.rendezvous.saved_costs import forget_costs, path_of_costs

    if given.keep or given.num_ranks is not None:
        raise ConfigError("--forget measures nothing: leave --keep and -n out")
    path = forget_costs()
    if path is None:
        click.echo(f"nothing was kept: there is no {path_of_costs()}")
    else:
        click.echo(f"removed {path}: 'auto' of later jobs uses the default costs")


def _start(given: _ProbeOptions, settings: Settings) -> int:
    """Run this command in new ranks on this host; return the exit code."""
    from kfcomm.cli.ranks import Relay, own_module
    from kfcomm.launch.job import RunOptions
    from kfcomm.launch.run import run

    if given.num_ranks is None:
        raise ConfigError("say how many ranks to start, such as -n 4, or run this command in a job")
    values = {
        "--nbytes": given.size, "--rounds": given.rounds, "--timeout": given.timeout, "--transport": given.transport,
        "--json": given.json_path, "--html": given.html_path,
    }  # fmt: skip
    options = [word for name, value in values.items() if value is not None for word in (name, str(value))]
    flags = ["--keep"] * given.keep + ["--force"] * given.force
    command = own_module("kfcomm", "probe", *options, *flags)
    return asyncio.run(run(RunOptions(command, given.num_ranks), os.environ, Relay(given.num_ranks)))


async def _take_part(nbytes: int, given: _ProbeOptions, files: Files) -> None:
    """Measure, as one rank of the job."""
    import kfcomm
    from kfcomm.probe.report import as_text

    async with kfcomm.init(transport=given.transport) as comm:
        busy = 0.0
        if given.keep:
            host, most, busy = await _busiest(comm)
            if most > MOST_BUSY and not given.force:
                # Every rank knows the shares, so that all of them leave; rank 0 says why.
                if comm.rank != 0:
                    return
                raise ConfigError(
                    f"host {host} is busy ({most:.0%} of its processors; at most {MOST_BUSY:.0%} are fine): what would "
                    "be kept would mislead all later jobs. Nothing was measured: try again when it is idle, or use "
                    "--force"
                )
        found = await comm.probe(nbytes=nbytes, rounds=given.rounds, timeout=given.timeout)
    # after the world is closed, so that the others need not wait
    if comm.rank == 0:
        click.echo(as_text(found), nl=False)
    kept = found.keep(busy) if given.keep and comm.local_rank == 0 else None
    if comm.rank != 0:
        return
    if kept is not None:
        click.echo(
            f"\nkept in {kept}: 'auto' of all your later jobs on this host"
            f"{'' if found.layout.num_hosts == 1 else ' (and likewise on the others)'} uses it.\n"
            f"The processors were {busy:.0%} busy. 'kfcomm env' shows what is kept, 'kfcomm probe --forget' removes it."
        )
    try:
        if files.json is not None:
            found.save(files.json)
        if files.html is not None:
            from kfcomm.probe.report import page

            files.html.write_text(page(found), "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


async def _busiest(comm: Communicator) -> tuple[str, float, float]:
    """Host with the busiest processors while the ranks wait; its share, and that of this host."""
    # One rank of each host looks. The others wait for it in the collective, and use no processor meanwhile.
    own = await busy_share() if comm.local_rank == 0 else 0.0
    shares = await comm.all_gather_object([hostname(), own])
    host, most = max(shares, key=lambda one: one[1])
    return host, most, own


async def busy_share() -> float:
    """Share of the processors in use, over a second; 0 if unknown (proc(5))."""
    try:
        before = _ticks()
        await asyncio.sleep(BUSY_OVER_S)
        idle, whole = (now - then for now, then in zip(_ticks(), before, strict=True))
    except OSError:
        return 0.0
    return max(0.0, 1.0 - idle / whole) if whole > 0 else 0.0


def _ticks() -> tuple[int, int]:
    """Idle and total ticks of all processors since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        # Without the guest times that follow, which are part of user and nice.
        user, nice, system, idle, waiting, *rest = map(int, file.readline().split()[1:9])
    return idle + waiting, user + nice + system + idle + waiting + sum(rest)
