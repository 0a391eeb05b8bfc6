"""The command: ``python -m bench.netlab run``, and ``clean``."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click

from bench.netlab.files import specs_of
from bench.netlab.hosts import HostSpec, even, index_of, with_rate
from bench.netlab.lab import MTU, Netlab
from bench.netlab.namespaces import clean
from bench.netlab.rates import parse_rate, show_rate
from bench.netlab.tools import NetlabUnavailable
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.simulate.network import SimulatedNetwork

UNAVAILABLE = 77
"""Exit code where no bed can be made: what automake's and meson's tests take for skipped."""


class Change(NamedTuple):
    """A link that gets another rate, so many seconds after the start."""

    after_s: float
    host: str
    rate: float | None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Hosts on this machine, with links of chosen rates."""


def bed_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which hosts there are."""
    options = (
        click.option("--hosts", type=int, metavar="N", help="Number of hosts, h0 to hN-1; 8 without a file."),
        click.option("--rate", metavar="RATE", help="Of each link, for example 200mbit; no limit by default."),
        click.option("--slow", "slow", multiple=True, metavar="HOST:RATE", help="One with another rate: h7:50mbit."),
        click.option("--ranks", type=int, metavar="N", help="Ranks on each host; 1 by default."),
        click.option("--network", type=click.Path(path_type=Path), metavar="FILE", help="Hosts and rates as TOML."),
        click.option("--mtu", type=int, default=MTU, show_default=True, metavar="BYTES", help="Of all links."),
    )
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


@main.command(context_settings={"allow_interspersed_args": False})
@bed_options
@click.option("--change", "changes", multiple=True, metavar="S:HOST:RATE", help="Another rate after S seconds.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(command: tuple[str, ...], changes: tuple[str, ...], mtu: int, **bed: Any) -> None:
    """Run COMMAND on all hosts, with `kfcomm run` on each; its options may stand before COMMAND.

    The exit code is that of the first host that failed, or 77 where no bed can be made.

    \b
      python -m bench.netlab run --hosts 8 --rate 200mbit -- python train.py
      python -m bench.netlab run --hosts 8 --rate 200mbit --change 10:h3:50mbit -- --strategy ring python train.py
    """  # noqa: D301  click wants the character, not its name
    with reported():
        specs = specs_from(**bed)
        timeline = sorted((_change(text, specs) for text in changes), key=lambda change: change.after_s)
        with Netlab(specs, mtu=mtu) as lab:
            _say(f"{len(specs)} hosts, {', '.join(dict.fromkeys(show_rate(spec.rate) for spec in specs))}")
            sys.exit(_run(lab, command, timeline))


@main.command(name="clean")
def clean_up() -> None:
    """Take away what runs that were killed have left; those that live are not touched."""
    with reported():
        for name in clean():
            _say(f"taken away: {name}")


def specs_from(
    hosts: int | None, rate: str | None, slow: Sequence[str], ranks: int | None, network: Path | None
) -> tuple[HostSpec, ...]:
    """The hosts that the options ask for.

    Raises:
        ConfigError: an option cannot work, or contradicts another, or the file is malformed.
    """
    if network is None:
        specs = even(
            8 if hosts is None else hosts, None if rate is None else parse_rate(rate), 1 if ranks is None else ranks
        )
    elif rate is not None:
        raise ConfigError("--rate and --network contradict each other; --slow changes single hosts of a file")
    else:
        found = SimulatedNetwork.load(network)
        specs = specs_of(found.of_hosts(hosts, ranks) if hosts is not None or ranks is not None else found)
    for each in slow:
        name, colon, text = each.partition(":")
        if not colon:
            raise ConfigError(f"--slow {each!r}: must look like h7:50mbit")
        specs = with_rate(specs, _named(name, specs), parse_rate(text))
    return specs


def _run(lab: Netlab, command: Sequence[str], timeline: Sequence[Change]) -> int:
    start_s = time.monotonic()
    with lab.start(command, collect=False) as program:
        for change in timeline:
            if program.wait_for(start_s + change.after_s - time.monotonic()):
                break
            lab.set_rate(change.host, change.rate)
            _say(f"{change.host}: {show_rate(change.rate)} after {change.after_s:g} s")
        return program.wait().exit_code


def _change(text: str, specs: Sequence[HostSpec]) -> Change:
    parts = text.split(":")
    try:
        after_s, name, rate = float(parts[0]), parts[1], parts[2]
    except (ValueError, IndexError):
        raise ConfigError(f"--change {text!r}: must look like 10:h3:50mbit, seconds first") from None
    if len(parts) != 3 or not 0 <= after_s < float("inf"):
        raise ConfigError(f"--change {text!r}: must look like 10:h3:50mbit, seconds first")
    return Change(after_s, _named(name, specs), parse_rate(rate))


def _named(name: str, specs: Sequence[HostSpec]) -> str:
    """The name of a host, which may be given by its number."""
    names = [spec.name for spec in specs]
    if name.isdecimal() and name not in names and int(name) < len(names):
        return names[int(name)]
    return names[index_of(name, names)]


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors as one line, with the exit code that fits."""
    try:
        yield
    except NetlabUnavailable as error:
        _fail(str(error), UNAVAILABLE)
    except ConfigError as error:
        _fail(str(error), 2)
    except KfcommError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(text: str, exit_code: int) -> NoReturn:
    _say(f"error: {text}")
    sys.exit(exit_code)


def _say(text: str) -> None:
    print(f"netlab: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m bench.netlab")
