"""Command line: one group, whose commands are thin adapters over the packages that do the work.

A command is a module of `commands`, imported when it is used: `run` starts ranks before most of the package is loaded.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from kfcomm import __version__
from kfcomm.cli import commands
from kfcomm.cli.options import ELSEWHERE, Commands
from kfcomm.types import override


class _Commands(Commands):
    """Group that imports a command when it is used, as in click's documentation ("Lazily Loading Subcommands")."""

    others = ELSEWHERE

    @override
    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(module.name for module in pkgutil.iter_modules(commands.__path__))

    @override
    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; errors of usage have the style of all others, one line."""
        if extra.get("standalone_mode") is False:
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            click.echo(f"kfcomm: error: {_in_one_line(error)}", err=True)
            code = error.exit_code
        sys.exit(code if isinstance(code, int) else 0)

    @override
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:  # click would end with 1
            sys.exit(130)

    @override
    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command = getattr(import_module(f"{commands.__name__}.{name}"), name)
        assert isinstance(command, click.Command)  # noqa: S101 - each module has one of its own name
        return command


def _in_one_line(error: click.ClickException) -> str:
    said = " ".join(error.format_message().split()).removeprefix("Invalid value for ").removeprefix("Invalid value: ")
    context = getattr(error, "ctx", None)
    see = "" if context is None else f" (see {context.command_path} --help)"
    # A word in capitals, such as SIZE, is a name.
    return (said[0].lower() if said[:2].istitle() else said[:1]) + said[1:].rstrip(".") + see


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kfcomm")
def main() -> None:
    """Collective communication along graphs you choose."""
