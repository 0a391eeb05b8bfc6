"""Command line: one group, whose commands are thin adapters over the packages that do the work.

A command is a module of `commands`, imported when it is used: `run` starts ranks before most of the package is loaded.
"""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from typing import Any

import click

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


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kfcomm")
def main() -> None:
    """Collective communication along graphs you choose."""
