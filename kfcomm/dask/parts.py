"""Parts of persisted collections: which worker has each, and the rank that gets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from distributed import Client, Future, futures_of, wait

from kfcomm.errors import ConfigError

Index: TypeAlias = tuple[int, ...]


class Shares(NamedTuple):
    """Ranks of a job by the addresses of their workers, and their blocks of each collection."""

    addresses: list[str]
    blocks: list[dict[str, dict[Index, Future]]]


def shares_of(client: Client, collections: Sequence[Any]) -> Shares:
    """One rank for each worker that holds a block of the first collection, in the order of the blocks.

    A block of a further collection goes to the rank with the same place along the first axis: where Dask has put it
    elsewhere, it is copied.

    Raises:
        ConfigError: a collection is not persisted on this client's workers.
        Exception: what the computation of a block has raised.
    """
    if not collections:
        return Shares(sorted(client.nthreads()), [])
    found = [_blocks(client, each) for each in collections]
    owners = client.who_has([future for blocks in found for future in blocks.values()])
    first = {index: _owner(owners, future) for index, future in found[0].items()}
    addresses = list(dict.fromkeys(first.values()))
    by_row = {index[0]: address for index, address in reversed(first.items())}
    shared: list[dict[str, dict[Index, Future]]] = []
    for number, blocks in enumerate(found):
        mine: dict[str, dict[Index, Future]] = {address: {} for address in addresses}
        for index, future in blocks.items():
            near = first[index] if number == 0 else by_row.get(index[0], addresses[0])
            mine[near][index] = future
        shared.append(mine)
    return Shares(addresses, shared)


def _blocks(client: Client, collection: Any) -> dict[Index, Future]:
    futures = futures_of(collection, client=client)
    if not futures:
        raise ConfigError(f"{type(collection).__name__} is not in the workers' memory: pass x.persist() instead of x")
    wait(futures)
    for future in futures:
        if future.status == "error":
            future.result()
    indexed = ((_index(future.key, number), future) for number, future in enumerate(futures))
    return dict(sorted(indexed, key=lambda one: one[0]))


def _index(key: Any, number: int) -> Index:
    """Index of a block by its key, as ``("x", 0, 1)``; blocks with other keys are counted."""
    is_indexed = isinstance(key, tuple) and len(key) > 1 and all(isinstance(one, int) for one in key[1:])
    return key[1:] if is_indexed else (number,)


def _owner(owners: Any, future: Future) -> str:
    holders = owners.get(future.key) or ()
    if not holders:
        raise ConfigError(f"no worker has the block {future.key!r} any more: persist the collection again")
    return str(min(holders))
