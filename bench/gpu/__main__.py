"""The command: ``python -m bench.gpu``. Exit code 2 without a GPU, 1 if something failed or a row is not as wanted."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT
from bench.gpu import machine as gpu
from bench.gpu.figures import Row, Wanted, slower_of, table
from bench.records import Record, say
from kfcomm.bench.harness import run_on_loop
from kfcomm.bench.memory import num_devices
from kfcomm.errors import ConfigError, KfcommError

SHARED_NBYTES = 64 << 20
SHARES = {"shared memory": 0.60, "TCP": 0.80}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure.

    Attributes:
        one_pairs: of the large all_reduce in a world of one.
        many_pairs: of the gradients in a world of one.
        rounds: of each world of processes.
    """

    one_pairs: int = 500
    many_pairs: int = 200
    rounds: int = 40


QUICK = Plan(one_pairs=20, many_pairs=5, rounds=3)


class Run:
    """Measures row after row, and remembers what failed."""

    def __init__(self, plan: Plan) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._plan = plan

    def all(self) -> None:
        """Every row."""
        self._noting("in a world of one", self._alone)
        self._noting(
            "four processes on one GPU",
            lambda: [self._shared("four processes on one GPU, all_reduce of 64 MiB", 4, "auto", "shared memory")],
        )
        self._noting(
            "two processes over TCP",
            lambda: [self._shared("two processes on one GPU, all_reduce of 64 MiB over TCP", 2, "tcp", "TCP")],
        )

    def _noting(self, what: str, measured: Callable[[], list[Row]]) -> None:
        from bench.gpu.alone import WrongResultError
        from bench.gpu.shared import SharedError

        say(f"{what} ...")
        try:
            self.rows += measured()
        except (KfcommError, SharedError, WrongResultError) as error:
            self.failures.append(f"{what}: {error}")
            say(f"left out: {error}")

    def _alone(self) -> list[Row]:
        from bench.gpu.alone import rows

        found: list[Row] = run_on_loop(rows(one_pairs=self._plan.one_pairs, many_pairs=self._plan.many_pairs))
        return found

    def _shared(self, title: str, num_ranks: int, transport: str, links: str) -> Row:
        from bench.gpu.shared import measure

        found = measure(num_ranks, transport, SHARED_NBYTES, self._plan.rounds)
        times_s, alone = found["times_s"], ("copies", "host")
        parts = {
            "copies from the device": "fetch",
            "copies to the device": "put",
            "both at once": "copies",
            f"all_reduce on the host, {links}": "host",
        }
        return Row(
            title,
            f"the slower of pinned copies and {links}, each alone",
            Wanted(ratio=1 / SHARES[links]),
            slower_of(times_s, "device", alone),
            {name: statistics.median(times_s[work]) for name, work in parts.items()},
            {"ranks": num_ranks, "transport": transport, "nbytes": SHARED_NBYTES, "route": found["route"]},
        )


def main() -> int:
    """Measure, print, record."""
    options = parser().parse_args()
    try:
        num_devices()
    except ConfigError as error:
        say(f"bench.gpu: {error}")
        return 2
    record = Record("gpu", options.output or (ROOT / "build/gpu/quick.json" if options.quick else None))
    run = Run(QUICK if options.quick else Plan())
    run.all()
    print(table(run.rows))
    record.write(
        {
            "quick": options.quick,
            "gpu": gpu.describe(),
            "rows": [row.as_json() for row in run.rows],
            "failures": run.failures,
        }
    )
    return 0 if not run.failures and all(row.is_reached for row in run.rows) else 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu", description="Device memory with kfcomm, and floors.")
    made.add_argument("--quick", action="store_true", help="few rounds: to see that everything runs")
    made.add_argument("--output", type=Path, help="where the record goes (default: bench/results/gpu-DATE.json)")
    return made


if __name__ == "__main__":
    sys.exit(main())
