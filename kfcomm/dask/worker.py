"""Work of one rank on a worker of Dask, and the store of a job, which the first rank's worker serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle

from kfcomm.common.version import versions
from kfcomm.dask.parts import Index
from kfcomm.launch.remote import Ended, Task, failed, place_of, run_rank
from kfcomm.rendezvous.store import StoreServer

_STORES = "kfcomm_stores"


def about() -> tuple[str, int]:
    """Version of kfcomm here."""
    return versions()


async def serve(token: str, dask_worker: Any) -> str:
    """Serve a store on the event loop of this worker, at its address; return its URL."""
    server = await StoreServer.start(dask_worker.ip, token=token.encode())
    stores = getattr(dask_worker, _STORES, {})
    setattr(dask_worker, _STORES, {**stores, server.url: server})
    return server.url


async def close(url: str, dask_worker: Any) -> None:
    """Close a store that `serve` has started."""
    server = getattr(dask_worker, _STORES, {}).pop(url, None)
    if server is not None:
        await server.close()


def work(
    packed: bytes, place: tuple[int, int, str, str], names: Sequence[Sequence[Index]], parts: Sequence[Sequence[Any]]
) -> Ended:
    """Run a task as a rank.

    Args:
        packed: the task, by cloudpickle; `Collection` marks the places of collections among its arguments.
        place: rank, size, URL of the store, token.
        names: indices of the blocks of each collection that are for this rank.
        parts: these blocks.
    """
    rank, size, url, token = place
    try:
        task: Task = cloudpickle.loads(packed)
        blocks = [dict(zip(*each, strict=True)) for each in zip(names, parts, strict=True)]
        args = tuple(blocks[arg.number] if isinstance(arg, Collection) else arg for arg in task.args)
    except Exception as error:  # noqa: BLE001  the caller raises it
        return failed(rank, error)
    return run_rank(task._replace(args=args), rank, place_of(rank, size, url, token))


class Collection:
    """Place of a collection of Dask among the arguments of a function."""

    def __init__(self, number: int) -> None:
        self.number = number
