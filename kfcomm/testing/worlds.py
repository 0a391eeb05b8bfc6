"""A world in memory: all ranks on one event loop, no sockets, no processes, and faults on request."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, cast

from kfcomm.arrays.devices import Device, DeviceReport
from kfcomm.arrays.devices.routes import choose
from kfcomm.common.sizes import seconds_of
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.engine.control.base import ControlEvents, ControlPlane, StatusSource
from kfcomm.engine.control.memory import MemoryHub
from kfcomm.engine.interfaces import Door, Membership
from kfcomm.engine.session import Session
from kfcomm.errors import TransportError
from kfcomm.testing.links import InMemory, InSharedMemory, Links
from kfcomm.testing.store import MemoryStore, Welcome
from kfcomm.transports.base import BackendMaker, DeviceSetup, Link, Waiter
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.endpoint import ShmEndpoint
from kfcomm.transports.shm.heap import Array
from kfcomm.transports.sockets import Connection
from kfcomm.types import Candidate, Layout, Seconds, Wanted, override
from kfcomm.world.communicator import ARRIVED, Communicator
from kfcomm.world.epochs import settle

T = TypeVar("T")


_NO_DEVICE = DeviceReport(lack="the test gave it no device")


class Epoch:
    """Links and control planes of the ranks of one epoch.

    Attributes:
        births: the ranks that they had in the first one.
    """

    def __init__(self, world: MemoryWorld, births: tuple[int, ...], layout: Layout, job: str, number: int = 0) -> None:
        self.world = world
        self.births = births
        self.layout = layout
        self.job = job
        self.number = number
        self.links = world.new_links(births)
        self.hub = world.new_hub(births)
        self.joined: set[int] = set()
        self._arrival = asyncio.Event()
        self._next: dict[tuple[int, ...], Epoch] = {}

    async def is_there(self, rank: int) -> None:
        """Wait until a rank has joined, or is dead: a process listens before the others know of it."""
        while rank not in self.joined and self.births[rank] not in self.world.dead:
            await self._arrival.wait()

    def arrived(self) -> None:
        """A rank has joined, or died."""
        self._arrival.set()
        self._arrival = asyncio.Event()

    def kill(self, birth: int) -> None:
        """The process that was this rank in the first epoch dies."""
        self.arrived()
        if birth in self.births:
            rank = self.births.index(birth)
            if rank in self.joined:
                self.links.cut(rank, reason=f"rank {rank} was killed")
            self.hub.kill(rank)
        for one in self._next.values():
            one.kill(birth)

    def next(self, members: tuple[int, ...], joiners: Sequence[Candidate]) -> Epoch:
        """The epoch of those that go on, and of new ones; the same one for all of them."""
        births = (*(self.births[rank] for rank in members), *(one.birth for one in joiners))
        if births not in self._next:
            hosts = [self.layout.hosts[rank] for rank in members] + [self.layout.hosts[0]] * len(joiners)
            layout = Layout.of(hosts, self.layout.num_cpus, self.layout.costs)
            self._next[births] = made = Epoch(self.world, births, layout, self.job, self.number + 1)
            for birth in self.world.dead:
                made.kill(birth)
        return self._next[births]


class _Door(Door):
    """Entry of one rank to the next epoch."""

    part = b""

    def __init__(self, rank: int, epoch: Epoch) -> None:
        self._rank = rank
        self._epoch = epoch

    @override
    def enter(self, doors: Mapping[int, bytes], joiners: Sequence[Candidate] = ()) -> _Way:
        members = tuple(doors)
        return _Way(members.index(self._rank), self._epoch.next(members, joiners))

    async def close(self) -> None:
        """Nothing was opened."""


class _Members(Membership):
    """The membership of one rank's network."""

    def __init__(self, rank: int, epoch: Epoch) -> None:
        self._rank = rank
        self._epoch = epoch
        self._store = epoch.world.store

    def may_live(self, peer: int) -> bool:
        """Never: ranks in memory do not search for others, see ``MemoryControl.linger``."""
        return False

    async def candidates(self, known: Collection[int]) -> list[Candidate]:
        return await self._store.candidates({*known, *self._epoch.births})

    async def welcome(self, num_old: int, births: Collection[int], strategy: str) -> None:
        await self._store.welcome(births, Welcome(self._epoch, num_old, strategy))

    async def give_up(self, births: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def let_go(self, births: Collection[int]) -> None:
        """Do nothing: this world has no launcher."""

    async def wanted(self, known: Wanted) -> Wanted:
        return await self._store.wanted(known)

    async def want_size(self, size: int) -> None:
        await self._store.want_size(size)

    async def want_replaced(self, birth: int) -> None:
        await self._store.want_replaced(birth)

    async def has_word(self, living: Sequence[int], rivals: Sequence[int]) -> bool:
        # there is no launcher, which could end rivals
        if rivals:
            return False
        births = [self._epoch.births[rank] for rank in living]
        return await self._store.has_word(self._epoch.births[self._rank], births, self._epoch.number + 1)


class _Way:
    """Network of one rank; implements ``interfaces.Network``."""

    def __init__(self, rank: int, epoch: Epoch) -> None:
        self.layout = epoch.layout
        self.births = epoch.births
        self.epoch = epoch.number
        self.num_old = 0
        self.reports = tuple(epoch.world.reports.get(birth, _NO_DEVICE) for birth in epoch.births)
        self.job = epoch.job
        self._epoch = epoch
        self._rank = rank
        self._links = epoch.links
        self._hub = epoch.hub
        self.membership: Membership = _Members(rank, epoch)

    def start(
        self, inbound: Waiter, reactor: Reactor, events: ControlEvents, status: StatusSource
    ) -> ControlPlane | None:
        self._links.add(self._rank, inbound)
        self._epoch.joined.add(self._rank)
        self._epoch.arrived()
        plane = self._hub.join(self._rank, reactor, events, status)
        birth = self.births[self._rank]
        if birth in self._epoch.world.dead:
            self._epoch.kill(birth)
        return plane

    async def open_door(self, epoch: int) -> _Door:
        return _Door(self._rank, self._epoch)

    async def connect(self, peer: int) -> Link:
        await self._epoch.is_there(peer)
        if peer not in self._epoch.joined:
            raise TransportError(f"rank {peer} is not in this world")
        return await self._links.connect(self._rank, peer)

    def adopt(self, connection: Connection, peer: int, purpose: int) -> None:
        """Never called: there are no sockets."""
        raise TransportError("a world in memory has no sockets")

    def forget(self, peer: int) -> None:
        self._links.forget(self._rank, peer)

    def sever(self) -> None:
        self._links.sever(self._rank)

    def room(self, nbytes: int) -> Array | None:
        return self._links.room(self._rank, nbytes)

    def room_nbytes(self) -> int:
        return self._links.room_nbytes(self._rank)

    def describe(self, peer: int) -> str:
        return "memory"

    def descriptors(self) -> list[int]:
        """None."""
        return []

    async def leave(self) -> None:
        """Do nothing: no other process keeps a record of this one."""

    async def close(self) -> None:
        await self._links.close(self._rank)


class MemoryWorld(Sequence[Communicator]):
    """The communicators of all ranks, by rank, and the faults that can be brought about among them.

    Ranks are those of the first epoch, whatever follows.

    Args:
        size: number of ranks.
        hosts: number of hosts on which the ranks pretend to be.
        num_cpus: processors of each; of this machine, if left out.
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
        elastic: the communicators are those of ``kfcomm.init(elastic=True)``.

    Raises:
        ConfigError: the strategy or the transport of devices cannot work.
    """

    def __init__(
        self,
        size: int,
        *,
        hosts: int = 1,
        num_cpus: int | None = None,
        strategy: Any = "auto",
        timeout: Seconds = 300.0,
        stall_after: Seconds = 10.0,
        transport: Literal["memory", "shm"] = "memory",
        monitor: bool = True,
        devices: Sequence[Device | None] | None = None,
        maker: BackendMaker | None = None,
        device_transport: str = "auto",
        reactor: Reactor | None = None,
        elastic: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        limit_s, stall_s = seconds_of(timeout), seconds_of(stall_after)
        layout = Layout.even(size, hosts, (os.cpu_count() or 0) if num_cpus is None else num_cpus)
        setups = _set_up(layout, devices, maker, device_transport)
        self._driver: LoopDriver | None = None
        if reactor is None:
            reactor = Reactor()
            self._driver = LoopDriver(reactor, loop, looks=1)
        self.dead: set[int] = set()
        self._latest: dict[int, ShmEndpoint] = {}
        self.store = self.new_store()
        self.reports = {rank: setup.reports[rank] for rank, setup in enumerate(setups)}
        self._settings = (limit_s, stall_s, monitor)
        self._reactor, self._loop, self._transport = reactor, loop, transport
        self._first = Epoch(self, tuple(range(size)), layout, secrets.token_hex(8))
        try:
            sessions = [
                Session(
                    rank,
                    layout,
                    _Way(rank, self._first),
                    loop,
                    reactor,
                    timeout_s=limit_s,
                    stall_after_s=stall_s,
                    monitor=monitor,
                    devices=setups[rank],
                )
                for rank in range(size)
            ]
            self._is_elastic = elastic
            self._all = [Communicator(session, session.world, strategy) for session in sessions]
            self._comms = [self._shown(comm) for comm in self._all]
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
        """The process of ``rank`` dies: its links break, the others hear of it, in whatever epoch they are."""
        self.dead.add(rank)
        self._first.kill(rank)

    async def join(self, birth: int) -> Communicator:
        """Add a process, without a device, and wait until an ``Elastic`` of the ranks admits it.

        Args:
            birth: its uid, which no other process of this world has or had.
        """
        epoch, num_old, strategy = await self.store.ask_in(birth)
        way = _Way(epoch.births.index(birth), epoch)
        way.num_old = num_old
        limit_s, stall_s, monitor = self._settings
        session = Session(
            epoch.births.index(birth), epoch.layout, way, self._loop, self._reactor, timeout_s=limit_s,
            stall_after_s=stall_s, monitor=monitor, devices=DeviceSetup.none(epoch.layout.size), epoch=epoch.number,
        )  # fmt: skip
        comm = Communicator(session, session.world, strategy)
        settle(session, comm.barrier(ARRIVED))
        self._all.append(comm)
        return self._shown(comm)

    def _shown(self, comm: Communicator) -> Communicator:
        """As the program has it."""
        return cast("Communicator", ElasticCommunicator(comm)) if self._is_elastic else comm

    def unplug(self, rank: int) -> None:
        """Every open link of ``rank`` in the first epoch breaks; the rank lives, and new links can be opened."""
        self._first.links.unplug(rank)

    def new_links(self, births: tuple[int, ...]) -> Links:
        """Make the links of an epoch."""
        if self._transport == "shm":
            return InSharedMemory(self._loop, self._reactor, births, self._latest)
        return InMemory(self._reactor)

    def new_hub(self, births: tuple[int, ...]) -> MemoryHub:
        """Make what joins the control planes of an epoch."""
        return MemoryHub(len(births))

    def new_store(self) -> MemoryStore:
        """Make the store of the membership."""
        return MemoryStore()

    async def close(self) -> None:
        """Close every communicator."""
        ends = await asyncio.gather(*(comm.close() for comm in self._all), return_exceptions=True)
        if self._driver is not None:
            self._driver.close()
        for error in ends:
            if error is not None:
                raise error


def _set_up(
    layout: Layout, devices: Sequence[Device | None] | None, maker: BackendMaker | None, transport: str
) -> list[DeviceSetup]:
    """Each rank's view of the devices, as the ranks exchange it at join."""
    given = [None] * layout.size if devices is None else devices
    if len(given) != layout.size:
        raise ValueError(f"{layout.size} ranks need as many devices, or None, not {len(given)}")
    reports = tuple(_NO_DEVICE if device is None else device.report for device in given)
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
