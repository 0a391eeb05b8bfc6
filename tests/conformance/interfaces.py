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
ROUTES: dict[str, dict[str, Any]] = {
    "backend": {},
    "shared": {},
    "no backend": {},
    "hierarchy": {"hosts": 2},
    "links": {"device_transport": "tcp"},
    "some ranks": {},
}
"""How arrays of devices travel, and the options of such a world. ``shared``: all ranks have the same device."""


class Memory:
    """Memory of the arrays of all ranks: that of the host, or of fake devices joined along a route."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.size = 4 if kind == "hierarchy" else SIZE
        self.fabric = FakeFabric()
        shared, backend = "one" if kind == "shared" else None, "" if kind == "no backend" else "fake"
        self.devices = [
            None if kind == "host" or (kind == "some ranks" and rank == 1) else FakeDevice(0, shared, backend=backend)
            for rank in range(self.size)
        ]

    @property
    def options(self) -> dict[str, Any]:
        """Options of a world in this process."""
        given = {} if self.kind == "host" else {"devices": self.devices, "maker": self.fabric, **ROUTES[self.kind]}
        return {"timeout": TIMEOUT_S, **given}

    def holding(self, given: Any, rank: int) -> Any:
        """An argument of a rank with its arrays there."""
        device = self.devices[rank]
        if device is None or given is None:
            return given
        if isinstance(given, (list, dict)):
            pairs = given.items() if isinstance(given, dict) else enumerate(given)
            moved = {key: self.holding(one, rank) for key, one in pairs}
            return moved if isinstance(given, dict) else list(moved.values())
        return device.array(given)

    def check(self, results: Any, rank: int) -> None:
        """Fail unless all arrays of a result are there."""
        parts = results.values() if isinstance(results, dict) else results if isinstance(results, list) else [results]
        kind = np.ndarray if self.devices[rank] is None else FakeArray
        assert all(one is None or isinstance(one, kind) for one in parts), results

    def close(self) -> None:
        """Fail if the program has done what a real device may answer with wrong numbers."""
        said = [said for device in self.devices if device is not None for said in device.violations]
        assert [*self.fabric.violations, *said] == []


def _settings(rank: int, url: str, link: str, strategy: str, *, elastic: bool) -> dict[str, Any]:
    return {
        "rank": rank, "size": SIZE, "store": url, "serve": False, "token": TOKEN, "transport": link, "device": "none",
        "strategy": strategy, "elastic": elastic, "timeout": TIMEOUT_S,
    }  # fmt: skip


@asynccontextmanager
async def awaited(link: str, strategy: str, memory: Memory, *, elastic: bool = False) -> AsyncIterator[Sequence[Any]]:
    """The asyncio communicators of all ranks, on the running loop."""
    if link == "memory" or memory.kind != "host":
        async with world(memory.size, transport=link, strategy=strategy, elastic=elastic, **memory.options) as comms:
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
def blocking(link: str, strategy: str, memory: Memory, *, elastic: bool = False) -> Iterator[Sequence[Any]]:
    """The blocking communicators of all ranks, each to be used on a thread."""
    if link == "memory":
        with sync_world(memory.size, strategy=strategy, elastic=elastic, **memory.options) as comms:
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
    if isinstance(like, list):
        return [blank(one) for one in like]
    return like.device.array(np.zeros(like.shape, like.dtype)) if isinstance(like, FakeArray) else np.zeros_like(like)


def fill(memory: Any, given: Any) -> None:
    """Copy the data of the next use."""
    if isinstance(memory, list):
        for one, other in zip(memory, given, strict=True):
            fill(one, other)
    elif isinstance(memory, FakeArray):
        memory.device.copy(given, memory, memory.device.current_stream)
    else:
        memory[...] = given


def prepared(comm: Any, row: Row, given: Any) -> tuple[Any, Any]:
    """A persistent collective and its memory; None where a row has no such form."""
    prepare = getattr(comm, f"{row.verb}_init", None)
    if prepare is None or not isinstance(given, (np.ndarray, FakeArray, list)):
        return None, None
    memory = blank(given)
    return prepare(**arguments(row, memory)), memory


async def each_awaited(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One awaited call after the other."""
    results = []
    for given in gifts:
        result = await getattr(comm, row.verb)(**arguments(row, given))
        await comm.synchronize()
        results.append(result)
    return results


async def started_awaited(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One persistent collective, started for each gift."""
    persistent, memory = prepared(comm, row, gifts[0])
    if persistent is None:
        return await each_awaited(comm, row, gifts)
    results = []
    for given in gifts:
        fill(memory, given)
        result = await persistent.start()
        await comm.synchronize()
        results.append(result)
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
        results.append(result)
    return results


def started_blocking(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One persistent collective: run, then started and waited for, in turns."""
    persistent, memory = prepared(comm, row, gifts[0])
    if persistent is None:
        return each_blocking(comm, row, gifts)
    results = []
    for number, given in enumerate(gifts):
        fill(memory, given)
        result = persistent.start().wait() if number % 2 else persistent.run()
        comm.synchronize()
        results.append(result)
    return results


def elastic_blocking(comm: Any, row: Row, gifts: Sequence[Any]) -> list[Any]:
    """One call after the other while an ``Elastic`` is open."""
    with Elastic(comm, State(x=np.zeros(1))):
        return each_blocking(comm, row, gifts)


def on_host(result: Any) -> Any:
    """A result in host memory."""
    if isinstance(result, list):
        return [on_host(one) for one in result]
    if isinstance(result, dict):
        return {key: on_host(one) for key, one in result.items()}
    return result.get() if isinstance(result, FakeArray) else result
