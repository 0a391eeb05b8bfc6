"""`kfcomm bench topologies`: every strategy at every size, among real ranks or in the simulator."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kfcomm.bench.report import Files
from kfcomm.bench.suite import Suite
from kfcomm.bench.topologies import MeasuredTopologies, SimulatedTopologies, distinct
from kfcomm.cli import options
from kfcomm.cli.commands.simulate import names_of, network_of, parse_worlds, simulated, tell
from kfcomm.cli.errors import reported_errors
from kfcomm.cli.spelling import Choice, WithSizes
from kfcomm.common.sizes import parse_sizes
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.settings import detect
from kfcomm.strategies import names
from kfcomm.strategies.registry import ALGORITHMS
from kfcomm.transports.registry import LINKS
from kfcomm.types import Layout, Verb

_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_MOST_RANKS_WITH_PAIR_EACH = 256
_OF_REAL_RANKS = {
    "num_ranks": "-n",
    "transport": "--transport",
    "iterations": "--iterations",
    "warmup": "--warmup",
    "blocking": "--blocking",
    "op": "--op",
}


@click.command(cls=WithSizes)
@click.option(
    "-n",
    "--num-ranks",
    type=click.IntRange(min=2),
    metavar="N",
    help="Ranks to start here; one per core, 2 to 8, by default.",
)
@click.option(
    "--sizes",
    default=_SIZES,
    metavar="SIZES",
    help="Message sizes: a list, with ranges that double: 4B,1KiB:1MiB; 1KiB to 64MiB by default.",
)
@click.option(
    "--strategy", "strategies", multiple=True, metavar="NAMES", help="Strategies, with commas; all by default. *"
)
@click.option(
    "--transport",
    type=Choice(LINKS),
    metavar="NAME",
    help="Kind of links between the ranks; auto by default.",
)
@click.option("--dtype", default="float32", show_default=True, metavar="NAME", help="Element type.")
@click.option(
    "--op",
    callback=options.checked_op,
    default="sum",
    show_default=True,
    metavar="OP",
    help="How values are combined.",
)
@options.iterations
@options.warmup
@options.blocking
@click.option("--simulate", "world", metavar="HxR", help="Simulate so many hosts with so many ranks on each, as 8x4.")
@click.option(
    "--network",
    "network_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Simulate this network; see kfcomm simulate.",
)
@options.json_file("settings, every time, winners and advice")
@options.page_file("a heat map")
@click.pass_context
def topologies(context: click.Context, /, **given: Any) -> None:
    """Find the fastest strategy for each size of message.

    Every strategy reduces messages of every size, and every result is checked. What comes out is a table with the
    winners, and what to set. Ranks are started here; inside a job those of the job are used. With --simulate or
    --network no rank is started. Options with * can be given again.

    \b
      kfcomm bench topologies -n 8 --html winners.html
      kfcomm run -H 10.0.0.1:4,10.0.0.2:4 kfcomm bench topologies       (on both hosts)
      kfcomm bench topologies --simulate 16x8 --sizes 64KiB:64MiB
    """  # noqa: D301  click wants the character, not its name
    with reported_errors():
        files = Files(given["json_path"], given["html_path"])
        if given["world"] is None and given["network_path"] is None:
            sys.exit(_measure(files, given))
        for name, option in _OF_REAL_RANKS.items():
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise ConfigError(f"{option} is about real ranks, and none are started to simulate: leave it out")
        _simulate(files, given)


def _measure(files: Files, given: dict[str, Any]) -> int:
    from kfcomm.cli.ranks import default_ranks, measure

    settings = detect(os.environ)
    asked = names_of(given["strategies"]) or _all()
    twins: dict[str, tuple[str, ...]] = dict.fromkeys(asked, ())
    num_ranks = given["num_ranks"]
    if settings.size == 1:
        num_ranks = num_ranks or default_ranks()
        twins = distinct(asked, Layout.even(num_ranks))
    suite = Suite(
        collectives=(Verb.ALL_REDUCE,),
        sizes=parse_sizes(given["sizes"]),
        strategies=tuple(twins),
        transports=(given["transport"] or settings.links,),
        dtypes=(given["dtype"],),
        op=given["op"],
        iterations=given["iterations"],
        warmup=given["warmup"],
        blocking=given["blocking"],
    )
    return measure(suite, settings, num_ranks, files, MeasuredTopologies(suite, twins=twins))


def _simulate(files: Files, given: dict[str, Any]) -> None:
    files.check()
    network, source = network_of(given["network_path"])
    worlds = parse_worlds(given["world"])
    if len(worlds) > 1:
        raise ConfigError(f"--simulate {given['world']!r}: give one world; kfcomm simulate compares several")
    layout = network.of_hosts(*worlds[0]).layout
    asked = names_of(given["strategies"])
    left_out: tuple[str, ...] = ()
    if not asked:
        has_many = layout.size > _MOST_RANKS_WITH_PAIR_EACH
        left_out = tuple(each.name for each in ALGORITHMS if has_many and each.pair_per_rank)
        asked = tuple(name for name in _all() if name not in left_out)
    twins = distinct(asked, layout)
    found = SimulatedTopologies(network, source, given["dtype"], twins=twins, left_out=left_out)
    for result in simulated(tuple(twins), worlds, parse_sizes(given["sizes"]), network, given["dtype"], tell):
        found.results.append(result)
    click.echo(found.as_text(), nl=False)
    files.write(found)


def _all() -> tuple[str, ...]:
    """All strategies except ``auto``."""
    return tuple(name for name in names() if name != "auto")
