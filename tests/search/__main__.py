"""Every kind of search by turns, a slice of time for each, until the time is over or something is found.

    python -m tests.search --minutes 60
    python -m tests.search --minutes 5 --only kills --only relays --seed 7

Each slice is a command of its own with a seed of its own. The first that fails ends it all, with the command that
repeats it. Whatever is found becomes a test.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import click

SLICE_S = 20
PROPERTIES = (
    "tests/core", "tests/strategies", "tests/rendezvous", "tests/transports/test_sealed.py",
    "tests/transports/test_stream.py", "tests/transports/shm", "tests/reduce", "tests/collectives/test_objects.py",
)  # fmt: skip

Command = Callable[[Random, int], Sequence[str]]


def _programs(random: Random, seed: int) -> Sequence[str]:
    """Programs of all verbs, both interfaces mixed, on every link, beside a busy process or not."""
    ranks, calls = random.choice([2, 3, 4, 6]), random.choice([50, 200, 500])
    more = random.choice([[], ["--per-host", "1"], ["--per-host", "2"], ["--busy", "1"], ["--debug"]])
    links = ["auto", "tcp"] if "--per-host" in more else ["shm", "unix", "tcp"]
    transport, interface = random.choice(links), random.choice(["blocking", "async"])
    what = ["--programs", str(max(1, 12_000 // (ranks * calls))), "--calls", str(calls), "--ranks", str(ranks)]
    how = ["--transport", transport, "--interface", interface, *more, "--seed", str(seed)]
    return ["-m", "tests.programs", *what, *how]


def _interrupts(random: Random, _: int) -> Sequence[str]:
    """Ctrl-C, or what a handler raises, at lines of one verb."""
    from tests.programs.interrupts import verbs

    verb, transport = random.choice(verbs(2)), random.choice(["shm", "unix", "tcp"])
    what = random.choice([[], ["--handlers"]])
    return ["-m", "tests.programs.interrupts", *what, "--verb", verb, "--transport", transport, "--sample", "300"]


def _properties(random: Random, seed: int) -> Sequence[str]:
    """The properties of ``make test``, with examples that are left to chance, and more of them."""
    chosen = random.choice(PROPERTIES)
    hypothesis = ["--hypothesis-profile=search", f"--hypothesis-seed={seed}", f"--randomly-seed={seed % (1 << 32)}"]
    return ["-m", "pytest", "-q", "-x", *hypothesis, "-n", "2", "--dist", "load", chosen]


def _module(name: str) -> Command:
    def command(_: Random, seed: int) -> Sequence[str]:
        return ["-m", f"tests.search.{name}", "--seconds", str(SLICE_S), "--seed", str(seed)]

    return command


PARTS: dict[str, Command] = {
    "decoders": _module("decoders"),
    "kills": _module("kills"),
    "training": _module("training"),
    "attacked": _module("attacked"),
    "virtual": _module("virtual"),
    "resumed": _module("resumed"),
    "damaged": _module("damaged"),
    "restarts": _module("restarts"),
    "partitions": _module("partitions"),
    "ctrl_c": _module("ctrl_c"),
    "held": _module("held"),
    "relays": _module("relays"),
    "resizes": _module("resizes"),
    "lost_answers": _module("lost_answers"),
    "receives": _module("receives"),
    "guarded_elastic": _module("guarded_elastic"),
    "pulls": _module("pulls"),
    "read_in_place": _module("read_in_place"),
    "voided": _module("voided"),
    "guarded": _module("guarded"),
    "traffic": _module("traffic"),
    "programs": _programs,
    "interrupts": _interrupts,
    "soak": _module("soak"),
    "properties": _properties,
}


def main() -> int:
    """Run what the command line asks for; 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", action="append", choices=PARTS, help="again for more of them; default: all")
    parser.add_argument("--seed", type=int, help="of the first slice; the next ones count on")
    given = parser.parse_args()
    first = secrets.randbelow(1 << 31) if given.seed is None else given.seed
    until_s = time.monotonic() + 60 * given.minutes
    click.echo(f"{given.minutes:g} minutes from seed {first} on")
    for name, arguments in _slices(given.only or list(PARTS), first):
        if time.monotonic() >= until_s:
            return 0
        began_s = time.monotonic()
        done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        click.echo(f"{name:11}{time.monotonic() - began_s:6.0f} s  {last[:100]}")
        if done.returncode:
            click.echo(done.stdout)
            click.echo(f"found by: python {shlex.join(arguments)}")
            return 1
    return 0


def _slices(names: Sequence[str], first: int) -> Iterator[tuple[str, Sequence[str]]]:
    for name, seed in zip(itertools.cycle(names), itertools.count(first)):
        yield name, PARTS[name](Random(seed), seed)


if __name__ == "__main__":
    sys.exit(main())
