"""`kfcomm bench`: measures collectives, among new ranks or those of a running job.

In a running job every rank runs this command, and takes part. `kfcomm bench topologies` measures, or simulates, every
strategy at every size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kfcomm.bench.report import Files
from kfcomm.bench.suite import COLLECTIVES, BenchPlace, CallMode, Suite
from kfcomm.bench.topologies import MeasuredTopologies, SimulatedTopologies, distinct
from kfcomm.bench.workloads import WORKLOADS
from kfcomm.cli import options
from kfcomm.cli.commands.simulate import SimulatedCall, names_of, network_of, parse_worlds, simulated
from kfcomm.cli.options import NameChoice, WithSizes, reported_errors
from kfcomm.common.arguments import meant
from kfcomm.common.sizes import parse_sizes
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.settings import Settings, detect
from kfcomm.strategies import names
from kfcomm.strategies.builtin import ALGORITHMS
from kfcomm.transports.registry import LINKS, TRANSPORT_NAMES
from kfcomm.types import Layout, Op, Verb, override

_GRID_SIZES = "1KiB,4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_MOST_RANKS_WITH_PAIR_EACH = 256
_OF_REAL_RANKS = {
    "num_ranks": "-n",
    "transport": "--transport",
    "iterations": "--iterations",
    "warmup": "--warmup",
    "blocking": "--blocking",
    "op": "--op",
}


@dataclass(frozen=True, slots=True)
class _Grid:
    num_ranks: int | None
    sizes: str
    strategies: tuple[str, ...]
    transport: str | None
    dtype: str
    op: Op
    iterations: int | None
    warmup: int
    blocking: bool
    world: str | None
    network_path: Path | None
    json_path: Path | None
    html_path: Path | None


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
    default=_GRID_SIZES,
    metavar="SIZES",
    help="Message sizes: a list, with ranges that double: 4B,1KiB:1MiB; 1KiB to 64MiB by default.",
)
@click.option(
    "--strategy", "strategies", multiple=True, metavar="NAMES", help="Strategies, with commas; all by default. *"
)
@click.option(
    "--transport",
    type=NameChoice(LINKS),
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
def topologies(context: click.Context, /, **options: Any) -> None:
    """Find the fastest strategy for each size of message.

    Every strategy reduces messages of every size, and every result is checked. What comes out is a table with the
    winners, and what to set. Ranks are started here; inside a job those of the job are used. With --simulate or
    --network no rank is started. Options with * can be given again.

    \b
      kfcomm bench topologies -n 8 --html winners.html
      kfcomm run -H 10.0.0.1:4,10.0.0.2:4 kfcomm bench topologies       (on both hosts)
      kfcomm bench topologies --simulate 16x8 --sizes 64KiB:64MiB
    """  # noqa: D301  click wants the character, not its name
    given = _Grid(**options)
    with reported_errors():
        files = Files(given.json_path, given.html_path)
        if given.world is None and given.network_path is None:
            sys.exit(_measure(files, given))
        for name, option in _OF_REAL_RANKS.items():
            # Asked of click, since most of these options have defaults.
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise ConfigError(f"{option} is about real ranks, and none are started to simulate: leave it out")
        _simulate(files, given)


def _measure(files: Files, given: _Grid) -> int:
    from kfcomm.cli.ranks import default_ranks, measure

    settings = detect(os.environ)
    asked = names_of(given.strategies) or _all()
    twins: dict[str, tuple[str, ...]] = dict.fromkeys(asked, ())
    num_ranks = given.num_ranks
    # In a running job the layout is known only after the ranks have met: there all strategies are measured.
    if settings.size == 1:
        num_ranks = num_ranks or default_ranks()
        twins = distinct(asked, Layout.even(num_ranks))
    suite = Suite(
        collectives=(Verb.ALL_REDUCE,),
        sizes=parse_sizes(given.sizes),
        strategies=tuple(twins),
        transports=(given.transport or settings.links,),
        dtypes=(given.dtype,),
        op=given.op,
        iterations=given.iterations,
        warmup=given.warmup,
        blocking=given.blocking,
    )
    return measure(suite, settings, num_ranks, files, MeasuredTopologies(suite, twins=twins))


def _simulate(files: Files, given: _Grid) -> None:
    files.check()
    network, source = network_of(given.network_path)
    worlds = parse_worlds(given.world)
    if len(worlds) > 1:
        raise ConfigError(f"--simulate {given.world!r}: give one world; kfcomm simulate compares several")
    layout = network.of_hosts(*worlds[0]).layout
    asked = names_of(given.strategies)
    left_out: tuple[str, ...] = ()
    if not asked:
        # With a pair for each rank, the work and memory of a simulation grow with the square of the ranks.
        has_many = layout.size > _MOST_RANKS_WITH_PAIR_EACH
        left_out = tuple(each.name for each in ALGORITHMS if has_many and each.pair_per_rank)
        asked = tuple(name for name in _all() if name not in left_out)
    twins = distinct(asked, layout)
    found = SimulatedTopologies(network, source, given.dtype, twins=twins, left_out=left_out)
    found.results.extend(simulated(tuple(twins), worlds, parse_sizes(given.sizes), network, SimulatedCall(given.dtype)))
    click.echo(found.as_text(), nl=False)
    files.write(found)


def _all() -> tuple[str, ...]:
    """All strategies except ``auto``."""
    return tuple(name for name in names() if name != "auto")


_CHOICES = tuple(verb.replace("_", "-") for verb in COLLECTIVES)
_SIZES = "1KiB:64MiB"
_TOPOLOGIES = "topologies"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


class _Collective(NameChoice):
    """A verb, with ``-`` or ``_``."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        word = value.replace("_", "-") if isinstance(value, str) else value
        # A misspelt subcommand arrives here, as a collective.
        if word not in self.choices and meant(word, [*self.choices, _TOPOLOGIES])[:1] == [_TOPOLOGIES]:
            self.fail(f"unknown collective {value!r}; did you mean kfcomm bench {_TOPOLOGIES}?", param, ctx)
        return super().convert(word, param, ctx)


