"""Joining a world: ``kfcomm.init``, from arguments and environment to a communicator."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Unpack, cast

from kfcomm.arrays.devices import Device, DeviceReport, routes
from kfcomm.common import do_nothing
from kfcomm.common.imports import is_installed, lacking
from kfcomm.common.tracebacks import bare, hide_own_frames, terse
from kfcomm.engine.engine import SessionOptions
from kfcomm.engine.session import Session
from kfcomm.errors import ConfigError, KfcommError
from kfcomm.monitor import serving
from kfcomm.monitor.dumps import install_signal
from kfcomm.rendezvous import exit_report
from kfcomm.rendezvous.authentication import conceal
from kfcomm.rendezvous.saved_costs import describe_saved
from kfcomm.rendezvous.settings import Arguments, Settings, detect, misspelt
from kfcomm.strategies.plugins import check
from kfcomm.transports.base import DeviceSetup
from kfcomm.transports.loop_driver import LoopDriver
from kfcomm.transports.reactor import Reactor
from kfcomm.types import UNMEASURED, Layout
from kfcomm.world.communicator import Communicator

if TYPE_CHECKING:
    from kfcomm.engine.entrance import Exchange
    from kfcomm.engine.interfaces import Alone
    from kfcomm.engine.network import SocketNetwork
    from kfcomm.transports.base import BackendMaker

logger = logging.getLogger("kfcomm")

AWAIT = "write comm = await kfcomm.init(), or async with kfcomm.init() as comm; kfcomm.sync.init() needs neither"


class Accelerator(NamedTuple):
    """Device of this rank, if any; its report for the other ranks; and the maker of backends on it."""

    device: Device | None
    report: DeviceReport
    maker: BackendMaker | None

    async def close(self) -> None:
        """Close a device that no session has taken over."""
        if self.device is not None:
            await asyncio.to_thread(self.device.close)


def look_for_device(settings: Settings) -> Accelerator:
    """Find the device of this rank. Blocks for as long as the import of a framework takes."""
    if settings.device == "none":
        return Accelerator(None, DeviceReport(lack="device 'none' was asked for"), None)
    # By the launcher's local rank: before joining, this process does not know which ranks are on its host.
    device, report = routes.find(settings.device, settings.local_rank)
    if not report.backend:
        return Accelerator(device, report, None)
    from kfcomm.transports.nccl import Nccl

    return Accelerator(device, report, Nccl())


def set_up_devices(
    settings: Settings, own: Accelerator, reports: Sequence[DeviceReport], layout: Layout, transport: str
) -> DeviceSetup:
    """Devices of a world that all ranks have joined; rank 0 logs the route of device memory, and what slows it."""
    setup = DeviceSetup(own.device, tuple(reports), own.maker, transport)
    choice = setup.route(range(layout.size), layout)
    if settings.rank == 0 and choice is not None:
        logger.info("device memory goes by %s", choice)
        for caution in routes.cautions(
            reports, transport, is_device_named=settings.device != "auto", route=choice.route
        ):
            logger.warning("%s", caution)
    return setup


class Init:
    """Result of ``kfcomm.init``: await it, or use it in ``async with``."""

    def __init__(self, settings: Settings, reactor: Reactor | None = None, exchange: Exchange | None = None) -> None:
        self.settings = settings
        self._reactor = reactor  # the caller drives it; None for one that the event loop drives
        self._exchange = exchange  # where the ranks find each other; None for a store of kfcomm
        self._made: Communicator | None = None

    def __await__(self) -> Generator[Any, None, Communicator]:
        try:
            return (yield from self._begin().__await__())
        except KfcommError as error:
            raise self._shown(error)

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(Communicator, name):
            raise AttributeError(f"no communicator has a {name!r} yet: {AWAIT}", name=name, obj=self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __enter__(self) -> NoReturn:
        raise TypeError(f"kfcomm.init is asynchronous: {AWAIT}")

    def __exit__(self, *_: object) -> None:
        """Never called: see ``__enter__``."""

    async def __aenter__(self) -> Communicator:
        try:
            self._made = await self._begin()
        except KfcommError as error:
            raise self._shown(error)
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)

    def _shown(self, error: KfcommError) -> KfcommError:
        return bare(error) if self.settings.traceback == "short" else error

    async def _begin(self) -> Communicator:
        if not self.settings.elastic:
            return await self._connected()
        from kfcomm.elastic.communicator import ElasticCommunicator

        if self.settings.join is not None:
            await asyncio.to_thread(_make_ready, self.settings)
        return cast("Communicator", ElasticCommunicator(await self._connected()))  # it has all that one has

    async def _connected(self) -> Communicator:
        if self.settings.device == "none":
            own = look_for_device(self.settings)
        else:  # the import of a framework takes seconds
            own = await asyncio.to_thread(look_for_device, self.settings)
        try:
            return await self._join(own)
        except BaseException:
            await own.close()
            raise

    async def _in_epoch(self, network: Any, make: Callable[[Any], Communicator]) -> Communicator:
        if self.settings.join is None:
            return make(network)
        from kfcomm.elastic.entering import entered

        return await entered(network, make)

    async def _join(self, own: Accelerator) -> Communicator:
        settings = self.settings
        network = await _network(settings, own, self._exchange)
        loop = asyncio.get_running_loop()
        reactor = self._reactor
        closed: Callable[[], None] = do_nothing
        if reactor is None:
            reactor = Reactor()
            closed = LoopDriver(reactor, loop).close
        options = SessionOptions(loop, reactor, settings.timeout_s, settings.stall_after_s, settings.monitor, closed)
        try:
            comm = await self._in_epoch(network, partial(_communicator, settings, own, options))
        except BaseException:
            closed()
            raise
        session = comm._session
        try:
            if session.rank == 0 and network.layout.costs != UNMEASURED:
                logger.info(
                    "rank 0: 'auto' counts with costs that kfcomm probe --keep measured (%s)",
                    describe_saved() or "on other hosts",
                )
            if settings.timeline is not None:
                from kfcomm.monitor.timeline import Timeline

                Timeline.of(session, settings.timeline)
            serving.attend(session, settings, comm)
        except BaseException:
            await session.close()
            raise
        if settings.store is not None and settings.token is not None:
            conceal(os.environ, settings.store, settings.token)
        return comm


def _communicator(
    settings: Settings, own: Accelerator, options: SessionOptions, network: Alone | SocketNetwork
) -> Communicator:
    """Make the communicator of this rank in an epoch."""
    devices = set_up_devices(settings, own, network.reports, network.layout, network.device_transport)
    session = Session(network.births.index(settings.rank), network, devices, options, network.epoch)
    return Communicator(session, session.world, network.strategy)


def _make_ready(settings: Settings) -> None:
    """Do what a joining rank can do before it is admitted: the others train now, and wait for it then."""
    from kfcomm.elastic.state import make_ready
    from kfcomm.transports.registry import selected

    for transport in selected(settings.links):
        transport.load()
    serving.load()
    make_ready()


async def _network(settings: Settings, own: Accelerator, exchange: Exchange | None) -> Alone | SocketNetwork:
    """Network to the other ranks; a single process that no other can join imports none of it."""
    can_grow = settings.elastic and settings.store is not None
    if settings.size == 1 and not can_grow:
        from kfcomm.engine.interfaces import Alone

        return Alone(settings, own.report)
    from kfcomm.engine import entrance

    if exchange is None:
        return await entrance.join(settings, own.report)
    return await entrance.meet(settings, own.report, exchange)


def init(**arguments: Unpack[Arguments]) -> Init:
    """Join the world that this process was started in; alone it is a world of one.

    Use as ``async with kfcomm.init() as comm`` or ``comm = await kfcomm.init()``. What is not given is found in the
    environment: ``KFCOMM_*``, then the variables of the launcher (``kfcomm env`` explains it). ``size=1`` alone asks
    for a world of one.

    Returns:
        What is awaited gives a ``Communicator``; with ``elastic=True`` a ``kfcomm.elastic.ElasticCommunicator``.

    Raises:
        ConfigError: at once, if the settings cannot work, or the variables of a launcher are incomplete.
        RendezvousError: when awaited, if the peers do not find or accept each other.
    """
    try:
        return Init(prepare(**arguments))
    except KfcommError as error:
        raise error if is_full(arguments) else terse(error)


def is_full(arguments: Mapping[str, Any]) -> bool:
    """Whether tracebacks are to show all, where it is not known yet which settings hold."""
    return (arguments.get("traceback") or os.environ.get("KFCOMM_TRACEBACK")) == "full"


def prepare(**arguments: Unpack[Arguments]) -> Settings:
    """Settings for these arguments in this environment, checked as far as that needs no other process."""
    if not is_full(arguments):
        hide_own_frames()
    settings = detect(os.environ, **arguments)
    if settings.job is None and settings.rank == 0:  # else the launcher has said so, or rank 0 does
        for line in misspelt(os.environ):
            logger.warning("%s", line)
    check(settings.strategy)  # an unknown name is refused before anything is open
    if settings.checksum and not is_installed("xxhash"):
        raise ConfigError(lacking("checksum=True", "xxhash"))
    if settings.timeline is not None:
        from kfcomm.monitor.timeline import check_folder

        check_folder(settings.timeline)
    serving.check(settings)
    install_signal(settings.dump_dir, is_launched=settings.launcher is not None)
    exit_report.connect(settings.launcher, settings.rank)
    return settings
