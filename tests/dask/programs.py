"""Clients of jobs on Dask, each with a cluster of its own: ``python -m tests.dask.programs NAME FOLDER``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, get_worker, wait

import kfcomm
import kfcomm.dask
from tests.drivers import drive, raised


@contextlib.contextmanager
def cluster(num_workers: int, **options: Any) -> Iterator[Client]:
    """Client of a new cluster on this host."""
    settings = {"threads_per_worker": 1, "dashboard_address": None, **options}
    with LocalCluster(n_workers=num_workers, **settings) as made, Client(made) as client:
        yield client


def parts(_: Path) -> Any:
    """Persisted arrays, at the ranks that have them."""

    def blocking(comm: Any, x: Any, word: str, y: Any) -> Any:
        kept = get_worker().data.values()
        is_same = [any(block is one for one in kept) for block in x.values()]
        mine = sum(float(block.sum()) for block in x.values())
        total = float(comm.all_reduce(np.full(1, mine))[0])
        return comm.rank, word, list(x), list(y), is_same, total, os.getpid()

    with cluster(3) as client:
        x = da.ones((60, 10), chunks=(10, 5)).persist()
        y = da.arange(60, chunks=10).persist()
        wait([x, y])
        found = kfcomm.dask.run(client, blocking, x, "hello", y)
        return found, kfcomm.dask.run(client, blocking, x, "again", x)[0][1]


def functions(_: Path) -> Any:
    """Functions without data, on processes and in threads."""

    async def asynchronous(comm: Any) -> Any:
        return comm.rank, type(comm).__module__, float((await comm.all_reduce(np.ones(3)))[0])

    found = []
    for processes in (True, False):
        with cluster(3, processes=processes) as client:
            some = kfcomm.dask.run(client, asynchronous, num_workers=2, strategy="ring")
            found.append((kfcomm.dask.run(client, asynchronous), some))
    return found


def failures(_: Path) -> Any:
    """Errors of ranks, and lost workers."""

    def fails(comm: Any) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("here")
        comm.barrier()

    def dies(comm: Any) -> None:
        if comm.rank == 1:
            os._exit(3)
        comm.barrier()

    def gives(_: Any) -> Any:
        return threading.Lock()

    with cluster(3) as client:
        return {
            "raises": raised(lambda: kfcomm.dask.run(client, fails)),
            "result": raised(lambda: kfcomm.dask.run(client, gives, num_workers=1)),
            "dies": raised(lambda: kfcomm.dask.run(client, dies)),
        }


def refusals(_: Path) -> Any:
    """Refused arguments and clusters."""
    lock = threading.Lock()

    def function(comm: Any, *_: Any) -> Any:
        return comm.rank

    def other(comm: Any) -> Any:
        return lock

    def busy() -> None:
        time.sleep(8)

    with cluster(2) as client:

        def run(*args: Any, **options: Any) -> Any:
            return raised(lambda: kfcomm.dask.run(*args, **options))

        x = da.ones(10, chunks=5)
        found = {
            "client": run(None, function),
            "not persisted": run(client, function, x),
            "unpicklable": run(client, other),
            "setting": run(client, function, stratgy="ring"),
            "own": run(client, function, rank=1),
            "not callable": run(client, 3),
            "too few": run(client, function, num_workers=3),
            "both": run(client, function, x.persist(), num_workers=2),
            "broken": run(client, function, (x / 0).map_blocks(lambda _: 1 // 0, dtype=int).persist()),
        }
        address = max(client.nthreads())
        taken = client.submit(busy, workers=[address])
        found["busy"] = run(client, function, timeout=2)
        taken.result()
        from kfcomm.launch import remote

        remote.versions = lambda: ("9.9", 99)
        found["versions"] = run(client, function)
    with cluster(0) as client:
        return found | {"no workers": run(client, function)}


if __name__ == "__main__":
    drive(globals())
