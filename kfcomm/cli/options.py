"""Parts of several commands: options, suggestions for misspelt words, aliases, and error reporting."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from kfcomm.common.arguments import hint, meant
from kfcomm.common.sizes import parse_duration, parse_size
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.types import Op, override

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Command], Command]


def of_kind(*suffixes: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Callback that refuses a file with another suffix, before any work is done."""

    def check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        suffix = "" if value is None else Path(getattr(value, "name", value)).suffix.lower()
        if suffix and suffix not in suffixes:
            raise click.BadParameter(f"{suffix} cannot be written: the file is one of {' or '.join(suffixes)}")
        return value

    return check


def json_file(holds: str) -> Option[Any]:
    """``--json``: file for results in JSON."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path),
        callback=of_kind(".json"),
        metavar="FILE",
        help=f"Write {holds} here.",
    )


def page_file(holds: str) -> Option[Any]:
    """``--html``: file for a page with plots."""
    return click.option(
        "--html",
        "html_path",
        type=click.Path(path_type=Path),
        callback=of_kind(".html", ".htm"),
        metavar="FILE",
        help=f"Write a page with {holds} here; needs kfcomm[bench].",
    )


def _checked_device(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from kfcomm.rendezvous.settings import check_device

    try:
        return None if value is None else check_device(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def as_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Parse a size such as ``64KiB``."""
    try:
        return None if value is None else parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def as_duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Parse a duration such as ``1h30m``."""
    try:
        return None if value is None else parse_duration(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def checked_op(context: click.Context, parameter: click.Parameter, value: str) -> Op:
    """Parse an op, by any of its names."""
    from kfcomm.arrays.reduce.ops import op_of

    try:
        return op_of(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


device = click.option(
    "--device",
    metavar="NAME",
    callback=_checked_device,
    help="Device of each rank: auto, none, cuda, or cuda:N.",
)
iterations = click.option(
    "--iterations",
    type=click.IntRange(min=1),
    metavar="N",
    help="Timed runs of each case; 10 to 200 by its size, by default.",
)
warmup = click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True, metavar="N", help="Runs before those."
)
blocking = click.option("--blocking", is_flag=True, help="Measure kfcomm.sync, not the asynchronous interface.")


ELSEWHERE = {
    "strategies": "topology list",
    "topologies": "topology list, or bench topologies",
    "benchmark": "bench",
    "draw": "topology show",
    "launch": "run",
    "start": "run",
    "watch": "top",
    "info": "env",
    "scale": "resize",
    "dump": "doctor, for the dumps that kill -USR1 makes",
    "version": "--version",
}
"""Commands by other names that users may try."""


class Commands(click.Group):
    """Group that suggests the closest command."""

    others: ClassVar[Mapping[str, str]] = {}
    """Commands by other names."""

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            near = [self.others[name]] if name in self.others else meant(name, self.list_commands(ctx))
            said = f" Did you mean {' or '.join(f'{ctx.command_path} {one}' for one in near)}?" if near else ""
            ctx.fail(f"No such command {name!r}.{said}")
        return super().resolve_command(ctx, args)


class NameChoice(click.Choice[str]):
    """One of several words; suggests the closest one."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        # Before click's own check, whose message suggests nothing.
        if isinstance(value, str) and value not in self.choices:
            listed = ", ".join(map(repr, self.choices))
            self.fail(f"{value!r} is not one of {listed}{hint(value, self.choices)}", param, ctx)
        return super().convert(value, param, ctx)


class Aliased(click.Command):
    """Command that accepts the option names of other commands, and prints its own name for them."""

    aliases: ClassVar[Mapping[str, str]] = {}  # option of this command by its name elsewhere; empty for an argument

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # What follows it is not an option, whatever it looks like.
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [word for given in args[:end] for word in self._here(given)] + args[end:])

    def _here(self, given: str) -> Sequence[str]:
        option, equals, value = given.partition("=")
        here = self.aliases.get(option)
        if here is None:
            return [given]
        click.echo(f"kfcomm: {option} is {here or 'an argument, without an option,'} here", err=True)
        if here:
            return [f"{here}{equals}{value}"]
        return [value] if equals else []


class WithSizes(Aliased):
    """A command that takes a list of sizes."""

    aliases: ClassVar[Mapping[str, str]] = {"--size": "--sizes", "--nbytes": "--sizes"}


class WithSize(Aliased):
    """A command that takes one size."""

    aliases: ClassVar[Mapping[str, str]] = {"--size": "--nbytes", "--sizes": "--nbytes"}


class WithStrategy(WithSize):
    """A command whose argument is the strategy."""

    aliases: ClassVar[Mapping[str, str]] = {**WithSize.aliases, "--strategy": ""}


def warn(line: str) -> None:
    """Write a warning, unless it is empty."""
    if line:
        click.echo(f"kfcomm: warning: {line}", err=True)


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn the package's errors into one line and an exit code: 2 for wrong settings, else 1 or the error's own."""
    try:
        yield
    except KfcommError as error:
        click.echo(f"kfcomm: error: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 2 if isinstance(error, ConfigError) else 1))
