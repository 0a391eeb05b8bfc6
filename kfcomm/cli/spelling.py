"""Suggestions for misspelt commands, options and values, and aliases of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import click

from kfcomm.common.arguments import hint, meant
from kfcomm.types import override

ELSEWHERE = {
    "strategies": "topology list",
    "topologies": "topology list, or bench topologies",
    "benchmark": "bench",
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


class Choice(click.Choice[str]):
    """One of several words; suggests the closest one."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if isinstance(value, str) and value not in self.choices:
            listed = ", ".join(map(repr, self.choices))
            self.fail(f"{value!r} is not one of {listed}{hint(value, self.choices)}", param, ctx)
        return super().convert(value, param, ctx)


class Aliased(click.Command):
    """Command that accepts the option names of other commands, and prints its own name for them.

    Attributes:
        aliases: option of this command by its name elsewhere; empty for an argument.
    """

    aliases: ClassVar[Mapping[str, str]] = {}

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
