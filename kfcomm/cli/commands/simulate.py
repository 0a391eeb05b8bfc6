"""`kfcomm simulate`: strategies on a simulated network.

The public functions also serve ``kfcomm bench topologies --simulate``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kfcomm.bench.report import Files
from kfcomm.bench.steps import SimulatedSteps
from kfcomm.bench.topologies import Simulations
from kfcomm.cli import options
from kfcomm.cli.options import WithSizes, reported_errors
from kfcomm.common.sizes import parse_sizes, show_size
from kfcomm.errors import ConfigError
from kfcomm.simulate import Result, SimulatedNetwork, StepResult, late, simulate_step
from kfcomm.simulate import simulate as simulate_one
from kfcomm.simulate.fields import parse_time_s
from kfcomm.simulate.workload import load_workload
from kfcomm.strategies import AnyStrategy, names
from kfcomm.strategies.plugins import build
from kfcomm.strategies.tree_packing import packed_by
from kfcomm.types import Layout

_HOSTS = re.compile(r"\s*(\d{1,6})\s*(?:[xX×]\s*(\d{1,6}))?\s*")
_HOSTS_HELP = "write HOSTSxRANKS, as in 8x1 or 512x8"

_QUIET_S = 2.0
"""Between lines on the progress of a simulation."""
PACKED = "packed_trees"

World = tuple[int | None, int | None]
"""Number of hosts and of ranks on each; None for what the network says."""


@dataclass(frozen=True, slots=True)
class _SimulateOptions:
    strategies: tuple[str, ...]
    hosts: str | None
    sizes: str
    network_path: Path | None
    probe_path: Path | None
    dtype: str
    verb: str
    late: str
    seed: int
    json_path: Path | None
    html_path: Path | None
    workload: str | None


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """Collective to simulate on every world, with every strategy."""

    dtype: str
    verb: str = "all_reduce"
    late_s: float = 0.0  # by how much ranks are late in the mean
    seed: int = 0


@click.command(cls=WithSizes)
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    required=True,
    metavar="NAMES",
    help="Strategies, with commas between them: ring,packed_trees. *",
)
@click.option(
    "--hosts",
    metavar="HxR,...",
    help="Hosts and ranks on each, for example 512x8 or 8x1,16x1,32x1; those of the network by default.",
)
@click.option(
    "--sizes",
    default="100MiB",
    show_default=True,
    metavar="SIZES",
    help="Message sizes: a list, with ranges that double: 4B,1KiB:1MiB.",
)
@click.option(
    "--network",
    "network_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Hosts, links and switches; 10 Gbit/s Ethernet by default.",
)
@click.option(
    "--probe",
    "probe_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="In its place, the network that kfcomm probe --json measured.",
)
@click.option("--dtype", default="float32", show_default=True, metavar="NAME", help="Element type.")
@click.option("--verb", default="all_reduce", show_default=True, metavar="NAME", help="Another collective.")
@click.option(
    "--late",
    default="0 s",
    show_default=True,
    metavar="TIME",
    help="Ranks post late: exponentially, by this much in the mean.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of --late.")
@click.option(
    "--workload",
    metavar="TEXT|FILE",
    help="A step in place of one collective: 'compute 5ms, 4MiB, compute 3ms, 16MiB'.",
)
@options.json_file("network and results")
@options.page_file("plots")
def simulate(**options: Any) -> None:
    """Simulate all_reduce, or another verb, on a network, in virtual time.

    The machines and graphs are those of real ranks; links and processors are simulated. Every combination of strategy,
    hosts and size is run. Options with * can be given again.

    \b
      kfcomm simulate --strategy ring,tree --hosts 64x8 --sizes 100MiB
      kfcomm simulate --strategy ring,star --hosts 8x1,16x1,32x1 --sizes 1KiB:64MiB --html times.html
      kfcomm simulate --strategy ring --network cluster.toml
      kfcomm simulate --strategy auto,packed_trees --probe probe.json
      kfcomm simulate --strategy ring --hosts 16x1 --workload 'compute 5ms, 4MiB, compute 3ms, 16MiB'
    """  # noqa: D301  click wants the character, not its name
    given = _SimulateOptions(**options)
    with reported_errors():
        files = Files(given.json_path, given.html_path)
        files.check()
        report = _simulated_steps(given) if given.workload is not None else _simulated_calls(given)
        click.echo(report.as_text(), nl=False)
        files.write(report)


def _simulated_calls(given: _SimulateOptions) -> Simulations:
    network, source = network_of(given.network_path, given.probe_path)
    report = Simulations(network, source, given.dtype, given.verb)
    case = SimulatedCall(given.dtype, given.verb, _late_s(given.late), given.seed)
    strategies, worlds, sizes = names_of(given.strategies), parse_worlds(given.hosts), parse_sizes(given.sizes)
    report.results.extend(simulated(strategies, worlds, sizes, network, case))
    return report


def _simulated_steps(given: _SimulateOptions) -> SimulatedSteps:
    source_of = click.get_current_context().get_parameter_source
    for option in ("sizes", "verb", "dtype"):
        if source_of(option) is not ParameterSource.DEFAULT:
            raise ConfigError(f"--workload and --{option} contradict each other: a workload says what is called")
    workload = load_workload(given.workload or "")
    network, source = network_of(given.network_path, given.probe_path)
    report = SimulatedSteps(network, source, given.workload or "")
    late_s = _late_s(given.late)
    for world in parse_worlds(given.hosts):
        on = network.of_hosts(*world)
        layout = on.layout
        for strategy in names_of(given.strategies):
            what = f"{strategy}, {layout.size} ranks on {layout.num_hosts} hosts"
            watch = _Watch(what)
            step = simulate_step(
                workload, layout, on, strategy=built(strategy, layout),
                starts_s=late(layout.size, late_s, given.seed), progress=watch.look,
            )  # fmt: skip
            _tell(f"{what}: {step.seconds * 1e3:.4g} ms ({watch.summary(step)})")
            report.results.append((strategy, step))
    return report


def network_of(path: Path | None, probe: Path | None = None) -> tuple[SimulatedNetwork, str]:
    """Network of a file or a probe, or the default, and its title.

    Raises:
        ConfigError: both are given, or one cannot be read or is malformed.
    """
    if probe is not None:
        if path is not None:
            raise ConfigError("--network and --probe contradict each other: give one of them")
        from kfcomm.probe.record import Probe

        try:
            return SimulatedNetwork.of_probe(Probe.load(probe)), str(probe)
        except OSError as error:
            raise ConfigError(f"--probe {str(probe)!r} cannot be read: {error}") from error
    if path is None:
        return SimulatedNetwork(), "10 Gbit/s Ethernet, shared memory inside of hosts"
    return SimulatedNetwork.load(path), str(path)


def _late_s(text: str) -> float:
    try:
        return parse_time_s(text)
    except ValueError as error:
        raise ConfigError(f"--late: {error}") from error


def names_of(strategies: Sequence[str]) -> tuple[str, ...]:
    """Names, separated by commas or in several options; rules by size contain commas themselves.

    Raises:
        ConfigError: they are separated by colons.
    """
    for given in strategies:
        if ":" in given and not any(word in given for word in ("<=", "else", "between")):
            raise ConfigError(f"--strategy {given!r}: strategies have commas between them: {given.replace(':', ',')}")
    found = (name.strip() for given in strategies for name in ([given] if ":" in given else given.split(",")))
    return tuple(dict.fromkeys(found))


def parse_worlds(text: str | None) -> tuple[World, ...]:
    """Parse worlds such as ``8x1,16x1``; None means that of the network.

    Raises:
        ConfigError: a world is malformed.
    """
    if text is None:
        return ((None, None),)
    return tuple(dict.fromkeys(_world(word, text) for word in text.split(",")))


def _world(word: str, text: str) -> World:
    match = _HOSTS.fullmatch(word)
    if match is None:
        raise ConfigError(f"hosts {text!r}: expected a number of hosts and ranks, got {word.strip()!r}; {_HOSTS_HELP}")
    hosts, ranks = int(match[1]), int(match[2]) if match[2] else None
    if not hosts or ranks == 0:
        raise ConfigError(f"hosts {text!r}: {word.strip()!r} has no ranks; {_HOSTS_HELP}")
    return hosts, ranks


def simulated(
    strategies: Sequence[str],
    worlds: Sequence[World],
    sizes: Sequence[int],
    network: SimulatedNetwork,
    case: SimulatedCall,
) -> Iterator[Result]:
    """Simulate every combination, with a message on each.

    Raises:
        ConfigError: a strategy is unknown, a world does not fit the network, or a message has no element.
    """
    # All worlds are checked before the first is simulated.
    sized = [network.of_hosts(*world) for world in worlds]
    for each in sized:
        layout = each.layout
        for strategy in strategies:
            graphs = built(strategy, layout)
            for nbytes in sizes:
                what = f"{strategy}, {layout.size} ranks on {layout.num_hosts} hosts, {show_size(nbytes)}"
                watch = _Watch(what)
                result = simulate_one(
                    graphs, layout, nbytes, each, dtype=case.dtype, verb=case.verb,
                    starts_s=late(layout.size, case.late_s, case.seed), progress=watch.look,
                )  # fmt: skip
                _tell(f"{what}: {result.seconds * 1e3:.4g} ms ({watch.summary(result)})")
                yield result


def built(strategy: str, layout: Layout) -> str | AnyStrategy:
    """The strategy of a name, or the name, if it is built in: of these the simulator need not build all graphs.

    Raises:
        ConfigError: it is unknown, or packed trees are wanted for hosts that are all alike.
    """
    if strategy == PACKED:
        if layout.costs.rates is None:
            raise ConfigError(f"--strategy {PACKED}: all hosts are alike; it takes rates, of --probe or --network")
        return packed_by(layout, layout.costs.rates)
    return strategy if strategy in names() and strategy != "auto" else build(strategy, layout)


class _Watch:
    """Time of one simulation, told to who waits."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began_s = self._told_s = time.perf_counter()

    def look(self, done: float) -> None:
        """Tell how much is done and what is left, at times."""
        now_s = time.perf_counter()
        if now_s - self._told_s >= _QUIET_S and done:
            self._told_s = now_s
            left_s = (now_s - self._began_s) * (1 - done) / done
            _tell(f"{self._what}: {done:.0%} simulated, about {left_s:.0f} s left")

    def summary(self, result: Result | StepResult) -> str:
        """How it was simulated."""
        ranks = "" if result.simulated_ranks == result.size else f", {result.simulated_ranks} ranks for all"
        nearly = "" if result.is_exact else ", which are nearly alike"
        return f"simulated in {time.perf_counter() - self._began_s:.1f} s{ranks}{nearly}"


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
