"""Programs in virtual time, while ranks are killed, stopped, cut off and slow, come and go, and the store is lost.

python -m tests.search.virtual --seconds 60 --seed 1

A seed is one run of one of the programs of `CASES`. One that fails ends the search, with the events that it takes, and
``--worlds 1 --seed N`` repeats it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import click

from kfcomm.testing import VirtualRun, run_in_virtual_time, search_in_virtual_time
from tests.search.virtual_cases import CASES, Case

TIMEOUT_S = 30.0
"""Of each call: nothing takes so long that ends otherwise."""
WITHIN_S = 600.0


def case_of(seed: int, kind: str | None = None) -> Case:
    """The program of a seed."""
    random = Random(seed)
    return random.choice([one for one in CASES if kind in (None, one.__name__)])(random)


def search(seed: int, kind: str | None = None) -> None:
    """One seed; ``kind``: of the program.

    Raises:
        AssertionError: with the line that runs it again.
    """
    case = case_of(seed, kind)
    search_in_virtual_time(
        case.main, case.size, case.check, seeds=[seed], plan=lambda random, _: case.events(random), **_options(case)
    )


def run(seed: int) -> VirtualRun:
    """The run of a seed, not checked."""
    case = case_of(seed)
    return run_in_virtual_time(case.main, case.size, seed=seed, events=case.events(Random(seed)), **_options(case))


def _options(case: Case) -> dict[str, Any]:
    return {"timeout": TIMEOUT_S, "within_s": WITHIN_S, "monitor": False, "strategy": case.strategy}


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for so many seconds, or through so many worlds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.virtual")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--worlds", type=int, default=None, help="so many, however long it takes")
    parser.add_argument("--case", choices=sorted({one.__name__ for one in CASES}), help="programs of this kind alone")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else Random().randrange(1 << 31)
    count, until_s = 0, time.monotonic() + given.seconds
    while count < given.worlds if given.worlds is not None else time.monotonic() < until_s:
        try:
            search(seed + count, given.case)
        except AssertionError:
            click.echo(f"seed {seed + count} fails")
            raise
        count += 1
    click.echo(f"{count} worlds from seed {seed} on")
    return 0


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    gc.freeze()  # what is loaded stays
    raise SystemExit(main())
