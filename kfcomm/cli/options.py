"""Options of several commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kfcomm.common.sizes import parse_size
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.settings import check_device
from kfcomm.types import Op

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
