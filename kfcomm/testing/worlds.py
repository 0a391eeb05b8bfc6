"""A world in memory: all ranks on one event loop, no sockets, no processes, and faults on request."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

from kfcomm.communicator import Communicator
from kfcomm.control.base import ControlEvents, ControlPlane, StatusSource
from kfcomm.control.memory import MemoryHub
from kfcomm.core.hello import Purpose
from kfcomm.devices import Device, DeviceReport
from kfcomm.devices.routes import choose
from kfcomm.errors import TransportError
from kfcomm.session import Session
from kfcomm.sizes import seconds_of
from kfcomm.testing.links import InMemory, InSharedMemory, Links
from kfcomm.transports.backend import BackendMaker
from kfcomm.transports.base import Link, Waiter
from kfcomm.transports.connection import Connection
from kfcomm.transports.device_setup import DeviceSetup
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.heap import Array
from kfcomm.types import Layout, Seconds

T = TypeVar("T")


class _Way:
    """The network of one rank; implements ``session.Network``."""

    def __init__(self, rank: int, links: Links, hub: MemoryHub, job: str) -> None:
        self.job = job
        self._rank = rank
        self._links = links
        self._hub = hub

    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        """See ``session.Network``."""
        self._links.add(self._rank, inbound)
        return self._hub.join(self._rank, reactor, events, status)

    async def connect(self, peer: int) -> Link:
        """See ``session.Network``."""
        return await self._links.connect(self._rank, peer)

    def adopt(self, connection: Connection, peer: int, purpose: Purpose) -> None:
        """Never called: there are no sockets."""
        raise TransportError("a world in memory has no sockets")

    def forget(self, peer: int) -> None:
        """See ``session.Network``."""
        self._links.forget(self._rank, peer)

    def sever(self) -> None:
        """See ``session.Network``."""
        self._links.sever(self._rank)

    def room(self, nbytes: int) -> Array | None:
        """See ``session.Network``."""
        return self._links.room(self._rank, nbytes)

    def room_nbytes(self) -> int:
        """See ``session.Network``."""
        return self._links.room_nbytes(self._rank)

    def describe(self, peer: int) -> str:
        """See ``session.Network``."""
        return "memory"

    def descriptors(self) -> list[int]:
        """None."""
        return []

    async def leave(self) -> None:
        """There is no store."""

    async def close(self) -> None:
        """See ``session.Network``."""
        await self._links.close(self._rank)


class MemoryWorld(Sequence[Communicator]):
    """The communicators of all ranks, by rank, and the faults that can be brought about among them.

    Args:
        size: number of ranks.
        hosts: number of hosts on which the ranks pretend to be.
        strategy: see ``Communicator.set_strategy``.
        timeout: default timeout of the collectives, in seconds or as a ``timedelta``.
        stall_after: after how long a wait is reported, likewise.
        transport: ``memory``, or ``shm`` for links through shared memory, as processes of one host have them.
        monitor: whether the ranks count and time what they do, for ``Communicator.statistics``.
        devices: the device of each rank, None for one that has none; closed with the communicators. No rank has one if
            it is left out.
        maker: of the backends that run collectives on the devices.
        device_transport: the setting ``transport``, as far as it concerns the devices.
        reactor: that of all ranks, driven by whoever gives it; by the running loop, if none is given.

    Raises:
        ConfigError: the strategy or the transport of devices cannot work.
    """

    def __init__(
        self,
        size: int,
        *,
        hosts: int = 1,
        strategy: Any = "auto",
        timeout: Seconds = 300.0,
        stall_after: Seconds = 10.0,
        transport: Literal["memory", "shm"] = "memory",
        monitor: bool = True,
        devices: Sequence[Device | None] | None = None,
        maker: BackendMaker | None = None,
        device_transport: str = "auto",
        reactor: Reactor | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        limit_s, stall_s = seconds_of(timeout), seconds_of(stall_after)
        layout = Layout.even(size, hosts, os.cpu_count() or 0)
        setups = _set_up(layout, devices, maker, device_transport)
        self._driver: LoopDriver | None = None
        if reactor is None:
            reactor = Reactor()
            self._driver = LoopDriver(reactor, loop, looks=1)
        self._links: Links = InSharedMemory(loop, reactor, size) if transport == "shm" else InMemory(reactor)
        self._hub = MemoryHub(size)
        job = secrets.token_hex(8)
        try:
            sessions = [
                Session(
                    rank,
                    layout,
                    _Way(rank, self._links, self._hub, job),
                    loop,
                    reactor,
                    timeout_s=limit_s,
                    stall_after_s=stall_s,
                    monitor=monitor,
                    devices=setups[rank],
                )
                for rank in range(size)
            ]
            self._comms = [Communicator(session, session.world, strategy) for session in sessions]
        except BaseException:
            if self._driver is not None:
                self._driver.close()
            raise

    def __getitem__(self, rank: Any) -> Any:
        return self._comms[rank]

    def __len__(self) -> int:
        return len(self._comms)

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._comms)

    def kill(self, rank: int) -> None:
        """The process of ``rank`` dies: its links break, the others hear of it."""
        self._links.cut(rank, reason=f"rank {rank} was killed")
        self._hub.kill(rank)

    def unplug(self, rank: int) -> None:
        """Every open link of ``rank`` breaks; the rank lives, and new links can be opened."""
        self._links.unplug(rank)

    async def close(self) -> None:
        """Close every communicator."""
        ends = await asyncio.gather(*(comm.close() for comm in self._comms), return_exceptions=True)
        if self._driver is not None:
            self._driver.close()
        for error in ends:
            if error is not None:
                raise error


def _set_up(
    layout: Layout, devices: Sequence[Device | None] | None, maker: BackendMaker | None, transport: str
) -> list[DeviceSetup]:
    """What each rank knows of the devices, as if it had been told at join."""
    given = [None] * layout.size if devices is None else devices
    if len(given) != layout.size:
        raise ValueError(f"{layout.size} ranks need as many devices, or None, not {len(given)}")
    nothing = DeviceReport(lack="the test gave it no device")
    reports = tuple(nothing if device is None else device.report for device in given)
    choose(reports, layout, transport)
    return [DeviceSetup(device, reports, None if device is None else maker, transport) for device in given]


@asynccontextmanager
async def world(size: int, **options: Any) -> AsyncIterator[MemoryWorld]:
    """A world of ``size`` ranks in this process, on the running loop; closed at the end. Options: ``MemoryWorld``."""
    made = MemoryWorld(size, **options)
    try:
        yield made
    finally:
        await made.close()


async def run_ranks(comms: Sequence[Communicator], main: Callable[[Communicator], Awaitable[T]]) -> list[T]:
    """Run ``main(comm)`` for every rank at the same time; the results by rank. The first error ends all.

    Raises:
        Exception: the error of the rank that failed, or of one of them if all failed with errors of one kind.
        ExceptionGroup: ranks failed with errors of several kinds.
    """
    try:
        async with asyncio.TaskGroup() as ranks:
            tasks = [ranks.create_task(_as_coroutine(main(comm))) for comm in comms]
    except BaseExceptionGroup as group:
        failure = group.exceptions[0]
        if any(type(error) is not type(failure) for error in group.exceptions):
            raise
    else:
        return [task.result() for task in tasks]
    raise failure  # out of the handler, which would make the group its context


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
