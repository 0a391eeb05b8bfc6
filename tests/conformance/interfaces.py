"""The interfaces of a communicator, as the conformance suite calls them: each verb by each, over real links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np

import kfcomm
from kfcomm.elastic import Elastic, State
from kfcomm.testing import FakeArray, FakeDevice, FakeFabric, sync_world, world
from tests.conformance.verb_table import Row
from tests.processes.stage import TOKEN, served

SIZE = 3
TIMEOUT_S = 60.0
"""Turns a hang into an error that says who is missing."""


class FakeDevices:
    """The fake devices of all ranks, and what joins them."""

    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.by_rank = [FakeDevice() for _ in range(SIZE)]

    def check(self) -> None:
        """Fail if the program has done what a real device may answer with wrong numbers."""
        assert [*self.fabric.violations, *(said for one in self.by_rank for said in one.violations)] == []


def _settings(rank: int, url: str, link: str, strategy: str, *, elastic: bool) -> dict[str, Any]:
    return {
        "rank": rank, "size": SIZE, "store": url, "serve": False, "token": TOKEN, "transport": link, "device": "none",
        "strategy": strategy, "elastic": elastic, "timeout": TIMEOUT_S,
    }  # fmt: skip


def _in_memory(strategy: str, devices: FakeDevices | None, *, elastic: bool) -> dict[str, Any]:
    given = {} if devices is None else {"devices": devices.by_rank, "maker": devices.fabric}
    return {"strategy": strategy, "timeout": TIMEOUT_S, "elastic": elastic, **given}


@asynccontextmanager
async def awaited(
    link: str, strategy: str, devices: FakeDevices | None = None, *, elastic: bool = False
) -> AsyncIterator[Sequence[Any]]:
    """The asyncio communicators of all ranks, on the running loop."""
    if link == "memory" or devices is not None:
        async with world(SIZE, transport=link, **_in_memory(strategy, devices, elastic=elastic)) as comms:
            yield comms
        return
    with served() as store:
        joining = (kfcomm.init(**_settings(rank, store.url, link, strategy, elastic=elastic)) for rank in range(SIZE))
        comms = await asyncio.gather(*map(_joined, joining))
        try:
            yield comms
        finally:
            await asyncio.gather(*(comm.close() for comm in comms))


async def _joined(joining: Any) -> Any:
    return await joining


@contextmanager
def blocking(
    link: str, strategy: str, devices: FakeDevices | None = None, *, elastic: bool = False
) -> Iterator[Sequence[Any]]:
    """The blocking communicators of all ranks, each to be used on a thread."""
    if link == "memory":
        with sync_world(SIZE, **_in_memory(strategy, devices, elastic=elastic)) as comms:
            yield comms
        return
    with served() as store, ThreadPoolExecutor(SIZE) as pool:

        def init(rank: int) -> Any:
            return kfcomm.sync.init(**_settings(rank, store.url, link, strategy, elastic=elastic))

        found = list(pool.map(init, range(SIZE)))
        try:
            yield found
        finally:
            list(pool.map(lambda comm: comm.close(), found))


def arguments(row: Row, given: Any) -> dict[str, Any]:
    """The keyword arguments of a call."""
    data = {} if row.parameter is None else {row.parameter: given}
    return {**data, "name": row.name, **row.options}


def blank(like: Any) -> Any:
    """Memory for the data of a persistent collective, where ``like`` is."""
    return like.device.array(np.zeros(like.shape, like.dtype)) if isinstance(like, FakeArray) else np.zeros_like(like)


def fill(memory: Any, given: Any) -> None:
    """Copy the data of the next use."""
    if isinstance(memory, FakeArray):
        memory.device.copy(given, memory, memory.device.current_stream)
    else:
        memory[...] = given


async def each_awaited(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One awaited call after the other."""
    results = []
    for given in gifts:
        result = await getattr(comm, row.verb)(**arguments(row, given))
        await comm.synchronize()
        results.append(kept(result))
    return results


async def started_awaited(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One persistent collective, started for each gift."""
    prepare = getattr(comm, f"{row.verb}_init", None)
    if prepare is None or not isinstance(gifts[0], (np.ndarray, FakeArray)):
        return await each_awaited(comm, row, gifts)
    memory = blank(gifts[0])
    prepared, results = prepare(**arguments(row, memory)), []
    for given in gifts:
        fill(memory, given)
        result = await prepared.start()
        await comm.synchronize()
        results.append(kept(result))
    return results


async def elastic_awaited(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One call after the other while an ``Elastic`` is open."""
    async with Elastic(comm, State(x=np.zeros(1))):
        return await each_awaited(comm, row, gifts)


def each_blocking(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """A blocking call, then one that is begun and waited for, in turns."""
    results = []
    for number, given in enumerate(gifts):
        options = arguments(row, given)
        if number % 2:
            result = getattr(comm, f"{row.verb}_async")(**options).wait()
        else:
            result = getattr(comm, row.verb)(**options)
        comm.synchronize()
        results.append(kept(result))
    return results


def started_blocking(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One persistent collective: run, then started and waited for, in turns."""
    prepare = getattr(comm, f"{row.verb}_init", None)
    if prepare is None or not isinstance(gifts[0], (np.ndarray, FakeArray)):
        return each_blocking(comm, row, gifts)
    memory = blank(gifts[0])
    prepared, results = prepare(**arguments(row, memory)), []
    for number, given in enumerate(gifts):
        fill(memory, given)
        result = prepared.start().wait() if number % 2 else prepared.run()
        comm.synchronize()
        results.append(kept(result))
    return results


def elastic_blocking(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One call after the other while an ``Elastic`` is open."""
    with Elastic(comm, State(x=np.zeros(1))):
        return each_blocking(comm, row, gifts)


def kept(result: Any) -> Any:
    """A result in host memory, whatever becomes of the memory in which it was."""
    if isinstance(result, FakeArray):
        return result.get()
    return result.copy() if isinstance(result, np.ndarray) else result
