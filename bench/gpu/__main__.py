"""The command: ``python -m bench.gpu``. Exit code 2 without a GPU, 1 if something failed or a row is not as wanted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

from bench import ROOT
from bench.gpu import machine as gpu
from bench.gpu.figures import TORCH, Row, Wanted, table
from bench.records import Record, say
from kfcomm.bench.harness import JobFailed
from kfcomm.bench.memory import num_devices
from kfcomm.errors import ConfigError, KfcommError

QUICK = 0.02
"""Scale of a run that only shows that everything works."""
IN_SLOTS = {
    2: {"1 KiB": Wanted(at_most_s=0.4e-3), "1 MiB": Wanted(at_most_s=0.4e-3), "64 MiB": Wanted(at_most_s=0.8e-3)},
    4: {"1 KiB": Wanted(at_most_s=0.9e-3), "1 MiB": Wanted(at_most_s=0.9e-3), "64 MiB": Wanted(at_most_s=1.8e-3)},
}
"""By ranks that share the GPU, and size: what is wanted of the way that kfcomm chooses."""
STAGED = {"1 KiB": Wanted(ratio=1.0), "64 KiB": Wanted(ratio=1.0)}
"""By size: what is wanted through memory of the host."""


class Run:
    """Measures row after row, and remembers what failed. ``scale``: of the number of rounds."""

    def __init__(self, scale: float) -> None:
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self._scale = scale

    def all(self, only: str) -> None:
        """Every row of the parts whose title has ``only`` in it; each part is printed when it is there."""
        parts: dict[str, Callable[[], list[Row]]] = {"a world of one": self._alone}
        for num_ranks, transport in product(IN_SLOTS, ("auto", "shm")):
            parts[f"{num_ranks} ranks on one GPU, transport {transport}"] = partial(self._shared, num_ranks, transport)
        for what, measured in parts.items():
            if only in what:
                self._noting(what, measured)

    def _noting(self, what: str, measured: Callable[[], list[Row]]) -> None:
        from bench.gpu.alone import WrongResultError

        say(f"{what} ...")
        try:
            rows = measured()
            print(table(rows), flush=True)
            self.rows += rows
        except (KfcommError, JobFailed, WrongResultError) as error:
            self.failures.append(f"{what}: {error}")
            say(f"left out: {error}")

    def _alone(self) -> list[Row]:
        from bench.gpu.alone import rows

        return rows(self._scale)

    def _shared(self, num_ranks: int, transport: str) -> list[Row]:
        from bench.gpu.shared import measure

        found = measure(num_ranks, transport, self._scale)
        route = found["route"].partition(":")[0]
        wanted = STAGED if transport == "shm" else IN_SLOTS[num_ranks]
        about = {"ranks": num_ranks, "transport": transport, "route": found["route"]}
        return [
            Row(f"{num_ranks} ranks on one GPU, {size}, {route}", times_s, TORCH, wanted.get(size, Wanted()), about)
            for size, times_s in found["times_s"].items()
        ]


def main() -> int:
    """Measure, print, record."""
    options = parser().parse_args()
    try:
        num_devices()
    except ConfigError as error:
        say(f"bench.gpu: {error}")
        return 2
    record = Record("gpu", options.output or (ROOT / "build/gpu/quick.json" if options.quick else None))
    run = Run(QUICK if options.quick else options.scale)
    run.all(options.only)
    record.write(
        {
            "quick": options.quick,
            "gpu": gpu.describe(),
            "rows": [row.as_json() for row in run.rows],
            "failures": run.failures,
        }
    )
    return 0 if not run.failures and all(row.is_reached is not False for row in run.rows) else 1


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu", description="Device memory with kfcomm, beside NCCL and torch."
    )
    made.add_argument("--quick", action="store_true", help="few rounds: to see that everything runs")
    made.add_argument("--scale", type=float, default=1.0, help="of the number of rounds")
    made.add_argument("--only", default="", help="measure the parts with this in their title, such as '2 ranks'")
    made.add_argument("--output", type=Path, help="where the record goes (default: bench/results/gpu-DATE.json)")
    return made


if __name__ == "__main__":
    sys.exit(main())