class _Bench(WithSizes):
    """Command with the subcommand ``topologies``, which has other options."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        # Not a group, which would take every word for a subcommand: those of this command are collectives.
        if args and args[0] == _TOPOLOGIES:
            return topologies.make_context(f"{info_name} {_TOPOLOGIES}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Bench)
@click.argument("collectives", nargs=-1, metavar="[COLLECTIVE]...", type=_Collective(_CHOICES))
@click.option(
    "-n",
    "--num-ranks",
    type=click.IntRange(min=2),
    metavar="N",
    help="Ranks to start here; one per core (or GPU, with --device gpu), 2 to 8, by default.",
)
@click.option(
    "--sizes",
    default=_SIZES,
    show_default=True,
    metavar="SIZES",
    help="Message sizes: a list, with ranges that double: 4B,1KiB:1MiB.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=NameChoice(tuple(WORKLOADS)),
    metavar="MODEL",
    help=f"Reduce the gradients of {_listed(WORKLOADS)}. *",
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=NameChoice(tuple(map(str, CallMode))),
    metavar="MODE",
    help=f"How a workload's tensors go: {_listed(CallMode)}; all by default. *",
)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAMES",
    help="Strategies, with commas between them: ring,tree; auto by default. *",
)
@click.option(
    "--transport",
    "transports",
    multiple=True,
    type=NameChoice(TRANSPORT_NAMES),
    metavar="NAME",
    help=f"Kind of links: {_listed(LINKS)}; auto by default; nccl with --device gpu. *",
)
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="NAME", help="Element type, for example bfloat16; float32 by default. *"
)
@click.option(
    "--device",
    type=NameChoice(tuple(map(str, BenchPlace))),
    default=str(BenchPlace.CPU),
    show_default=True,
    metavar="NAME",
    help=f"Where the arrays are: {_listed(BenchPlace)}.",
)
@click.option(
    "--op",
    callback=options.checked_op,
    default="sum",
    show_default=True,
    metavar="OP",
    help=f"How values are combined: {_listed(Op)}.",
)
@options.iterations
@options.warmup
@options.blocking
@options.json_file("machine, settings and every time")
@options.page_file("plots")
def bench(collectives: tuple[str, ...], **given: Any) -> None:
    """Measure collectives on these machines, and check every result.

    COLLECTIVE is all-reduce (by default), reduce, broadcast, gather, scatter, all-gather, all-to-all or
    reduce-scatter. Options with * can be given again: every combination is measured. Ranks are started here; inside a
    job (kfcomm run, torchrun, SLURM, MPI) those of the job are used.

    \b
      kfcomm bench -n 4
      kfcomm bench all-reduce -n 4 --strategy ring --strategy clique --html report.html
      kfcomm bench -n 4 --workload resnet50 --mode fused --transport tcp
      kfcomm bench all-reduce --device gpu
      kfcomm run -H 10.0.0.1:4,10.0.0.2:4 kfcomm bench all-gather       (on both hosts)

    The exit code is 1 if a result is wrong, 2 if the options cannot work. Which strategy is fastest at which size is
    found by kfcomm bench topologies, which has options of its own (--help).
    """  # noqa: D301  click wants the character, not its name
    from kfcomm.cli.ranks import measure

    with reported_errors():
        settings = detect(os.environ)
        suite = _suite(collectives, settings, given)
        sys.exit(measure(suite, settings, given["num_ranks"], Files(given["json_path"], given["html_path"])))


def _suite(collectives: tuple[str, ...], settings: Settings, given: dict[str, Any]) -> Suite:
    """Suite for the options; defaults are the settings of this process."""
    if given["modes"] and not given["workloads"]:
        raise ConfigError("--mode is about the tensors of a workload: name one with --workload")
    place = BenchPlace(given["device"])
    verbs = collectives or (() if given["workloads"] else (_CHOICES[0],))
    return Suite(
        collectives=tuple(Verb(name.replace("-", "_")) for name in _once(verbs)),
        sizes=parse_sizes(given["sizes"]),
        workloads=_once(given["workloads"]),
        modes=tuple(map(CallMode, _once(given["modes"]))) or tuple(CallMode),
        strategies=names_of(given["strategies"]) or (settings.strategy,),
        transports=_once(given["transports"]) or (settings.transport if place is BenchPlace.GPU else settings.links,),
        dtypes=_once(given["dtypes"]) or ("float32",),
        op=given["op"],
        iterations=given["iterations"],
        warmup=given["warmup"],
        blocking=given["blocking"],
        device=place,
    )


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
