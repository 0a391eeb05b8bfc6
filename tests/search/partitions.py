"""Hosts that do not reach each other any more: every rank gets `PeerLost` within its bound, and no wrong sum.

    python -m tests.search.partitions --seconds 60 --seed 1

Three hosts in network namespaces; some of their cables are pulled at any moment. It takes the right to make namespaces.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import click
import numpy as np

import kfcomm
from bench.netlab import Netlab, Program, even, why_unavailable
from kfcomm.errors import PeerLost

HOSTS = 3
LOST_AFTER_S = 2.0
BOUND_S = LOST_AFTER_S + 10.0
"""Upper limit of the bound, however busy the machine is; on an idle one it is one second more."""


def as_rank(num_elements: int, folder: Path) -> None:
    """Reduce until somebody is lost, and write down when that was: all hosts are of one machine, with one clock."""
    comm = kfcomm.sync.init()
    right = sum(range(1, comm.size + 1))
    number = 0
    try:
        while True:
            number += 1
            total = comm.all_reduce(np.full(num_elements, comm.rank + 1), name=f"n{number % 7}")
            if not (total == right).all():
                raise AssertionError(f"a wrong sum: {total}")
            if number == 1:
                (folder / f"{comm.rank} has joined").touch()
    except PeerLost:
        now_s = time.monotonic()
        written = folder / f"{comm.rank} writes"
        written.write_text(str(now_s), "ascii")
        written.rename(folder / f"{comm.rank} has lost")  # so that nobody reads it before it is whole


def once(lab: Netlab, chance: Random) -> float:
    """One job, one partition; how long the last rank took to know, in seconds."""
    checksum = ["--checksum"] if chance.random() < 0.3 else []
    num_elements = chance.choice([1, 3000, 300_000])
    options = ["--lost-after", str(LOST_AFTER_S), "--keep-going", "--timeout", "60", *checksum]
    cut = chance.sample(lab.hosts, chance.choice([1, 1, HOSTS - 1, HOSTS]))
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            rank = [sys.executable, "-m", "tests.search.partitions", "--as-rank", str(num_elements), "--folder", name]
            with lab.start([*options, *rank]) as program:
                found_by_all(program, folder, "*joined")
                time.sleep(chance.random() * 0.3)
                try:
                    for host in cut:
                        host.ip("link", "set", "port", "down")
                    began_s = time.monotonic()
                    found = found_by_all(program, folder, "*lost")
                finally:
                    for host in cut:
                        host.ip("link", "set", "port", "up")
                return max(float(one.read_text("ascii")) for one in found) - began_s
    except AssertionError as error:
        error.add_note(f"{' '.join(options)}, {num_elements} elements, cut {[host.name for host in cut]}")
        raise


def found_by_all(program: Program, folder: Path, pattern: str) -> list[Path]:
    """Output of all ranks; the program must not end before, or take long."""
    until_s = time.monotonic() + 60
    while len(found := list(folder.glob(pattern))) < HOSTS:
        if program.wait_for(0.01):
            raise AssertionError(f"only {found}: {program.wait()}")
        if time.monotonic() > until_s:
            raise AssertionError(f"only {found}")
    return found


def main() -> int:
    """Search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.partitions")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--as-rank", type=int, metavar="ELEMENTS")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.as_rank is not None:
        as_rank(given.as_rank, given.folder)
        return 0
    if missing := why_unavailable():
        click.echo(f"nothing was searched: {missing}")
        return 0
    chance, until_s = Random(given.seed), time.monotonic() + given.seconds
    took: list[float] = []
    while time.monotonic() < until_s:
        with Netlab(even(HOSTS), network=f"10.78.{given.seed % 250}.0/24") as lab:
            for _ in range(10):
                took.append(once(lab, chance))
                if took[-1] > BOUND_S:
                    raise AssertionError(f"only after {took[-1]:.1f} s")
                if time.monotonic() > until_s:
                    break
    click.echo(f"partitions: {len(took)}, {max(took, default=0):.2f} s at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
