"""Worlds in one process: all ranks on one event loop, or on threads that share one engine; faults on request."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar, cast

from kfcomm.arrays.devices import Device
from kfcomm.arrays.devices.routes import choose
from kfcomm.common.sizes import seconds_of
from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.entering import entered
from kfcomm.engine.control.memory import MemoryHub
from kfcomm.engine.engine import SessionOptions
from kfcomm.engine.interfaces import Network
from kfcomm.engine.session import Session
from kfcomm.sync.communicator import Communicator as SyncCommunicator
from kfcomm.sync.driver import Driver
from kfcomm.sync.elastic import ElasticCommunicator as SyncElastic
from kfcomm.sync.thread import IoThread
from kfcomm.testing.network import NO_DEVICE, InMemory, InSharedMemory, Links, MemoryEpoch
from kfcomm.testing.store import MemoryStore
from kfcomm.transports.base import BackendMaker, DeviceSetup
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.transports.shm.endpoint import ShmEndpoint
from kfcomm.types import Layout, Seconds
from kfcomm.world.communicator import Communicator

T = TypeVar("T")


class MemoryWorld(Sequence[Communicator]):
    """The communicators of all ranks, by rank, and the faults that can be brought about among them.

    Ranks are those of the first epoch, in every epoch.

    Args:
        size: number of ranks.
        hosts: number of hosts that the ranks simulate.
        num_cpus: processors of each; of this machine, if left out.
        strategy: see ``Communicator.set_strategy``.
        timeout: default timeout of the collectives, in seconds or as a ``timedelta``.
        stall_after: a wait of this length is reported; likewise.
        transport: ``memory``, or ``shm`` for links through shared memory, as processes of one host have them.
        monitor: whether the ranks count and time their work, for ``Communicator.statistics``.
        devices: the device of each rank, or None; closed with the communicators. By default no rank has one.
        maker: of the backends that run collectives on the devices.
        device_transport: the setting ``transport``, as far as it concerns the devices.
        reactor: of all ranks, driven by its owner; by default one that the running loop drives.
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
        self._first = MemoryEpoch(self, tuple(range(size)), layout, secrets.token_hex(8))
        self._is_elastic = elastic
        try:
            self._all = [self._made(self._first.network_of(r), r, setups[r], strategy) for r in range(size)]
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
        """Kill ``rank``: its links break, and the others hear of it, in any epoch."""
        self.dead.add(rank)
        self._first.kill(rank)

    async def join(self, birth: int) -> Communicator:
        """Add a process, without a device, and wait until an ``Elastic`` of the ranks admits it.

        ``birth`` is its uid, which no other process of this world has or had.
        """
        admitting, inviting = asyncio.ensure_future(self.store.ask_in(birth)), self.store.invitation(birth)
        try:
            await asyncio.wait([admitting, inviting], return_when=asyncio.FIRST_COMPLETED)
            epoch, num_old, strategy = (admitting if admitting.done() else inviting).result()
            network = epoch.network_of(epoch.births.index(birth), num_old, strategy)
            if not admitting.done():
                network.admitting, network.is_invited = admitting, True

            def make(network: Any) -> Communicator:
                none = DeviceSetup.none(network.layout.size)
                return self._made(network, network.births.index(birth), none, network.strategy, network.epoch)

            comm = await entered(network, make)
        except BaseException:
            admitting.cancel()
            await asyncio.gather(admitting, return_exceptions=True)
            raise
        self._all.append(comm)
        return self._shown(comm)

    def _made(self, network: Network, rank: int, devices: DeviceSetup, strategy: Any, number: int = 0) -> Communicator:
        limit_s, stall_s, monitor = self._settings
        options = SessionOptions(self._loop, self._reactor, limit_s, stall_s, monitor)
        session = Session(rank, network, devices, options, number)
        return Communicator(session, session.world, strategy)

    def _shown(self, comm: Communicator) -> Communicator:
        """Return the communicator as the program gets it."""
        return cast("Communicator", ElasticCommunicator(comm)) if self._is_elastic else comm

    def unplug(self, rank: int) -> None:
        """Break every open link of ``rank`` in the first epoch; the rank lives, and new links can be opened."""
        self._first.links.unplug(rank)

    def new_links(self, births: tuple[int, ...]) -> Links:
        """Make the links of an epoch."""
        if self._transport == "shm":
            return InSharedMemory(self._loop, self._reactor, births, self._latest)
        return InMemory(self._reactor)

    def new_hub(self, births: tuple[int, ...]) -> MemoryHub:
        """Make the hub of the control planes of an epoch."""
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
    reports = tuple(NO_DEVICE if device is None else device.report for device in given)
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


