"""A world in memory for programs without an event loop: all ranks share one engine lock, used from as many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kfcomm.arrays.devices import Device
from kfcomm.elastic.communicator import ElasticCommunicator as AsyncElastic
from kfcomm.sync.communicator import Communicator
from kfcomm.sync.driver import Driver
from kfcomm.sync.elastic import ElasticCommunicator
from kfcomm.sync.thread import IoThread
from kfcomm.testing.worlds import MemoryWorld
from kfcomm.transports.base import BackendMaker

if TYPE_CHECKING:
    from kfcomm.types import Seconds

T = TypeVar("T")


class SyncWorld(Sequence[Communicator]):
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

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._comms)

    def _shown(self, comm: Any) -> Communicator:
        if isinstance(comm, AsyncElastic):
            elastic: Any = ElasticCommunicator(self._driver, comm)
            return cast("Communicator", elastic)
        return Communicator(self._driver, comm)

    def join(self, birth: int) -> Communicator:
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


def run_threads(comms: Sequence[Communicator], main: Callable[[Communicator], T]) -> list[T]:
    """Run ``main(comm)`` for every rank at the same time, each on a thread of its own; the results by rank.

    When a rank fails, its communicator is closed, which ends what the others wait for with it; the first error
    is raised when all threads have ended.
    """
    failures: list[BaseException] = []

    def one(comm: Communicator) -> T:
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
