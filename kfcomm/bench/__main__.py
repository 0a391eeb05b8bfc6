"""The program of one rank that `kfcomm bench` has started: ``python -m kfcomm.bench SUITE``, the suite as JSON.

Rank 0 writes its events to standard output. It reports a wrong result there and by exit code 1.
"""

from __future__ import annotations

import sys

from kfcomm.bench.measure import run_rank
from kfcomm.bench.suite import Event, Suite, to_line


def _write(event: Event) -> None:
    sys.stdout.write(f"{to_line(event)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_rank(Suite.from_json(sys.argv[1]), _write))