class SyncWorld(Sequence[SyncCommunicator]):
    """The blocking communicators of all ranks, by rank, and the faults of ``MemoryWorld``."""

    def __init__(self, driver: Driver, world: MemoryWorld) -> None:
        self._io = driver.io
        self._world = world
        self._driver = driver
        self._comms = [self._shown(comm) for comm in world]

    def __getitem__(self, rank: Any) -> Any:
        return self._comms[rank]

    def __len__(self) -> int:
        return len(self._comms)

    def __iter__(self) -> Iterator[SyncCommunicator]:
        return iter(self._comms)

    def _shown(self, comm: Any) -> SyncCommunicator:
        if isinstance(comm, ElasticCommunicator):
            elastic: Any = SyncElastic(self._driver, comm)
            return cast("SyncCommunicator", elastic)
        return SyncCommunicator(self._driver, comm)

    def join(self, birth: int) -> SyncCommunicator:
        """Add a process, and wait until the ranks admit it; see ``MemoryWorld.join``."""
        return self._shown(self._io.wait_for(lambda: self._world.join(birth)))

    def kill(self, rank: int) -> None:
        """End the process of ``rank``, as ``MemoryWorld.kill``."""
        self._io.run(self._world.kill, rank)

    def unplug(self, rank: int) -> None:
        """Break every open link of ``rank``, as ``MemoryWorld.unplug``."""
        self._io.run(self._world.unplug, rank)


@contextmanager
def sync_world(
    size: int, *, hosts: int = 1, strategy: Any = "auto", timeout: Seconds = 300.0, stall_after: Seconds = 10.0,
    devices: Sequence[Device | None] | None = None, maker: BackendMaker | None = None, device_transport: str = "auto",
    elastic: bool = False,
) -> Iterator[SyncWorld]:  # fmt: skip
    """A world of ``size`` ranks in this process, on an I/O thread of its own; closed at the end. See ``MemoryWorld``.

    Each rank belongs on a thread: a blocking call waits for those of the other ranks. See ``run_threads``.
    """

    async def make() -> MemoryWorld:
        return MemoryWorld(
            size, hosts=hosts, strategy=strategy, timeout=timeout, stall_after=stall_after, devices=devices,
            maker=maker, device_transport=device_transport, reactor=driver.reactor, elastic=elastic,
        )  # fmt: skip

    driver = Driver(IoThread())
    try:
        world = driver.io.wait_for(make)
        try:
            yield SyncWorld(driver, world)
        finally:
            driver.io.wait_for(world.close)
    finally:
        driver.stop()


def run_threads(comms: Sequence[SyncCommunicator], main: Callable[[SyncCommunicator], T]) -> list[T]:
    """Run ``main(comm)`` for every rank at the same time, each on a thread of its own; the results by rank.

    When a rank fails, its communicator is closed, which ends what the others wait for with it; the first error
    is raised when all threads have ended.
    """
    failures: list[BaseException] = []

    def one(comm: SyncCommunicator) -> T:
        try:
            return main(comm)
        except BaseException as error:
            failures.append(error)
            comm.close()
            raise

    with ThreadPoolExecutor(len(comms), thread_name_prefix="kfcomm-rank") as pool:
        ranks = [pool.submit(one, comm) for comm in comms]
    if failures:
        raise failures[0]
    return [rank.result() for rank in ranks]
