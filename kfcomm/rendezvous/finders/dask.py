"""Tasks of Dask's workers: they have no ranks of their own, and variables that they see are those of the workers."""

from __future__ import annotations

import sys

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.worlds import Absent, Environ, Outcome


def find(environ: Environ) -> Outcome:
    """Refuse to guess inside a task."""
    distributed = sys.modules["distributed"]
    if not hasattr(distributed, "get_worker"):
        return Absent("the module distributed is not Dask's")
    try:
        worker = distributed.get_worker()
    except ValueError:
        return Absent("Dask is imported; this is not a task of a worker")
    raise ConfigError(
        f"Dask: a task of the worker {worker.address} has no rank: use kfcomm.dask.run, or pass rank, size, store and "
        "token; for a world of one, pass size=1"
    )
