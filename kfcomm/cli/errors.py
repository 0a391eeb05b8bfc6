"""Error reporting of commands: one line, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from kfcomm.errors import ConfigError, KfcommError


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn the package's errors into one line and an exit code: 2 for wrong settings, else 1 or the error's own."""
    try:
        yield
    except KfcommError as error:
        click.echo(f"kfcomm: error: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 2 if isinstance(error, ConfigError) else 1))
