"""A function as a job on Dask: ``run``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import cloudpickle
from dask import is_dask_collection
from distributed import Client, Future, wait

from kfcomm.common.version import versions
from kfcomm.dask import worker
from kfcomm.dask.parts import Shares, shares_of
from kfcomm.errors import ConfigError, PeerLost
from kfcomm.launch.remote import GRACE_S, Ended, check_versions, checked_number, culprit, is_known, pickled, task_of
from kfcomm.rendezvous.authentication import new_token

_LOOK_S = 1.0
"""Interval at which lost workers are looked for."""


def run(
    client: Client, function: Callable[..., Any], *args: Any, num_workers: int | None = None, **settings: Any
) -> list[Any]:
    """Run ``function(comm, *args)`` as one rank on each worker that holds a part of the data; return results by rank.

    ``comm`` is a ``kfcomm.sync.Communicator``; for an ``async def`` it is a ``kfcomm.Communicator``. In the place of a
    persisted collection (array, data frame, bag) each rank gets its blocks, as a dict by index: ``{(0, 0): block}``.
    The blocks of the first collection stay where they are, without a copy. Those of further ones with the same place
    along the first axis come along, and are copied if they are on another worker.

    Args:
        client: of a running cluster; not asynchronous.
        function: cloudpickle pickles it.
        *args: further arguments; collections of Dask must be persisted.
        num_workers: number of workers to use if no argument is a collection; None for all.
        **settings: arguments of ``kfcomm.init`` for all ranks, such as ``strategy`` and ``timeout``.

    Raises:
        ConfigError: there are no or too few workers; a collection is not persisted; the function cannot be pickled; a
            worker has no kfcomm, or another version; or an argument is invalid.
        PeerLost: a worker is lost.
        RendezvousError: workers are busy with other tasks for the whole ``timeout``.
        Exception: what the first rank that failed has raised, with notes about its traceback and the others.
    """
    if not isinstance(client, Client) or client.asynchronous or client.status != "running":
        raise ConfigError("expected a connected distributed.Client that is not asynchronous")
    collections = [arg for arg in args if is_dask_collection(arg)]
    numbers = iter(range(len(collections)))
    kept = tuple(worker.Collection(next(numbers)) if is_dask_collection(arg) else arg for arg in args)
    task = task_of(function, kept, settings)
    what = f"the function {getattr(function, '__qualname__', function)!r} with its arguments"
    packed = pickled(what, lambda: cloudpickle.dumps(task))
    shares = shares_of(client, collections)
    if num_workers is not None:
        shares = _limited(shares, checked_number("num_workers", num_workers))
    if not shares.addresses:
        raise ConfigError("the cluster has no workers: start some, as with cluster.scale(4)")
    _check_workers(client, shares.addresses)
    token, home = new_token(), shares.addresses[0]
    url = client.run(worker.serve, token, workers=[home])[home]
    futures: list[Future] = []
    try:
        sent = client.scatter(packed, workers=shares.addresses, broadcast=True, hash=False)
        size = len(shares.addresses)
        for rank, address in enumerate(shares.addresses):
            mine = [blocks[address] for blocks in shares.blocks]
            futures.append(
                client.submit(
                    worker.work, sent, (rank, size, url, token), [list(each) for each in mine],
                    [list(each.values()) for each in mine], workers=[address], allow_other_workers=False, pure=False,
                    retries=0,
                )
            )  # fmt: skip
        return _results(client, futures, shares.addresses)
    finally:
        client.cancel(futures)
        with contextlib.suppress(Exception):  # its worker is gone
            client.run(worker.close, url, workers=[home])


def _limited(shares: Shares, count: int) -> Shares:
    if shares.blocks:
        raise ConfigError(
            "num_workers is for functions without collections: these have a rank for each of their workers"
        )
    if count > len(shares.addresses):
        raise ConfigError(f"num_workers={count}, but the cluster has {len(shares.addresses)} workers")
    return Shares(shares.addresses[:count], [])


def _check_workers(client: Client, addresses: Sequence[str]) -> None:
    try:
        found = client.run(worker.about, workers=list(addresses))
    except Exception as error:
        raise ConfigError(f"the workers need kfcomm {versions()[0]}, as the client: {error}") from error
    for address in addresses:
        check_versions(found[address], f"the worker {address}")


def _results(client: Client, futures: Sequence[Future], addresses: Sequence[str]) -> list[Any]:
    """Results by rank, once all ranks have ended; or the culprit's error, once it is known."""
    pending = dict(zip(futures, range(len(futures)), strict=True))
    ends: list[Ended] = []
    give_up_s = float("inf")
    while pending and not is_known(ends) and monotonic() < give_up_s:
        with contextlib.suppress(TimeoutError):
            wait(list(pending), timeout=_LOOK_S, return_when="FIRST_COMPLETED")
        alive = client.nthreads()
        for future, rank in list(pending.items()):
            if future.done():
                ends.append(_end_of(future, rank))
                del pending[future]
            elif addresses[rank] not in alive:  # else Dask would wait for it to come back
                lost = PeerLost(f"the worker {addresses[rank]} of rank {rank} is lost", rank=rank)
                ends.append(Ended(rank, rank, error=lost))
                del pending[future]
        if any(end.error is not None for end in ends):
            give_up_s = min(give_up_s, monotonic() + GRACE_S)
    if any(end.error is not None for end in ends):
        raise culprit(ends)
    return [end.value for end in sorted(ends, key=lambda end: end.rank)]


def _end_of(future: Future, rank: int) -> Ended:
    try:
        end: Ended = future.result()
    except Exception as error:  # noqa: BLE001  raised if it is the culprit's
        text = " ".join(str(error).split())
        return Ended(rank, rank, error=ConfigError(f"rank {rank}: its result did not come back: {text}"))
    return end
