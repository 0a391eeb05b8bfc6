"""Command line of a search: cases of consecutive seeds, until the time is over or one fails."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import click


def run(module: str, case: Callable[[int], Mapping[str, int]], arguments: Sequence[str] | None = None) -> int:
    """Run cases and print the sums of what they return.

    Args:
        module: of ``tests.search``.
        case: run one by its seed; it returns counts of what befell it, and raises if something is wrong.
        arguments: of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tests.search.{module}")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--count", type=int, help="cases, however long they take")
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    number, total, until_s = 0, Counter[str](), time.monotonic() + given.seconds
    while number < given.count if given.count is not None else time.monotonic() < until_s:
        try:
            total.update(case(given.seed + number))
        except BaseException:
            click.echo(f"seed {given.seed + number} fails")
            raise
        number += 1
    found = ", ".join(f"{count} {what}" for what, count in sorted(total.items()))
    click.echo(f"{number} cases from seed {given.seed} on: {found}")
    return 0
