"""The command line: one group, whose commands are thin adapters over the packages that do the work.

What a command needs is imported when it is chosen: `run` starts ranks before most of it is there.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from kfcomm import __version__
from kfcomm.cli.errors import reported_errors
from kfcomm.cli.options import as_size, of_kind
from kfcomm.cli.spelling import ELSEWHERE, Commands, WithStrategy
from kfcomm.errors import ConfigError

_ELSEWHERE = ("bench", "probe", "resize", "run", "simulate", "status", "timeline", "tls", "top")
"""Commands with a module of their own, which is called like them."""


class _Commands(Commands):
    """Imports a command when it is asked for, as click's documentation has it ("Lazily Loading Subcommands")."""

    others = ELSEWHERE

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *_ELSEWHERE])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:  # click would end with 1
            sys.exit(130)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _ELSEWHERE:
            return super().get_command(context, name)
        command = getattr(import_module(f"kfcomm.cli.{name}"), name)
        assert isinstance(command, click.Command)  # noqa: S101 - each module has one of its own name
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kfcomm")
def main() -> None:
    """Collective communication along graphs you choose."""


@main.command()
def env() -> None:
    """Explain what this process finds: place in the world, device, interfaces, links, versions."""
    from kfcomm.launch.explain import explain

    text, exit_code = explain(os.environ)
    click.echo(text)
    sys.exit(exit_code)


@main.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Write it for machines.")
def doctor(files: tuple[str, ...], as_json: bool) -> None:
    """Say who waits for whom, from the dumps of several ranks.

    FILEs are what `kill -USR1` of the ranks or kfcomm.dump(path) has written; patterns will do. The exit code is
    0 if nothing waits, 1 if something does, 2 if a file cannot be read.

    \b
      kfcomm doctor kfcomm-rank*.json
    """  # noqa: D301  click wants the character, not its name
    import json

    from kfcomm.monitor.doctor import diagnose, read, report

    with reported_errors():
        diagnosis = diagnose(read(files))
    click.echo(json.dumps(report.as_json(diagnosis), indent=1) if as_json else report.as_text(diagnosis))
    sys.exit(1 if diagnosis.waits else 0)


class _Topology(Commands):
    """Group that suggests ``show`` if the name of a strategy stands in place of a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from kfcomm.strategies import names

        if args[0] in names():
            ctx.fail(f"No such command {args[0]!r}. Did you mean {ctx.command_path} show {' '.join(args)}?")
        return super().resolve_command(ctx, args)


@main.group(cls=_Topology)
def topology() -> None:
    """Show the graphs along which data travels."""


@topology.command("list")
def list_strategies() -> None:
    """List the strategies and what an all_reduce costs with each."""
    from kfcomm.strategies.auto import FORMULA
    from kfcomm.strategies.plugins import found, overlooked
    from kfcomm.strategies.registry import ALGORITHMS

    own = [*((algorithm.name, algorithm.formula) for algorithm in ALGORITHMS), ("auto", FORMULA)]
    for name, formula in [*own, *((name, plugin.origin) for name, plugin in sorted(found().items()))]:
        click.echo(f"{name:<24}{formula}")
    for line in overlooked():
        click.echo(f"kfcomm: warning: {line}", err=True)
    click.echo("\nn ranks on h hosts, at most p on one, p₀ on the first; at most c links from a host to others.")
    click.echo("Bytes of the busiest rank, and between hosts of the busiest host, per byte of message.")


@topology.command(cls=WithStrategy)
@click.argument("strategy")
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@click.option("--hosts", metavar="H|HxR", help="Hosts that share them evenly; or hosts and ranks on each, without -n.")
@click.option("--root-pair", type=click.IntRange(min=0), metavar="K", help="Draw graph pair K; the first by default.")
@click.option(
    "--nbytes", callback=as_size, metavar="SIZE", help="Draw what auto takes for messages of this size: 64KiB."
)
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8", lazy=True),
    callback=of_kind(".svg"),
    help="Write an SVG picture here.",
)
def show(
    strategy: str,
    num_ranks: int | None,
    hosts: str | None,
    root_pair: int | None,
    nbytes: int | None,
    output: Any | None,
) -> None:
    """Draw the graphs of STRATEGY as text, or as a picture with -o.

    STRATEGY is a name of kfcomm topology list, or rules by size: "<=64KiB: star, else: ring".

    \b
      kfcomm topology show ring -n 8 --hosts 2
      kfcomm topology show ring --hosts 2x4
      kfcomm topology show tree -n 16 --hosts 4 -o tree.svg
    """  # noqa: D301  click wants the character, not its name
    from dataclasses import replace

    from kfcomm.rendezvous.costs import saved_costs
    from kfcomm.strategies.draw import as_svg, as_text
    from kfcomm.strategies.plugins import build
    from kfcomm.types import Layout

    with reported_errors():
        layout = replace(Layout.even(*_ranks_and_hosts(num_ranks, hosts)), costs=saved_costs())
        built = build(strategy, layout)
        if output is not None:
            # a picture shows one strategy: of auto's, unless asked, that for long messages
            picture = as_svg(built.select(1 << 30 if nbytes is None else nbytes), layout, root_pair or 0)
            output.write(picture)
        else:
            click.echo(as_text(built if nbytes is None else built.select(nbytes), layout, root_pair), nl=False)


def _ranks_and_hosts(num_ranks: int | None, hosts: str | None) -> tuple[int, int]:
    """Parse the numbers of ranks and hosts: ``-n 8 --hosts 2``, or ``--hosts 2x4``.

    Raises:
        ConfigError: the options are missing or contradict each other.
    """
    from kfcomm.cli.simulate import parse_worlds

    ((found, each),) = parse_worlds("1" if hosts is None else hosts.replace(",", " "))  # one world
    num_hosts = found or 1
    size = num_ranks if each is None else num_hosts * each
    if size is None:
        raise ConfigError("Missing option '-n': say how many ranks there are, -n 8, or --hosts 2x4")
    if num_ranks not in (None, size):
        raise ConfigError(f"-n {num_ranks} contradicts --hosts {hosts}, which has {size} ranks")
    if num_hosts > size:
        raise ConfigError(f"--hosts {hosts}: {size} ranks cannot occupy {num_hosts} hosts")
    return size, num_hosts
