"""`kfcomm run`: start a job and watch over it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kfcomm.cli.options import NameChoice, as_duration, device, reported_errors
from kfcomm.errors import ConfigError
from kfcomm.launch.hostfile import read_hostfile
from kfcomm.launch.job import RunOptions
from kfcomm.launch.output import open_standard_descriptors
from kfcomm.launch.placing import KINDS
from kfcomm.launch.run import run as run_job
from kfcomm.rendezvous.settings import misspelt
from kfcomm.transports.registry import TRANSPORT_NAMES


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "-np",
    "--num-ranks",
    "num_ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of ranks on this host.",
)
@click.option("-H", "--hosts", metavar="A:N,B:N", help="Hosts and their ranks; run this command once on each.")
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Hosts and their ranks in a file of mpirun's form, HOST slots=N a line; -n takes the first N slots.",
)
@click.option("--self", "own", metavar="ADDRESS", help="Which of the hosts is this one; found out by default.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Port of the store on the first host; 29600 with -H, else any."
)
@click.option(
    "--name", metavar="NAME", help="Name of the job, for kfcomm jobs, top and resize; by default that of the program."
)
@click.option("--strategy", metavar="NAME", help="Strategy of the world, for example ring.")
@click.option("--transport", type=NameChoice(TRANSPORT_NAMES), help="Kind of links between the ranks, or nccl or ipc.")
@device
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds until a wait fails.")
@click.option(
    "--stall-after", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds until one is reported."
)
@click.option(
    "--lost-after",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds until a silent one is lost.",
)
@click.option("--interface", metavar="NAME", help="Interface, address or network (CIDR) to listen at.")
@click.option("--dump-dir", metavar="PATH", help="Folder for the dumps that SIGUSR1 asks for.")
@click.option("--timeline", metavar="DIR", help="Record a timeline of each rank here.")
@click.option("--checksum/--no-checksum", default=None, help="Check what travels over TCP; off by default.")
@click.option("--tls", metavar="DIR", help="Secure TCP with TLS: what 'kfcomm tls make' made, or CERT,KEY,CA.")
@click.option("--monitor/--no-monitor", default=None, help="Count and time what the ranks do; on by default.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Port for Prometheus, to which each rank adds its local rank.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="File with the job's token; by default KFCOMM_TOKEN, or a new one.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="S",
    help=("Seconds between asking ranks to end and killing them."),
)
@click.option(
    "--time-limit",
    "time_limit_s",
    callback=as_duration,
    metavar="TIME",
    help="End the job after this time, such as 2h or 1h30m, with exit code 124.",
)
@click.option(
    "--bind-to",
    type=NameChoice(KINDS),
    default="none",
    show_default=True,
    help="Bind each rank to its share of the cores, or to one NUMA node.",
)
@click.option("--port-range", metavar="A:B", help="Ports at which the ranks listen; any by default.")
@click.option("--keep-going", is_flag=True, help="Let the others run on when a rank fails.")
@click.option(
    "--elastic", metavar="MIN[:MAX]", help="The job outlives ranks while MIN are left, and replaces them, up to MAX."
)
@click.option(
    "--restart-limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    metavar="K",
    help="How many ranks of an elastic job are replaced.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0, max=1 << 12),
    default=0,
    show_default=True,
    metavar="S",
    help="How many processes of an elastic job wait to take the place of others at once.",
)
@click.option(
    "--discover",
    metavar="SCRIPT",
    help="Prints the hosts that an elastic job may use, HOST:SLOTS a line; run again every second.",
)
@click.option(
    "--store",
    metavar="DIR|etcd://H1,H2,H3/PREFIX",
    help="Where an elastic job's store is kept, so that a launcher that is started again goes on with the job.",
)
@click.option(
    "--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Keep the output of each rank here as well."
)
@click.option(
    "--stdin",
    default="0",
    show_default=True,
    metavar="all|none|RANK",
    help="Which ranks get what this command reads.",
)
@click.option("--dashboard", is_flag=True, help="Serve a live page of the ranks on this host while they run.")
@click.option("-m", "is_module", is_flag=True, help="COMMAND is a module of Python, with its arguments.")
@click.option("--color/--no-color", default=None, help="Colour prefixes by rank; on a terminal by default.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], **given: Any) -> None:
    """Start COMMAND as N ranks and watch over them.

    Its output is shown with the rank before each line. The exit code is that of the first rank to fail
    (128 + n for signal n), and nothing of the job outlives this command.

    \b
      kfcomm run -n 4 python train.py
      kfcomm run -n 4 -m package.train --epochs 3
      kfcomm run -H 10.0.0.1:4,10.0.0.2:4 python train.py      (on both hosts, with one KFCOMM_TOKEN)
    """  # noqa: D301  click wants the character, not its name
    # First: no other descriptor may get the number of a standard stream that is closed.
    open_standard_descriptors()
    if given["is_module"]:
        command = (sys.executable, "-m", *command)
    with reported_errors():
        hosts = _hosts(given)
    options = RunOptions(
        command=command,
        num_ranks=given["num_ranks"] if given["hostfile"] is None else None,
        hosts=hosts,
        time_limit_s=given["time_limit_s"],
        bind_to=given["bind_to"],
        own=given["own"],
        port=given["port"],
        token_file=given["token_file"],
        grace_s=given["grace"],
        keep_going=given["keep_going"],
        elastic=given["elastic"],
        restart_limit=given["restart_limit"],
        spares=given["spares"],
        discover=given["discover"],
        store=given["store"],
        log_dir=given["log_dir"],
        stdin=given["stdin"],
        color=given["color"],
        settings=_settings(given),
        name=given["name"],
        dashboard=given["dashboard"],
    )
    for line in misspelt(os.environ):
        click.echo(f"kfcomm: warning: {line}", err=True)
    with reported_errors():
        sys.exit(asyncio.run(run_job(options, os.environ)))


def _hosts(given: Mapping[str, Any]) -> str | None:
    """The list of hosts, as it is given or from a file."""
    hosts: str | None = given["hosts"]
    if given["hostfile"] is None:
        return hosts
    if hosts is not None:
        raise ConfigError("give either -H or --hostfile")
    return read_hostfile(given["hostfile"], given["num_ranks"])


def _settings(given: Mapping[str, Any]) -> dict[str, str]:
    """The variables that carry the settings which were given as options."""
    names = (
        "strategy", "transport", "device", "timeout", "stall_after", "lost_after", "interface", "dump_dir", "timeline",
        "metrics_port", "port_range", "tls",
    )  # fmt: skip
    # Options that were not given leave the variables of the user as they are.
    found = {f"KFCOMM_{name.upper()}": str(given[name]) for name in names if given[name] is not None}
    flags = ("monitor", "checksum")
    return found | {f"KFCOMM_{name.upper()}": "1" if given[name] else "0" for name in flags if given[name] is not None}
