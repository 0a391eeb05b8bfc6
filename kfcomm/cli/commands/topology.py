"""`kfcomm topology`: strategies and their graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import click

from kfcomm.cli.options import Commands, WithStrategy, as_size, of_kind, reported_errors
from kfcomm.errors import ConfigError

if TYPE_CHECKING:
    from kfcomm.types import Layout


class _Topology(Commands):
    """Group that suggests ``show`` if the name of a strategy stands in place of a command."""

    others: ClassVar[Mapping[str, str]] = {"draw": "show", "plot": "show"}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from kfcomm.strategies import names

        if args[0] in names():
            ctx.fail(f"No such command {args[0]!r}. Did you mean {ctx.command_path} show {' '.join(args)}?")
        return super().resolve_command(ctx, args)


@click.group(cls=_Topology)
def topology() -> None:
    """Show the graphs along which data travels."""


@topology.command("list")
def list_strategies() -> None:
    """List the strategies and what an all_reduce costs with each."""
    from kfcomm.strategies.auto import FORMULA
    from kfcomm.strategies.builtin import ALGORITHMS
    from kfcomm.strategies.plugins import found, overlooked

    own = [*((algorithm.name, algorithm.formula) for algorithm in ALGORITHMS), ("auto", FORMULA)]
    for name, formula in [*own, *((name, plugin.origin) for name, plugin in sorted(found().items()))]:
        click.echo(f"{name:<24}{formula}")
    for line in overlooked():
        click.echo(f"kfcomm: warning: {line}", err=True)
    click.echo("\nn ranks on h hosts, at most p on one, p₀ on the first; at most c links from a host to others.")
    click.echo("Bytes of the busiest rank, and between hosts of the busiest host, per byte of message.")


@dataclass(frozen=True, slots=True)
class _Drawing:
    num_ranks: int | None
    hosts: str | None
    root_pair: int | None
    nbytes: int | None
    probe: Path | None
    output: TextIO | None


@topology.command(cls=WithStrategy)
@click.argument("strategy")
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@click.option("--hosts", metavar="H|HxR", help="Hosts that share them evenly; or hosts and ranks on each, without -n.")
@click.option("--root-pair", type=click.IntRange(min=0), metavar="K", help="Draw graph pair K; the first by default.")
@click.option(
    "--nbytes", callback=as_size, metavar="SIZE", help="Draw what auto takes for messages of this size: 64KiB."
)
@click.option(
    "--probe",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="For the hosts of a probe, from kfcomm probe --json; in the place of -n and --hosts.",
)
@click.option(
    "-o",
    "--output",
    type=click.File("w", encoding="utf-8", lazy=True),
    callback=of_kind(".svg"),
    help="Write an SVG picture here.",
)
def show(strategy: str, **options: Any) -> None:
    """Draw the graphs of STRATEGY as text, or as a picture with -o.

    STRATEGY is a name of kfcomm topology list, or rules by size: "<=64KiB: star, else: ring". For auto, a table says
    what it takes for which size, what limits it there, and what the next best strategy would take.

    \b
      kfcomm topology show ring -n 8 --hosts 2
      kfcomm topology show ring --hosts 2x4
      kfcomm topology show tree -n 16 --hosts 4 -o tree.svg
      kfcomm topology show auto --probe links.json
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.strategies import STATIC
    from kfcomm.strategies.auto import explained
    from kfcomm.strategies.draw import as_svg, as_text
    from kfcomm.strategies.plugins import build

    given = _Drawing(**options)
    with reported_errors():
        layout = _layout(given)
        built = build(strategy, layout)
        if given.output is not None:
            # a picture shows one strategy: of auto's, unless asked, that for long messages
            chosen = built.select(1 << 30 if given.nbytes is None else given.nbytes)
            # first the picture: the file is made when ``write`` is looked up
            picture = as_svg(chosen, layout, given.root_pair or 0)
            given.output.write(picture)
        else:
            if strategy in ("auto", STATIC) and given.nbytes is None:
                click.echo("\n".join(explained(layout)) + "\n")
            drawn = built if given.nbytes is None else built.select(given.nbytes)
            click.echo(as_text(drawn, layout, given.root_pair), nl=False)


def _layout(given: _Drawing) -> Layout:
    """Layout with the costs that were kept on this host, or of a probe's file.

    Raises:
        ConfigError: options contradict each other, or the file holds no probe or cannot be read.
    """
    from kfcomm.rendezvous.saved_costs import saved_costs
    from kfcomm.types import Layout

    if given.probe is None:
        return replace(Layout.even(*_ranks_and_hosts(given.num_ranks, given.hosts)), costs=saved_costs())
    from kfcomm.probe import Probe

    if given.num_ranks is not None or given.hosts is not None:
        raise ConfigError("--probe says how many ranks and hosts there are: leave -n and --hosts out")
    try:
        return Probe.load(given.probe).measured_layout()
    except OSError as error:
        raise ConfigError(f"cannot read {given.probe}: {error.strerror}") from error


def _ranks_and_hosts(num_ranks: int | None, hosts: str | None) -> tuple[int, int]:
    """Parse the numbers of ranks and hosts: ``-n 8 --hosts 2``, or ``--hosts 2x4``.

    Raises:
        ConfigError: the options are missing or contradict each other.
    """
    from kfcomm.cli.commands.simulate import parse_worlds

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
